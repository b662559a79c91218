"""Plain PyTorch scripts beside what they are in a session: few lines differ, losses don't, and they resume."""

import contextlib
import difflib
import io
import os
import runpy
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from manyhands.core.errors import EXIT_SAVED
from manyhands.data.order import Order
from tests.processes.ranks import run_on_ranks

SCRIPTS = Path(__file__).parents[1] / "scripts_of_users"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
MOST_LINES = 6


class _OurOrder:
    """The batches that a session takes of the same samples, an epoch each time."""

    def __init__(self, length, batch):
        self.order, self.epoch = Order(length, batch, seed=0), 0

    def __iter__(self):
        yield from (samples.tolist() for samples in self.order.batches(self.epoch))
        self.epoch += 1

    def __len__(self):
        return self.order.steps_per_epoch


class InOurOrder(DataLoader):
    """A loader whose shuffled batches are the session's."""

    def __init__(self, dataset, batch_size, shuffle=False):
        if shuffle:
            super().__init__(dataset, batch_sampler=_OurOrder(len(dataset), batch_size))
        else:
            super().__init__(dataset, batch_size=batch_size)


def _parts(name):
    """The two scripts in a file, which share what comes before their loops: the plain one, and in a session."""
    head, loops = (SCRIPTS / f"{name}.py").read_text().split("# Plain\n")
    plain, moved = loops.split("# In a session\n")
    return head.replace("import manyhands\n", "") + plain, head + moved


def _printed(path):
    """What a script prints, as lines of words, and how it ends."""
    code, out = 0, io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return [line.split() for line in out.getvalue().splitlines()], code


@contextlib.contextmanager
def _stopped_at(step):
    """A scheduler's wish to stop comes in the midst of an update."""
    made = []

    def hook(*_):
        made.append(1)
        if len(made) == step:
            signal.raise_signal(signal.SIGTERM)

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _run_all(world, names, where):
    """Of each script: what it prints undisturbed, and what it prints when it is stopped and started again."""
    found = {}
    # So that a wish is heard after the update; and a report's pictures take a second and a half each time.
    variables = {"MANYHANDS_RUN__LOG_EVERY_S": "0.0001", "MANYHANDS_RUN__REPORT": "false"}
    os.environ.update(variables)
    try:
        for name in names:
            path = Path(where, f"{name}.py")
            for place in ("whole", "broken"):
                Path(where, name, place).mkdir(parents=True, exist_ok=True)
            with contextlib.chdir(Path(where, name, "whole")):
                whole = _printed(path)
            with contextlib.chdir(Path(where, name, "broken")):
                with _stopped_at(6):
                    stopped = _printed(path)
                found[name] = whole, stopped, _printed(path)
    finally:
        for name in variables:
            del os.environ[name]
    return found


def _on_ranks(size, names):
    with tempfile.TemporaryDirectory() as where:
        for name in names:
            Path(where, f"{name}.py").write_text(_parts(name)[1])
        return run_on_ranks(_run_all, size, names, where)


@pytest.fixture(scope="module")
def at_sizes():
    """Each script on two processes and on three, and one on one."""
    return {size: _on_ranks(size, NAMES[:1] if size == 1 else NAMES) for size in (1, 2, 3)}


def _results(name, at_sizes):
    """By number of processes, what each process gave of a script."""
    found = [[result[name] for result in results] for results in at_sizes.values() if name in results[0]]
    assert found
    return found


def _numbers(lines):
    return [float(word) for line in lines for word in line]


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_differ(name):
    plain, moved = ([line.strip() for line in part.splitlines() if line.strip()] for part in _parts(name))
    changed = [line for line in difflib.ndiff(plain, moved) if line.startswith("+ ")]
    assert len(NAMES) == 2
    assert 0 < len(changed) <= MOST_LINES, changed


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_the_plain_script_s_on_any_number_of_processes(name, at_sizes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.utils.data, "DataLoader", InOurOrder)
    Path("plain.py").write_text(_parts(name)[0])
    plain, _ = _printed("plain.py")
    assert len(plain) >= 3
    for ((lines, code), _, _), *others in _results(name, at_sizes):
        assert code == 0
        assert _numbers(lines) == pytest.approx(_numbers(plain), rel=1e-9, abs=1e-11)
        assert all(whole[0] == [] for whole, _, _ in others)


@pytest.mark.parametrize("name", NAMES)
def test_stopped_script_resumes_to_the_same_bits(name, at_sizes):
    for results in _results(name, at_sizes):
        for whole, stopped, resumed in results:
            assert stopped[1] == EXIT_SAVED
            assert resumed[1] == 0
            assert len(stopped[0]) < len(whole[0]) or not whole[0]
            assert resumed[0] == whole[0][len(stopped[0]) :]

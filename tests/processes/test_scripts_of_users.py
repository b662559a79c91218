"""Plain PyTorch scripts beside what they are in a session: few lines differ, losses don't, and they resume."""

import contextlib
import difflib
import io
import itertools
import runpy
import signal
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


def _printed(path, folder):
    """What a script prints, as lines of words, and how it ends."""
    code, out = 0, io.StringIO()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(out), contextlib.chdir(folder):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return [line.split() for line in out.getvalue().splitlines()], code


def _stop_in_sixth(made):
    """A hook that has a scheduler's request to stop come in the midst of an update."""
    return lambda *_: next(made) == 6 and signal.raise_signal(signal.SIGTERM)


def _run_all(world, names, where):
    """Of each script: what it prints undisturbed, and what it prints when it is stopped and started again."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # So that a request is noticed after the update; and a report's pictures take a second and a half each time.
        patch.setenv("MANYHANDS_RUN__LOG_EVERY_S", "0.0001")
        patch.setenv("MANYHANDS_RUN__REPORT", "false")
        for name in names:
            path, broken = where / f"{name}.py", where / name / "broken"
            whole = _printed(path, where / name / "whole")
            with register_optimizer_step_post_hook(_stop_in_sixth(itertools.count(1))):
                stopped = _printed(path, broken)
            found[name] = whole, stopped, _printed(path, broken)
    return found


@pytest.fixture(scope="module")
def at_sizes(tmp_path_factory):
    """Each script on two processes and on three, and one on one."""
    found = {}
    for size, names in {1: NAMES[:1], 2: NAMES, 3: NAMES}.items():
        where = tmp_path_factory.mktemp("scripts")
        for name in names:
            (where / f"{name}.py").write_text(_parts(name)[1])
        found[size] = run_on_ranks(_run_all, size, names, where)
    return found


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
    monkeypatch.setattr(torch.utils.data, "DataLoader", InOurOrder)
    (tmp_path / "plain.py").write_text(_parts(name)[0])
    plain, _ = _printed(tmp_path / "plain.py", tmp_path)
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

"""Replayed passes: the updates of those that run; refused where they would be others; nothing is left behind."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from manyhands import session
from manyhands.config.load import load_job, written_values
from manyhands.core.errors import RunError, UserError
from manyhands.core.folder import RunFolder
from manyhands.core.world import World
from manyhands.train import capturing
from manyhands.train.data_setup import Objects
from manyhands.train.loop import fit
from manyhands.worker.entry import _build
from tests.processes.ranks import run_on_ranks
from tests.train.recorded import recording

SAMPLES, CLASSES = 62, 5


def _layers(*more):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), *more, nn.Flatten(), nn.Linear(384, CLASSES)
    )


def _job(folder, **train):
    flags = {"data.name": f"synthetic:{SAMPLES}x1x8x8x{CLASSES}", "run.out": str(folder), "run.report": False}
    usual = {"batch": 20, "epochs": 3, "precision": "fp32", "channels_last": False, "compile": False, "norm_group": 5}
    named = {name.replace("__", "."): value for name, value in train.items() if "__" in name}
    own = {f"train.{name}": value for name, value in (usual | train).items() if "__" not in name}
    return load_job(flags | own | named, environment={}).job


def _built(folder, model, world=None, **train):
    (Path(folder) / "ranks").mkdir(parents=True, exist_ok=True)
    return _build(_job(folder, **train), RunFolder(Path(folder)), world or World(), {"live": Objects(model)})


def _said(folder):
    lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    return [event["message"] for event in map(json.loads, lines) if "train.cuda_graphs" in event.get("message", "")]


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(capturing, "capture_for", lambda _device: recording())


def _state(trainer):
    update = trainer.update
    optimizer = [one for state in update.optimizer.state.values() for one in state.values()]
    tensors = [*trainer.network.inner.state_dict().values(), *optimizer]
    return [one.clone() for one in tensors if isinstance(one, torch.Tensor)]


def _trained(folder, model, **train):
    trainer = _built(folder, model, **train)
    passes, counted = trainer.update.gradients.instead, [0]
    fit(trainer)
    if passes:
        counted.append(passes.replays)
    assert trainer.update.gradients.instead is passes
    found = _state(trainer)
    rows = [json.loads(line) for line in trainer.folder.metrics.read_text().splitlines()]
    told = [{key: row[key] for key in row if key in {"loss", "top1", "accuracy", "samples"}} for row in rows]
    trainer.release()
    assert trainer.update.gradients.instead is None
    return found, told, counted[-1]


CASES = {
    "as they are": {},
    "accumulated, the last one smaller": {"micro_batch": 15},
    "groups that are the batch": {"norm_group": "global"},
    "clipped, adamw, smoothed": {"clip": 0.5, "optimizer": "adamw", "lr": 0.01, "label_smoothing": 0.1},
    "bf16": {"precision": "bf16"},
    "fp64": {"precision": "fp64"},
    "deterministic, accumulated": {"deterministic": True, "micro_batch": 15},
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_updates_are_those_of_the_passes_to_the_last_bit(tmp_path, recorded, name):
    """With dropout, an odd last batch in each epoch, and an evaluation between."""
    model = _layers(nn.Dropout(0.3))
    plain, told, none = _trained(tmp_path / "plain", copy.deepcopy(model), cuda_graphs=False, **CASES[name])
    found, also, replays = _trained(tmp_path / "replayed", copy.deepcopy(model), cuda_graphs=True, **CASES[name])
    per_update = 2 if "micro_batch" in CASES[name] else 1
    assert none == 0
    # 2 seeds of 2 passes for each kind were the trial.
    assert replays == 3 * 3 * per_update + 4 * per_update
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert told == also
    assert _said(tmp_path / "replayed") == ["train.cuda_graphs is true: the usual pass is replayed"]


class _Branches(nn.Module):
    """Takes another way where its inputs are bright: known to Python alone."""

    def forward(self, values):
        return values * (3.0 if values.sum() > 0 else -1.0)


class _Draws(nn.Module):
    def forward(self, values):
        return values * random.random()


class _Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, values):
        self.calls += 1
        return values / self.calls


class _Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, values):
        self.mean = 0.9 * self.mean + values.detach().mean()
        return values - self.mean


class _Moves(_Replaces):
    """The same in place, as a graph can."""

    def forward(self, values):
        self.mean.mul_(0.9).add_(values.detach().mean())
        return values - self.mean


class _Remembers(nn.Module):
    """Keeps a tensor that is no buffer, of the pass before."""

    def __init__(self):
        super().__init__()
        self.last = [torch.zeros(())]

    def forward(self, values):
        output = values - self.last[0]
        self.last[0] = values.detach().mean()
        return output


def _hooked():
    layer = nn.Identity()
    layer.register_forward_hook(lambda _layer, _inputs, output: output * 2)
    return layer


REFUSED = {
    "asks": (_Branches, "can't be captured (RuntimeError: operation not permitted when stream is capturing)"),
    "draws": (_Draws, "draws numbers that don't come from the card's own generator"),
    "counts": (_Counts, "each pass sets 3.calls,"),
    "replaces": (_Replaces, "each pass sets 3.buffers,"),
    "remembers": (_Remembers, "each pass sets 3.last,"),
    "hooks": (_hooked, "3 has hooks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replay_would_leave_out_is_refused_and_the_run_is_as_without(tmp_path, recorded, name):
    make, why = REFUSED[name]
    model, settings = _layers(make()), {"epochs": 1}
    plain, told, _ = _trained(tmp_path / "plain", copy.deepcopy(model), cuda_graphs=False, **settings)
    if name in {"counts", "remembers"}:
        plain = None  # what the network's own Python keeps is changed by whatever runs it before
    found, also, replays = _trained(tmp_path / "asked", copy.deepcopy(model), cuda_graphs=True, **settings)
    (said,) = _said(tmp_path / "asked")
    assert said.startswith("train.cuda_graphs is false: ")
    assert why in said
    assert replays == 0
    if plain:
        assert told == also
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert written_values(tmp_path / "asked" / "job.toml")["train.cuda_graphs"] is False


def test_a_branch_that_a_capture_lets_pass_is_found_by_other_samples(tmp_path, monkeypatch):
    """A graph that records past what Python asks for, as where that was computed on the processor."""
    monkeypatch.setattr(capturing, "capture_for", lambda _device: recording(lets_ask=True))

    class Flips(nn.Module):
        def forward(self, values):
            return values * (3.0 if values[0].sum() > values[-1].sum() else -1.0)

    _built(tmp_path, _layers(Flips()), cuda_graphs=True).release()
    assert "a replay gives another" in _said(tmp_path)[0]


def test_a_buffer_that_is_changed_in_its_place_is_replayed(tmp_path, recorded):
    model = _layers(_Moves())
    plain, told, _ = _trained(tmp_path / "plain", copy.deepcopy(model), cuda_graphs=False)
    found, also, replays = _trained(tmp_path / "replayed", copy.deepcopy(model), cuda_graphs=True)
    assert replays > 4
    assert told == also
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("more", [(nn.Dropout(0.3), _Moves()), (_Branches(),)])
def test_a_trial_leaves_everything_as_it_was(tmp_path, recorded, monkeypatch, more):
    seen = {}

    def watched(trainer):
        def state():
            gradients = [one.grad for one in trainer.network.inner.parameters()]
            statistics = [layer.seen for layer in trainer.network.norms.layers]
            generators = torch.get_rng_state().tolist(), random.getstate()
            return _state(trainer), (gradients, statistics), generators, trainer.progress.step

        before = state()
        trainer = capturing.captured(trainer)
        seen["before"], seen["after"] = before, state()
        return trainer

    monkeypatch.setattr("manyhands.train.job.captured", watched)
    _built(tmp_path, _layers(*more), cuda_graphs=True).release()
    (tensors, *others), (now, *others_now) = seen["before"], seen["after"]
    assert others == others_now
    assert all(torch.equal(one, other) for one, other in zip(tensors, now, strict=True))


@pytest.mark.parametrize("gain", [1.04, 1.06])
def test_auto_takes_what_is_a_twentieth_faster_and_a_run_keeps_to_that(tmp_path, recorded, monkeypatch, gain):
    monkeypatch.setattr(capturing.CaptureTrial, "_gain", lambda *_: gain)
    taken = gain > 1.05
    trainer = _built(tmp_path, _layers(), max_steps=1)
    assert (trainer.update.gradients.instead is not None) == taken
    fit(trainer)
    trainer.release()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["cuda_graphs"], plan["resolved"]["train.cuda_graphs"]) == (taken, taken)
    assert written_values(tmp_path / "job.toml")["train.cuda_graphs"] is taken
    assert f"{gain} times as fast" in _said(tmp_path)[0]
    monkeypatch.setattr(capturing.CaptureTrial, "_gain", lambda *_: pytest.fail("measured once more"))
    again = _built(tmp_path, _layers(), max_steps=2)
    assert (again.update.gradients.instead is not None) == taken
    again.release()
    # Elsewhere it goes on without, though its job.toml says what it was.
    monkeypatch.setattr(capturing, "capture_for", lambda _device: None)
    for wanted in ("auto", taken):
        elsewhere = _built(tmp_path, _layers(), max_steps=2, cuda_graphs=wanted)
        assert elsewhere.update.gradients.instead is None
        elsewhere.release()


def test_it_is_measured_on_passes_that_are_replayed(tmp_path, recorded, monkeypatch):
    found = []
    measure = capturing.CaptureTrial._gain
    monkeypatch.setattr(capturing.CaptureTrial, "_gain", lambda *given: found.append(measure(*given)) or 2.0)
    trainer = _built(tmp_path, _layers())
    assert trainer.update.gradients.instead.replays > 4 + 3
    assert found[0] > 0
    trainer.release()


def test_where_nothing_can_be_captured_nothing_is_said_unasked(tmp_path):
    trainer = _built(tmp_path, _layers())
    assert trainer.job.train.cuda_graphs == "auto"
    assert not _said(tmp_path)
    trainer.release()
    with pytest.raises(UserError, match="computes on cpu") as told:
        _built(tmp_path / "other", _layers(), cuda_graphs=True)
    assert (told.value.where, told.value.mend) == ("train.cuda_graphs", ("leave it out",))


def test_a_loop_of_ones_own_replays_nothing(tmp_path):
    data = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % CLASSES)
    for wanted in ("auto", True):
        model = _layers()
        with session(cluster__device="cpu", train__cuda_graphs=wanted) as mine:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            if wanted is True:
                with pytest.raises(UserError, match="a loop of your own"):
                    mine.prepare(model, optimizer, data, batch=10)
            else:
                mine.prepare(model, optimizer, data, batch=10)


def test_parameters_that_are_moved_end_replays(tmp_path, recorded):
    trainer = _built(tmp_path, _layers(), cuda_graphs=True)
    passes, updates = trainer.update.gradients.instead, trainer.feed.updates(0, 0)
    trainer.update(next(updates), 0)
    before = passes.replays
    weight = trainer.network.inner[0].weight
    weight.data = weight.data.clone()
    trainer.update(next(updates), 1)
    assert passes.replays == before
    trainer.release()


def test_a_layer_that_is_frozen_ends_replays(tmp_path, recorded):
    trainer = _built(tmp_path, _layers(nn.Dropout(0.3)), cuda_graphs=True)
    passes, updates = trainer.update.gradients.instead, trainer.feed.updates(0, 0)
    trainer.update(next(updates), 0)
    before = passes.replays
    next(one for one in trainer.network.inner if isinstance(one, nn.Dropout)).eval()
    trainer.update(next(updates), 1)
    assert passes.replays == before
    trainer.release()


def test_an_update_that_is_not_finite_is_left_out_as_without(tmp_path, recorded):
    found = []
    for graphs in (False, True):
        trainer = _built(tmp_path / str(graphs), _layers(), cuda_graphs=graphs)
        for step, update in enumerate(trainer.feed.updates(0, 0)):
            if step == 1:
                update.micro_batches[0].batch.images[3] = torch.nan
            trainer.update(update, step)
        found.append((_state(trainer), [one.step for one in trainer.update.left_out], trainer.update.measured.take()))
        trainer.release()
    (plain, left_out, sums), (others, also, too) = found
    assert (left_out, sums) == (also, too)
    assert left_out == [1]
    assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))


def test_a_capture_without_memory_for_it_is_done_without(tmp_path, monkeypatch):
    def capture(run):
        run()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")

    monkeypatch.setattr(capturing, "capture_for", lambda _device: capture)
    trainer = _built(tmp_path, _layers(), epochs=1)
    fit(trainer)
    trainer.release()
    why = "the pass can't be captured (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.)"
    assert _said(tmp_path) == [f"train.cuda_graphs is false: {why}"]
    assert trainer.update.gradients.instead is None


def test_a_pass_that_fails_by_itself_is_left_to_the_first_update(tmp_path, recorded):
    class Fails(nn.Module):
        def forward(self, values):
            if len(values) > 2:  # more than are tried first
                raise torch.OutOfMemoryError("too little")
            return values

    trainer = _built(tmp_path, _layers(Fails()))
    assert _said(tmp_path) == ["train.cuda_graphs is false: the pass itself fails (OutOfMemoryError: too little)"]
    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer)
    trainer.release()


def test_a_capture_after_which_nothing_runs_ends_with_what_helps(tmp_path, monkeypatch):
    model = _layers()

    def capture(_run):
        model[0].weight = nn.Parameter(torch.zeros(1, 1, 1, 1, 1, 1))
        raise RuntimeError("capture failed")

    monkeypatch.setattr(capturing, "capture_for", lambda _device: capture)
    with pytest.raises(RunError, match="computes nothing any more") as told:
        _built(tmp_path, model)
    assert told.value.mend == ("--set train.cuda_graphs=false",)


def _of_two(world, folder, method, graphs):
    capturing.capture_for = lambda _device: recording()
    try:
        trainer = _built(folder, _layers(), world, cuda_graphs=graphs, sync__method=method, norm_group="local")
        passes = trainer.update.gradients.instead
        fit(trainer)
        found = _state(trainer), passes.replays if passes else 0
        trainer.release()
    finally:
        del capturing.capture_for
    return found


@pytest.mark.parametrize(
    ("method", "taken"), [("local", True), pytest.param("powersgd", False, marks=pytest.mark.slow)]
)
def test_only_a_method_that_averages_after_the_pass_replays(tmp_path, method, taken):
    """PowerSGD sends gradients while backward goes on, by hooks of its own."""
    plain = run_on_ranks(_of_two, 2, str(tmp_path / "plain"), method, False)
    found = run_on_ranks(_of_two, 2, str(tmp_path / "replayed"), method, True)
    for (tensors, none), (others, replays) in zip(plain, found, strict=True):
        assert none == 0
        assert bool(replays) == taken
        assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def test_processes_that_take_part_in_each_others_passes_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="take part in each other's passes"):
        run_on_ranks(_of_two, 2, str(tmp_path / "run"), "allreduce", True)

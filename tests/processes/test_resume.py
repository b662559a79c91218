"""A run goes on at the exact next sample: to the last bit at the same number of processes, alike at another."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.checkpoint.folders import newest, resolve
from manyhands.checkpoint.write import SaveError
from manyhands.checkpoint.write import save as commit
from manyhands.config.load import load_job
from manyhands.core.errors import RunError, UserError
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.network import ParallelNetwork
from manyhands.train import saving
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.state import Progress, capture
from tests.processes.ranks import run_on_ranks

# 103 samples in batches of 29 are 4 updates an epoch; 7 lies within the second epoch.
SAVED, TOTAL = 7, 11


def _network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6 * 64, 5)
    )


def _train(world, folder, max_steps, settings, elsewhere=False):
    flags = {
        "data.name": "synthetic:103x1x8x8x5", "data.augment": "crop-flip", "train.batch": 29, "train.epochs": 9,
        "train.max_steps": max_steps, "train.norm_group": 4, "checkpoint.every": f"{SAVED}steps",
        "checkpoint.keep": 9, **settings,
    }  # fmt: skip
    job = load_job(flags, environment={}).job
    place = Path(folder) / f"machine-{world.rank}" if elsewhere else Path(folder)
    place.mkdir(exist_ok=True)
    mode = "single" if world.alone else settings.get("parallel.mode", "data")
    trainer = build(Parts.from_job(job, RunFolder(place), world, mode, Objects(_network())))
    first = trainer.progress.step
    fit(trainer)
    snapshot = capture(trainer.network, trainer.updater.optimizer, trainer.progress, {})
    trainer.resources.close()
    return first, snapshot.model, (snapshot.optimizer or {}).get("state")


def _undisturbed_and_resumed(size, resumed_size, settings):
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
        undisturbed = run_on_ranks(_train, size, whole, TOTAL, settings)[0]
        run_on_ranks(_train, size, broken, SAVED, settings)
        resumed = run_on_ranks(_train, resumed_size, broken, TOTAL, settings)[0]
    assert resumed[0] == SAVED
    return undisturbed, resumed


@pytest.mark.parametrize("settings", [{}, {"train.optimizer": "adamw", "train.lr": 0.002}, {"train.precision": "fp16"}],
                         ids=["sgd", "adamw", "fp16"])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_same_number_gives_the_same_bits(size, settings):
    undisturbed, resumed = _undisturbed_and_resumed(size, size, settings)
    for name, wanted in undisturbed[1].items():
        assert torch.equal(resumed[1][name], wanted), name
    for name, values in undisturbed[2].items():
        for key, wanted in values.items():
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(resumed[2][name][key], wanted), (name, key)


def test_sharded_parameters_go_on_too():
    undisturbed, resumed = _undisturbed_and_resumed(2, 2, {"parallel.mode": "fsdp"})
    for name, wanted in undisturbed[1].items():
        torch.testing.assert_close(resumed[1][name], wanted, rtol=0, atol=0)


class _Scaled(nn.Linear):
    """Counts its passes outside of tensors."""

    passes = 0

    def forward(self, values):
        self.passes += self.training
        return super().forward(values)

    def get_extra_state(self):
        return {"passes": self.passes, "shape": (1, 2)}

    def set_extra_state(self, state):
        assert state["shape"] == (1, 2)
        self.passes = state["passes"]


def _count_passes(world, folder, max_steps, settings):
    network = nn.Sequential(nn.Flatten(), _Scaled(64, 5))
    kept, globals()["_network"] = _network, lambda: network
    try:
        first, _, _ = _train(world, folder, max_steps, settings)
    finally:
        globals()["_network"] = kept
    return first, network[1].passes


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {}), (2, {"parallel.mode": "fsdp"})])
def test_what_modules_hold_beside_tensors_goes_on(size, settings, tmp_path):
    (_, before), *_ = run_on_ranks(_count_passes, size, str(tmp_path), SAVED, settings)
    for first, passes in run_on_ranks(_count_passes, size, str(tmp_path), TOTAL, settings):
        assert first == SAVED
        assert before + TOTAL - SAVED <= passes <= before + TOTAL - SAVED + 2  # passes before the first update


def test_a_module_whose_state_is_no_plain_data_is_refused_before_the_first_update(tmp_path):
    class Odd(_Scaled):
        def get_extra_state(self):
            return {"seen": {1, 2}}

    job = load_job({"data.name": "synthetic:103x1x8x8x5"}, environment={}).job
    with pytest.raises(UserError, match=r"1\._extra_state/seen is a set, which can't be saved"):
        build(
            Parts.from_job(
                job, RunFolder(tmp_path), World(), "single", Objects(nn.Sequential(nn.Flatten(), Odd(64, 5)))
            )
        )


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2), (2, 1)])
def test_another_number_makes_the_same_updates(sizes):
    # Without dropout, whose draws are a stated exception.
    settings = {"train.precision": "fp64", "train.channels_last": False, "train.momentum": 0.5}
    undisturbed, resumed = _with_no_dropout(lambda: _undisturbed_and_resumed(*sizes, settings))
    for name, wanted in undisturbed[1].items():
        scale = max(1e-12, wanted.abs().max().item())
        assert (resumed[1][name] - wanted).abs().max().item() <= 1e-9 * scale, name


def _with_no_dropout(run):
    kept, nn.Dropout.forward = nn.Dropout.forward, lambda _self, values: values
    try:
        return run()
    finally:
        nn.Dropout.forward = kept


def test_a_machine_without_the_checkpoint_is_given_it():
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(_train, 1, f"{folder}/machine-0", SAVED, {})
        first, second = run_on_ranks(_train, 2, folder, TOTAL, {}, True)
    assert first[0] == second[0] == SAVED
    for name, wanted in first[1].items():
        assert torch.equal(second[1][name], wanted), name


def test_a_run_is_not_turned_back_below_its_own_checkpoints(tmp_path):
    _train(World(), tmp_path, 8, {})
    # 103 samples in batches of 103: two epochs are 2 updates, and step-00000008 would always be the newest.
    with pytest.raises(UserError, match=r"resume from step 2, .* step-00000008"):
        _train(World(), tmp_path, 9, {"train.batch": 103})
    assert newest(tmp_path / "checkpoints")[0] == tmp_path / "checkpoints" / "step-00000008"


def test_what_is_saved_last_knows_of_the_last_evaluation(tmp_path):
    _train(World(), tmp_path, SAVED, {"train.evaluate_every": 0})
    assert resolve(tmp_path, "best").name == f"step-{SAVED:08d}"


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_whose_end_cannot_be_saved_has_failed(size, tmp_path, monkeypatch):
    def full(*_):
        raise SaveError("the disk is full")

    monkeypatch.setattr(saving, "commit", full)
    for text in run_on_ranks(_failure, size, str(tmp_path)):
        assert f"step {SAVED} could not be saved" in text


def _failure(world, folder):
    try:
        _train(world, folder, SAVED, {})
    except RunError as error:
        return error.message
    return ""


def test_a_run_without_an_evaluation_has_no_best_but_a_last(tmp_path):
    snapshot = capture(*_untrained(), Progress(step=3), {})
    path = commit(tmp_path / "checkpoints", 3, snapshot)
    assert resolve(tmp_path, "best") == path


def _untrained():
    network = _network()
    return ParallelNetwork(network), torch.optim.SGD(network.parameters(), lr=0.1)


def test_an_evaluation_that_a_fault_came_before_is_made_when_the_run_goes_on(tmp_path):
    flags = {"data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "train.epochs": 2, "train.max_steps": 8}
    job = load_job({**flags, "checkpoint.every": "never"}, environment={}).job

    def begun(folder):
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        return build(Parts.from_job(job, RunFolder(folder), World(), "single", Objects(_network())))

    undisturbed, broken = begun(tmp_path / "whole"), begun(tmp_path / "broken")
    fit(undisturbed)
    for update in broken.feed.updates(0, 0):  # an epoch, and a peer dies before its end is agreed on
        broken.updater(update, broken.progress.step)
        broken.count_update()
    assert saving.rescue(broken)
    resumed = begun(tmp_path / "broken")
    assert resumed.progress.step == 4
    fit(resumed)
    for trainer in (undisturbed, broken, resumed):
        trainer.resources.close()
    evaluated = [
        [(line["step"], line["loss"]) for line in read_lines(RunFolder(folder).metrics) if line["kind"] == "evaluation"]
        for folder in (tmp_path / "whole", tmp_path / "broken")
    ]
    assert [step for step, _ in evaluated[0]] == [4, 8]
    assert evaluated[0] == evaluated[1]


def _evaluates_before_it_trains(world):
    flags = {"data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "train.max_steps": 2, "checkpoint.every": "never"}
    job = load_job({**flags, "parallel.mode": "fsdp"}, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ranks").mkdir()
        trainer = build(Parts.from_job(job, RunFolder(Path(folder)), world, "fsdp", Objects(_network())))
        trainer.evaluate(None)
        fit(trainer)
        trainer.resources.close()
    return trainer.progress.step


def test_a_sharded_network_that_is_first_evaluated_can_be_trained():
    """As where a run goes on that a fault ended between an epoch's last update and its evaluation."""
    assert run_on_ranks(_evaluates_before_it_trains, 2) == [2, 2]

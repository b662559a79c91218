"""A run resumes at the exact next sample: to the bit at the same number of processes, alike at another."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.checkpoint.folders import newest, remove_step, resolve
from manyhands.checkpoint.read import load
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.write import SaveError
from manyhands.checkpoint.write import save as commit
from manyhands.core.errors import RunError, UserError
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.train import saving
from manyhands.train.loop import fit
from tests.processes.ranks import put_on_machines, run_on_ranks
from tests.processes.updates import EXACT, SyncedNetwork, assert_alike, built, captured

# 103 samples in batches of 29 are 4 updates an epoch; 7 lies within the second epoch and within an exchange.
SAVED, TOTAL = 7, 13
LOCAL = {"sync.method": "local", "sync.every": 3, "sync.delay": 2}
INT4 = {**LOCAL, "sync.codec": "int4"}
LOWRANK = {**LOCAL, "sync.codec": "lowrank", "sync.rank": 1}
POWERSGD = {"sync.method": "powersgd", "sync.rank": 1}


def _make(settings):
    """What isn't used is known by trying, which goes with DDP and with sync methods."""
    return SyncedNetwork(idle="sync.method" in settings, dropout=settings.get("dropout", 0.2))


def _train(world, folder, max_steps, settings, machines=(), elsewhere=False, make=_make):
    """The step that it begins at, the weights and the optimizer's state at the end, and how gradients are averaged.

    `machines`: ranks of those that processes are to believe in; `elsewhere`: each has a disk of its own.
    """
    if machines:
        put_on_machines(machines, world)
    flags = {
        "data.name": "synthetic:103x1x8x8x5", "data.augment": "crop-flip", "train.batch": 29, "train.epochs": 9,
        "train.max_steps": max_steps, "train.norm_group": 4, "checkpoint.every": f"{SAVED}steps", "checkpoint.keep": 9,
        **{key: value for key, value in settings.items() if "." in key},
    }  # fmt: skip
    place = Path(folder) / f"machine-{world.rank}" if elsewhere else folder
    with built(world, make(settings), flags, place) as trainer:
        first = trainer.progress.step
        fit(trainer)
        trainer.verify_replicas()
        found = captured(trainer)
        state = {
            f"{name} {key}": value
            for name, values in (found.optimizer or {"state": {}})["state"].items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return first, {**found.model, **state}, trainer.network.traits.averages


def _back_to(step, folder, other):
    """A copy of a run whose processes were killed after they had saved that step."""
    shutil.copytree(folder, other)
    for path in Path(other).glob("**/step-*"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)
    return other


def _events(folder, kind="warning"):
    lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    return [event["message"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run to its end, once for all that resume a copy of it: its folder and its processes' answers."""
    known = {}

    def made(size, settings, machines=(), elsewhere=False):
        key = size, str(settings), str(machines), elsewhere
        if key not in known:
            folder = tmp_path_factory.mktemp("run") / "run"
            known[key] = folder, run_on_ranks(_train, size, folder, TOTAL, settings, machines, elsewhere)
        return known[key]

    return made


SLOW = pytest.mark.slow
ADAMW = {"train.optimizer": "adamw", "train.lr": 0.002}
FP16 = {"train.precision": "fp16"}
TWO_AND_ONE = [[0, 1], [2]]
SAME_BITS = {
    "sgd of 1": (1, {}),
    "sgd of 2": (2, {}),
    "adamw": (2, ADAMW),
    "fp16": (2, FP16),
    "sharded": (2, {"parallel.mode": "fsdp"}),
    "two levels": (3, {"dropout": 0.0}, TWO_AND_ONE),
    "powersgd": (3, POWERSGD),
    "bf16": (3, {"sync.method": "bf16"}),
    "int4": (3, INT4),
    "lowrank, clipped": (3, {**LOWRANK, "train.clip": 0.5, **ADAMW}),
    "waiting, fp16": (3, {**LOCAL, "sync.codec": "int8", "sync.delay": 0, **FP16}),
    "passes": (3, {**LOCAL, "sync.codec": "none", "train.micro_batch": 5, "train.channels_last": True}),
}
RARELY = {"lowrank, clipped", "waiting, fp16", "passes"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[SLOW] if name in RARELY else []) for name in SAME_BITS])
def test_a_killed_run_resumes_to_the_same_bits_and_all_processes_end_with_one_network(name, run, tmp_path):
    size, settings, *machines = SAME_BITS[name]
    folder, whole = run(size, settings, *machines)
    killed = _back_to(SAVED, folder, tmp_path / "killed")
    methods = "sync.method" in settings
    for before, after in zip(whole, run_on_ranks(_train, size, killed, TOTAL, settings, *machines), strict=True):
        assert after[0] == SAVED
        assert before[2] == after[2]
        assert not machines or after[2].startswith("gradients are averaged in two levels")
        assert_alike(after[1], before[1])
        if name != "sharded":
            assert_alike(after[1], {key: one for key, one in whole[0][1].items() if " " not in key or not methods})
    found, initial = whole[0][1], _make(settings).state_dict()
    for part in ("frozen.weight", "unused.weight") if methods else ():
        assert torch.equal(found[part].float(), initial[part])
    assert not torch.equal(found["body.0.weight"].float(), initial["body.0.weight"])
    assert not any("without the sync" in message for message in _events(killed))


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2)])
def test_another_number_makes_the_same_updates(sizes, run, tmp_path):
    # Without dropout, whose masks are a stated exception.
    settings = {**EXACT, "train.momentum": 0.5, "dropout": 0.0}
    folder, whole = run(sizes[0], settings)
    resumed = run_on_ranks(_train, sizes[1], _back_to(SAVED, folder, tmp_path / "killed"), TOTAL, settings)[0]
    assert resumed[0] == SAVED
    assert_alike(resumed[1], {key: one for key, one in whole[0][1].items() if " " not in key}, 1e-9)


def test_machines_without_a_shared_disk_keep_their_own(run, tmp_path):
    folder, whole = run(2, INT4, (), True)
    for rank in (0, 1):
        own = folder / f"machine-{rank}" / "checkpoints"
        assert (own / f"rank-0000{rank}-of-00002").is_dir()
        assert not (own / f"rank-0000{1 - rank}-of-00002").exists()
        assert bool(list(own.glob("step-*"))) == (rank == 0)
    killed = _back_to(SAVED, folder, tmp_path / "killed")
    assert_alike(run_on_ranks(_train, 2, killed, TOTAL, INT4, (), True)[1][1], whole[1][1])


def test_a_machine_without_the_checkpoint_is_given_it(tmp_path):
    run_on_ranks(_train, 1, tmp_path / "machine-0", SAVED, {})
    first, second = run_on_ranks(_train, 2, tmp_path, TOTAL, {}, (), True)
    assert first[0] == second[0] == SAVED
    assert_alike(second[1], first[1])


@pytest.mark.parametrize(("size", "method"), [(2, "int4"), (1, "int4"), (2, "allreduce"), (3, "lost")])
def test_without_what_each_had_alone_a_run_resumes_from_the_agreed_network(size, method, run, tmp_path):
    """On another number of processes, by another method, or where a machine's disk is gone."""
    other = _back_to(SAVED, run(3, INT4)[0], tmp_path / "other")
    if method == "lost":
        shutil.rmtree(other / "checkpoints" / "rank-00001-of-00003")
    settings = {"sync.method": "allreduce"} if method == "allreduce" else INT4
    answers = run_on_ranks(_train, size, other, TOTAL, settings)
    _one_network(answers)
    assert any("without the sync" in message for message in _events(other)) == (method != "allreduce" and size > 1)


def _one_network(answers):
    for first, found, _ in answers:
        assert first == SAVED
        assert_alike(found, {name: one for name, one in answers[0][1].items() if " " not in name})


@pytest.mark.parametrize(
    ("before", "after"),
    [(INT4, {**INT4, "sync.codec": "lowrank"}), (INT4, POWERSGD), (LOWRANK, {**LOWRANK, "sync.rank": 2})],
    ids=["codec", "method", "rank"],
)
def test_what_another_method_held_back_is_left_and_said(before, after, run, tmp_path):
    other = _back_to(SAVED, run(2, before)[0], tmp_path / "other")
    _one_network(run_on_ranks(_train, 2, other, TOTAL, after))
    assert any("synchronization state" in each and "other settings" in each for each in _events(other))


@pytest.mark.parametrize("settings", [POWERSGD, LOWRANK], ids=["powersgd", "lowrank"])
def test_what_another_version_kept_with_factors_is_left_and_said(settings, run, tmp_path):
    """Names and contents as they were before factors had a format, committed anew."""
    other = _back_to(SAVED, run(2, settings)[0], tmp_path / "other")
    for path in other.glob("checkpoints/rank-*/step-*"):
        found = load(path)
        del found.state["own"]["format of factors"]
        held = {name: tensor for name, tensor in found.model.items() if name.endswith("held")}
        remove_step(path.parent, SAVED)
        commit(path.parent, SAVED, Snapshot(held, found.optimizer, found.state))
    _one_network(run_on_ranks(_train, 2, other, TOTAL, settings))
    assert any("synchronization state" in each and "factor" in each for each in _events(other))


def _without_room(world, folder, settings):
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(RunError, match="could not be saved"):
        _train(world, folder, TOTAL, settings)


def test_what_goes_with_the_last_good_checkpoint_is_kept_where_the_next_one_fails(run, tmp_path):
    full = _back_to(SAVED, run(2, INT4)[0], tmp_path / "full")
    run_on_ranks(_without_room, 2, full, {**INT4, "checkpoint.keep": 1})
    for rank in range(2):
        assert (full / "checkpoints" / f"rank-0000{rank}-of-00002" / f"step-{SAVED:08d}").is_dir()


class _Counting(nn.Linear):
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


class _Odd(_Counting):
    def get_extra_state(self):
        return {"seen": {1, 2}}


def _count_passes(world, folder, max_steps, settings):
    network = nn.Sequential(nn.Flatten(), _Counting(64, 5))
    return _train(world, folder, max_steps, settings, make=lambda _: network)[0], network[1].passes


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {"parallel.mode": "fsdp"})])
def test_extra_state_of_modules_is_resumed(size, settings, tmp_path):
    (_, before), *_ = run_on_ranks(_count_passes, size, tmp_path, SAVED, settings)
    for first, passes in run_on_ranks(_count_passes, size, tmp_path, TOTAL, settings):
        assert first == SAVED
        assert before + TOTAL - SAVED <= passes <= before + TOTAL - SAVED + 2  # passes before the first update


def test_a_module_whose_state_is_no_plain_data_is_refused_before_the_first_update(tmp_path):
    with pytest.raises(UserError, match=r"1\._extra_state/seen is a set, which can't be saved"):
        _train(World(), tmp_path, 1, {}, make=lambda _: nn.Sequential(nn.Flatten(), _Odd(64, 5)))


def test_a_run_is_not_turned_back_below_its_own_checkpoints(tmp_path):
    _train(World(), tmp_path, 8, {})
    # What is saved last knows of the last evaluation, the only one.
    assert resolve(tmp_path, "best").name == "step-00000008"
    # 103 samples in batches of 103: two epochs are 2 updates, and step-00000008 would always be the newest.
    with pytest.raises(UserError, match=r"resume from step 2, .* step-00000008"):
        _train(World(), tmp_path, 9, {"train.batch": 103})
    assert newest(tmp_path / "checkpoints")[0] == tmp_path / "checkpoints" / "step-00000008"


def test_a_run_without_an_evaluation_has_no_best_but_a_last(tmp_path):
    with built(World(), _make({}), {"data.name": "synthetic:103x1x8x8x5"}) as trainer:
        path = commit(tmp_path / "checkpoints", 3, captured(trainer))
    assert resolve(tmp_path, "best") == path


def _failure(world, folder):
    try:
        _train(world, folder, SAVED, {})
    except RunError as error:
        return error.message
    return ""


def test_a_run_whose_end_cannot_be_saved_has_failed(tmp_path, monkeypatch):
    def full(*_):
        raise SaveError("the disk is full")

    monkeypatch.setattr(saving, "commit", full)
    for text in run_on_ranks(_failure, 2, tmp_path):
        assert f"step {SAVED} could not be saved" in text


FEW = {"data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "checkpoint.every": "never", "train.evaluate_every": 1}


def test_an_evaluation_that_a_fault_came_before_is_made_when_the_run_resumes(tmp_path):
    flags = {**FEW, "train.epochs": 2, "train.max_steps": 8}
    with built(World(), _make({}), flags, tmp_path / "whole") as trainer:
        fit(trainer)
    with built(World(), _make({}), flags, tmp_path / "broken") as broken:
        for update in broken.feed.updates(0, 0):  # an epoch, and a peer dies before its end is agreed on
            broken.updater(update, broken.progress.step)
            broken.count_update()
        assert saving.rescue(broken)
    with built(World(), _make({}), flags, tmp_path / "broken") as resumed:
        assert resumed.progress.step == 4
        fit(resumed)
    whole, again = (
        [(line["step"], line["loss"]) for line in read_lines(RunFolder(folder).metrics) if line["kind"] == "evaluation"]
        for folder in (tmp_path / "whole", tmp_path / "broken")
    )
    assert [step for step, _ in whole] == [4, 8]
    assert whole == again


def _evaluates_before_it_trains(world):
    with built(world, _make({}), {**FEW, "train.max_steps": 2, "parallel.mode": "fsdp"}) as trainer:
        trainer.evaluate(None)
        fit(trainer)
    return trainer.progress.step


def test_a_sharded_network_that_is_first_evaluated_can_be_trained():
    """As where a run resumes that a fault ended between an epoch's last update and its evaluation."""
    assert run_on_ranks(_evaluates_before_it_trains, 2) == [2, 2]

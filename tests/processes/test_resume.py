"""A run resumes at the exact next sample: to the bit at the same number of processes, alike at another."""

import functools
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.checkpoint.folders import find_checkpoint, newest_checkpoint, remove_saved_step
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.write import save_unsharded as commit
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.train import saving
from manyhands.train.loop import fit
from tests.processes.ranks import run_on_ranks
from tests.processes.test_parity import CROSSED, OUTPUTS, TWO_AXES, split
from tests.processes.updates import EXACT, SMALL, SyncedNetwork, assert_alike, built, linear, normed, train, trained

# 103 samples in batches of 29 are 4 updates an epoch; 7 lies within the second epoch and within an exchange.
SAVED, TOTAL = 7, 13
LOCAL = {"sync.method": "local", "sync.every": 3, "sync.delay": 2}
INT4 = {**LOCAL, "sync.codec": "int4"}
LOWRANK = {**LOCAL, "sync.codec": "lowrank", "sync.rank": 1}
POWERSGD = {"sync.method": "powersgd", "sync.rank": 1}
ADAMW = {"train.optimizer": "adamw", "train.lr": 0.002}
FP16 = {"train.precision": "fp16", "train.lr": 1e-4}
# Runs by the number of their processes; those of "rarely" are of 3.
RUNS = {
    1: {"sgd": {}},
    2: {
        "sgd": {}, "adamw": ADAMW, "fp16": FP16, "sharded": {"parallel.mode": "fsdp"}, "int4": INT4,
        "lowrank": LOWRANK, "powersgd": POWERSGD,
        # An exchange is about to end, or has just begun.
        "ends": {**INT4, "sync.every": 4, "sync.delay": 3}, "begins": {**LOWRANK, "sync.every": 7},
    },
    3: {
        "two levels": {}, "powersgd": POWERSGD, "bf16": {"sync.method": "bf16"}, "int4": INT4,
        **{codec: {**LOCAL, "sync.codec": codec} for codec in ("none", "int8")},
        "bf16 steps": {**LOCAL, "sync.codec": "bf16"},
    },
    "rarely": {
        "lowrank, clipped": {**LOWRANK, "train.clip": 0.5, **ADAMW},
        "waiting, fp16": {**LOCAL, "sync.codec": "int8", "sync.delay": 0, **FP16},
        "passes": {**LOCAL, "sync.codec": "none", "train.micro_batch": 5, "train.channels_last": True},
    },
}  # fmt: skip


def _case(flags, folder, total=TOTAL, make=None, machines=()):
    """What isn't used is known by trying, which goes with sync methods."""
    usual = {
        "train.max_steps": total, "train.norm_group": 4, "checkpoint.every": f"{SAVED}steps", "checkpoint.keep": 9,
    }  # fmt: skip
    how = {"idle": "sync.method" in flags, "dropout": 0.0 if machines else 0.2}
    how["factor"] = 64 if "train.precision" in flags else 1  # gradients overflow until the loss scale is smaller
    make = make or functools.partial(SyncedNetwork, **how)
    return 0, make, {**usual, **flags}, folder, machines


def _cases(of, folder):
    return [_case(flags, folder / name, machines=((0, 1), (2,)) * (name == "two levels")) for name, flags in of.items()]


def _back_to(step, folder, other):
    """A copy of runs whose processes were killed after they had saved that step."""
    shutil.copytree(folder, other)
    for path in Path(other).glob("**/step-*"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)
    return other


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs to their end, once for all that resume a copy of them: their folder and their outcomes by name."""

    @functools.cache
    def made(of):
        folder, size = tmp_path_factory.mktemp("runs") / "runs", 3 if of == "rarely" else of
        return folder, size, dict(zip(RUNS[of], trained(size, _cases(RUNS[of], folder)), strict=True))

    return made


@pytest.mark.parametrize("of", [1, 2, 3, pytest.param("rarely", marks=pytest.mark.slow)])
def test_a_killed_run_resumes_to_the_same_bits_and_all_processes_end_with_one_network(of, whole, tmp_path):
    folder, size, runs = whole(of)
    again = trained(size, _cases(RUNS[of], _back_to(SAVED, folder, tmp_path / "killed")))
    for (name, before), after in zip(runs.items(), again, strict=True):
        for one, other in zip(before, after, strict=True):
            assert other.first == SAVED
            assert one.averages == other.averages
            assert name != "two levels" or other.averages.startswith("gradients are averaged in two levels")
            assert_alike(other.model, one.model)
            assert_alike(other.optimizer, one.optimizer)
            assert_alike(other.model, before[0].model)
            assert one.evaluation[1] == before[0].evaluation[1]
            assert not any("without the sync" in message for message in other.said())
        methods = "sync.method" in RUNS[of][name]
        initial, found = SyncedNetwork(idle=methods).state_dict(), before[0].model
        for part in ("frozen.weight", "unused.weight") if methods else ():
            assert torch.equal(found[part].float(), initial[part])
        assert not torch.equal(found["body.0.weight"].float(), initial["body.0.weight"])


PIECES = {"checkpoint.pieces": True}
# (Processes and settings) of a run and of its continuation.
ELSEWHERE = [
    (1, {}, 3, {}),
    (3, {}, 2, {}),
    (2, {"parallel.mode": "fsdp"}, 3, {}),
    (2, split(*OUTPUTS).flags | PIECES, 4, split(*TWO_AXES, mesh="dp=2,tp=2").flags | PIECES),
    (4, split(*CROSSED, mesh="dp=2,tp=2").flags | PIECES, 1, PIECES),
    (1, {}, 3, split("4=i@dp", "8=i@dp").flags),
]


def test_another_number_or_plan_makes_the_same_updates(tmp_path):
    flags = {**EXACT, "train.momentum": 0.5, "train.norm_group": 8}
    alone = train(World(), *_case(flags, "", make=normed))
    for number, (size, settings, other_size, other_settings) in enumerate(ELSEWHERE):
        folder = tmp_path / str(number)
        trained(size, [_case({**flags, **settings}, folder / "run", make=normed)])
        killed = _back_to(SAVED, folder / "run", folder / "killed")
        ((found, *_),) = trained(other_size, [_case({**flags, **other_settings}, killed, make=normed)])
        assert found.first == SAVED
        assert_alike(found.model, alone.model, 1e-9)
        assert_alike(found.optimizer, alone.optimizer, 1e-9, least=1e-6)
        assert torch.equal(found.evaluation[0], alone.evaluation[0])


def _apart(world, folder, flags):
    """Each has a disk of its own."""
    return train(world, *_case(flags, folder / f"machine-{world.rank}"))


def test_machines_without_a_shared_disk_keep_their_own_and_one_without_the_checkpoint_is_given_it(tmp_path):
    before = run_on_ranks(_apart, 2, tmp_path / "whole", INT4)
    for rank in (0, 1):
        own = tmp_path / "whole" / f"machine-{rank}" / "checkpoints"
        assert (own / f"rank-0000{rank}-of-00002").is_dir()
        assert not (own / f"rank-0000{1 - rank}-of-00002").exists()
        assert bool(list(own.glob("step-*"))) == (rank == 0)
    killed, lost = (_back_to(SAVED, tmp_path / "whole", tmp_path / name) for name in ("killed", "lost"))
    assert_alike(run_on_ranks(_apart, 2, killed, INT4)[1].model, before[1].model)
    shutil.rmtree(lost / "machine-1")
    _assert_one_network(run_on_ranks(_apart, 2, lost, {"sync.method": "allreduce"}))


def _assert_one_network(found):
    for one in found:
        assert one.first == SAVED
        assert_alike(one.model, found[0].model)


def _lose(folder):
    shutil.rmtree(folder / "checkpoints" / "rank-00001-of-00003")


def _of_another_version(folder):
    """Names and contents as they were before factors had a format, committed anew."""
    for path in folder.glob("checkpoints/rank-*/step-*"):
        found = load_checkpoint(path)
        del found.state["own"]["format of factors"]
        held = {name: tensor for name, tensor in found.model.items() if name.endswith("held")}
        remove_saved_step(path.parent, SAVED)
        commit(path.parent, SAVED, Snapshot(held, found.optimizer, found.state))


ALONE, OTHER, FACTORS = "without the sync", "other settings", "factor"
# A run, what happens to its folder, how many processes resume it under which settings, and what is said.
HELD_BACK = [
    (3, "int4", None, 1, INT4, ""),
    (3, "int4", None, 2, INT4, ALONE),
    (3, "int4", None, 2, {"sync.method": "allreduce"}, ""),
    (3, "int4", _lose, 3, INT4, ALONE),
    (2, "int4", None, 2, {**INT4, "sync.codec": "lowrank"}, OTHER),
    (2, "int4", None, 2, POWERSGD, OTHER),
    (2, "lowrank", None, 2, {**LOWRANK, "sync.rank": 2}, OTHER),
    (2, "lowrank", _of_another_version, 2, LOWRANK, FACTORS),
    (2, "powersgd", _of_another_version, 2, POWERSGD, FACTORS),
]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_what_each_had_alone_a_run_resumes_from_the_agreed_network(size, whole, tmp_path):
    """On another number of processes, by another method, or where a machine's disk is gone."""
    rows, cases = [row for row in HELD_BACK if row[3] == size], []
    for number, (of, name, change, _, flags, _) in enumerate(rows):
        folder = _back_to(SAVED, whole(of)[0] / name, tmp_path / str(number))
        if change:
            change(folder)
        cases.append(_case(flags, folder))
    for (*_, said), found in zip(rows, trained(size, cases), strict=True):
        _assert_one_network(found)
        about = [message for message in found[0].said() if "sync" in message]
        assert any(said in message for message in about) if said else not any(ALONE in message for message in about)


def _without_room(world, cases):
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return [train(world, *case, ends=True).ended for case in cases]


def test_without_room_a_run_has_failed_and_what_goes_with_the_last_good_checkpoint_is_kept(whole, tmp_path):
    full = _back_to(SAVED, whole(2)[0] / "int4", tmp_path / "full")
    for (ended,) in run_on_ranks(_without_room, 2, [_case({**INT4, "checkpoint.keep": 1}, full)]):
        assert f"step {TOTAL} could not be saved" in ended
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
    return train(world, *_case(settings, folder, max_steps, lambda: network)).first, network[1].passes


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {"parallel.mode": "fsdp"})])
def test_extra_state_of_modules_is_resumed(size, settings, tmp_path):
    (_, before), *_ = run_on_ranks(_count_passes, size, tmp_path, SAVED, settings)
    for first, passes in run_on_ranks(_count_passes, size, tmp_path, TOTAL, settings):
        assert first == SAVED
        assert before + TOTAL - SAVED <= passes <= before + TOTAL - SAVED + 2  # passes before the first update


def test_a_module_whose_state_is_no_plain_data_is_refused_before_the_first_update(tmp_path):
    with pytest.raises(UserError, match=r"1\._extra_state/seen is a set, which can't be saved"):
        train(World(), *_case({}, tmp_path, make=lambda: nn.Sequential(nn.Flatten(), _Odd(64, 5))))


def test_a_run_is_not_turned_back_below_its_own_checkpoints_of_which_the_best_or_the_last_is_found(tmp_path):
    train(World(), *_case({}, tmp_path / "run", 8))
    # What is saved last knows of the last evaluation, the only one.
    assert find_checkpoint(tmp_path / "run", "best").name == "step-00000008"
    # 103 samples in batches of 103: two epochs are 2 updates, and step-00000008 would always be the newest.
    with pytest.raises(UserError, match=r"resume from step 2, .* step-00000008"):
        train(World(), *_case({"train.batch": 103}, tmp_path / "run", 9))
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-00000008"
    with built(World(), linear(), SMALL) as trainer:
        path = commit(tmp_path / "without" / "checkpoints", 3, Snapshot(trainer.network.full_state_dict(), None, {}))
    assert find_checkpoint(tmp_path / "without", "best") == path


FEW = {**SMALL, "checkpoint.every": "0.5h", "train.evaluate_every": 1}


def test_an_evaluation_that_a_fault_came_before_is_made_when_the_run_resumes(tmp_path):
    flags = {**FEW, "train.epochs": 2, "train.max_steps": 8}
    with built(World(), linear(), flags, tmp_path) as broken:
        for update in broken.feed.updates(0, 0):  # an epoch, and a peer dies before its end is agreed on
            broken.updater(update, broken.progress.step)
            broken.count_update()
        assert saving.rescue(broken)
    resumed, whole = (train(World(), 0, linear, flags, folder) for folder in (tmp_path, ""))
    assert resumed.first == 4
    losses = [
        [(line["step"], line["loss"]) for line in one.metrics if line["kind"] == "evaluation"]
        for one in (resumed, whole)
    ]
    assert [step for step, _ in losses[0]] == [4, 8]
    assert losses[0] == losses[1]


def _evaluates_before_it_trains(world):
    with built(world, linear(), {**FEW, "train.max_steps": 2, "parallel.mode": "fsdp"}) as trainer:
        trainer.evaluate(None)
        fit(trainer)
    return trainer.progress.step


def test_a_sharded_network_that_is_first_evaluated_can_be_trained():
    """As where a run resumes that a fault ended between an epoch's last update and its evaluation."""
    assert run_on_ranks(_evaluates_before_it_trains, 2) == [2, 2]

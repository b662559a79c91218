"""The law of the house: N processes make the same updates as one, also on several machines and under any plan."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint.read import load
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.apply import check_replicas
from manyhands.train.saving import finish_save, save
from tests.processes.ranks import put_on_machines, run_on_ranks
from tests.processes.updates import (
    BATCH,
    EXACT,
    SAMPLES,
    SyncedNetwork,
    assert_alike,
    built,
    captured,
    make_updates,
    network,
    train,
)

GROUPS = {**EXACT, "train.norm_group": 4}


@functools.cache
def _alone(updates, norm, settings):
    return run_on_ranks(train, 1, updates, "single", norm, dict(settings))[0]


def _train_all(world, updates, mode, norm, cases, machines=()):
    """Each case's updates; `machines`: ranks of those that this process is to believe in."""
    if machines:
        put_on_machines(machines, world)
    return [train(world, updates, mode, norm, settings) for settings in cases]


def _compare(size, updates, mode, norm, cases, tolerance, machines=()):
    """Compares all cases with one process, in one run."""
    ranks = run_on_ranks(_train_all, size, updates, mode, norm, cases, machines)
    for settings, *several in zip(cases, *ranks, strict=True):
        lone = {key: value for key, value in settings.items() if key not in ("cluster.shares", "sync.method")}
        losses, weights, evaluated = _alone(updates, norm, tuple(lone.items()))
        summed = [sum(each) for each in zip(*(result[0] for result in several), strict=True)]
        torch.testing.assert_close(torch.tensor(summed), torch.tensor(losses), rtol=tolerance, atol=0)
        # Rank 0 alone gathers a sharded network.
        for result in several if mode != "fsdp" else several[:1]:
            assert_alike(result[1], weights, tolerance)
            if mode != "fsdp" and "sync.method" not in settings:
                assert_alike(result[1], several[0][1])
        if tolerance <= 1e-9:
            assert all(torch.equal(result[2][0], evaluated[0]) for result in several)


SETTINGS = {
    "plain": {},
    "accumulation": {"train.micro_batch": 4},
    "large-groups": {"train.norm_group": 16},
    "adamw": {"train.optimizer": "adamw", "train.lr": 0.002},
    "backend": {"parallel.shared_memory": False},
    "bias-rate": {"train.bias_rate": 8.0, "train.decay_norm_and_bias": True},
    "turns": {"data.mirror": "alternate", "data.shift": 2, "data.shift_fill": "reflect"},
    "clip": {"train.clip": 0.1, "train.label_smoothing": 0.1},
}
# Of 29: much to one, little to another; also cut into passes, and in groups that several processes hold.
UNEQUAL = {2: [22, 7], 3: [20, 1, 8], 4: [3, 17, 5, 4]}
# Each setting at two processes, and those that depend on who has which samples at more.
BY_SIZE = {2: list(SETTINGS), 3: ["accumulation", "large-groups", "backend"], 4: ["plain", "large-groups"]}
UNEQUAL_BY_SIZE = {2: ["plain", "backend"], 3: ["accumulation", "large-groups"], 4: ["accumulation"]}


@pytest.mark.parametrize("size", BY_SIZE)
def test_twenty_updates_in_double_precision(size):
    _compare(size, 20, "data", True, [{**GROUPS, **SETTINGS[name]} for name in BY_SIZE[size]], 1e-9)


@pytest.mark.parametrize("size", UNEQUAL)
def test_unequal_shares_make_the_same_updates(size):
    cases = [{**GROUPS, **SETTINGS[name], "cluster.shares": UNEQUAL[size]} for name in UNEQUAL_BY_SIZE[size]]
    _compare(size, 20, "data", True, cases, 1e-9)


def test_more_of_three_processes():
    """Groups over the whole batch, as torch's synchronized BatchNorm has them; none; an update in single precision."""
    _compare(3, 20, "data", True, [{**EXACT, "train.norm_group": "global"}], 1e-9)
    _compare(3, 20, "data", False, [{**EXACT, "train.micro_batch": 4}], 1e-9)
    _compare(3, 1, "data", True, [{**GROUPS, "train.precision": "fp32"}], 1e-4)


@pytest.mark.parametrize(("size", "shares"), [(2, {"cluster.shares": UNEQUAL[2]}), (3, {})])
def test_sharded_parameters_make_the_same_updates(size, shares):
    _compare(size, 20, "fsdp", True, [{**GROUPS, **shares}], 1e-9)


def test_what_goes_with_two_processes():
    """Parameters in channels-last, sharded; a network that looks at pictures first."""
    _compare(2, 3, "fsdp", True, [{**GROUPS, "train.channels_last": True}], 1e-9)
    first = {"model.name": "quicknet", "train.precision": "fp64", "train.norm_group": 4}
    _compare(2, 3, "data", True, [first], 1e-9)
    # The sum of weighted gradients is the batch's; the method rounds it, so one update is compared coarsely.
    _compare(2, 1, "data", True, [{**GROUPS, "cluster.shares": UNEQUAL[2], "sync.method": "bf16"}], 1e-2)


def test_processes_on_several_machines_make_the_updates_of_one():
    _compare(4, 8, "data", True, [GROUPS, {**GROUPS, "train.micro_batch": 4}], 1e-9, [[0, 1], [2, 3]])


def _by_method(world, cases):
    found = []
    for settings in cases:
        flags = {"data.name": f"synthetic:{SAMPLES}x1x8x8x5", "train.max_steps": 13, **EXACT, **settings}
        with built(world, SyncedNetwork(idle=True), flags) as trainer:
            make_updates(trainer, 13)
            trainer.synchronizer.finish(13)
            found.append(captured(trainer).model)
    return found


def test_local_steps_that_are_averaged_each_time_are_plain_data_parallel():
    """With equal shares, and with unequal ones."""
    usual = {"train.drop_last": True, "train.norm_group": "local", "train.clip": 0.0}
    local = {"sync.method": "local", "sync.codec": "none", "sync.every": 1, "sync.delay": 0}
    cases = [
        {**usual, "train.batch": batch, **method}
        for batch in (27, 29)
        for method in ({"sync.method": "allreduce"}, local)
    ]
    equal, by_steps, unequal, also_by_steps = run_on_ranks(_by_method, 3, cases)[0]
    for found, wanted in ((by_steps, equal), (also_by_steps, unequal)):
        for name, one in wanted.items():
            if "running" in name and wanted is unequal:
                continue  # processes count alike in the mean of statistics, whatever their shares
            torch.testing.assert_close(found[name], one, rtol=1e-9, atol=1e-12, msg=name)


# Networks that are split by a plan, and the settings that each is trained under.
PLANS = {
    "outputs": (2, "", ("0=o@dp", "1=c@dp", "8=o@dp", "loss=o@dp")),
    "inputs": (3, "", ("4=i@dp", "8=i@dp")),
    "two-axes": (4, "dp=2,tp=2", ("0=n@dp o@tp", "[1-7]=n@dp c@tp", "8=n@dp i@tp")),
    "crossed": (4, "dp=2,tp=2", ("0=o@dp n@tp", "4=n@dp,tp", "5=c@dp,tp", "loss=n@dp o@tp")),
    "samples": (2, "", ("*=n@dp",)),
}
SETTINGS_OF_PLANS = {
    "outputs": ["plain", "clip"], "inputs": ["plain", "adamw"], "two-axes": ["accumulation", "full-batch"],
    "crossed": ["accumulation", "clip"], "samples": ["adamw"],
}  # fmt: skip
WITH_PLANS = {
    "plain": {},
    "accumulation": {"train.micro_batch": 8},
    "adamw": {"train.optimizer": "adamw", "train.lr": 0.002},
    "clip": {"train.clip": 0.1, "train.label_smoothing": 0.1},
    "full-batch": {"parallel.full_batch": True},
}


def train_and_save(world, model, until, flags, folder="", **how):
    """Losses up to a step, the checkpoint (on rank 0), an evaluation, and the layouts and record of the plan."""
    torch.manual_seed(3)
    usual = {
        "data.name": f"synthetic:{SAMPLES}x1x8x8x5", "train.batch": BATCH, "train.epochs": 50, "train.lr": 0.05,
        "model.num_classes": 5, "train.weight_decay": 1e-3, **EXACT,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        with built(world, model(), {**usual, **flags}, place, **how) as trainer:
            losses = make_updates(trainer, until)
            if trainer.network.layouts:
                named = dict(trainer.network.model.state_dict())
                check_replicas(named, world, trainer.progress.step, trainer.network)
            evaluated = trainer.evaluate()
            save(trainer)
            finish_save(trainer)
            layouts = dict(trainer.network.layouts)
        saved = load(place / "checkpoints" / f"step-{until:08d}") if world.is_main else None
    return losses, saved, (evaluated.confusion, evaluated.loss), layouts


def _train_plan(world, until, plan, cases, folder=""):
    _, mesh, pins = PLANS[plan] if plan else (1, "", ())
    mode = {"parallel.mode": "semi" if plan else "single", "parallel.mesh": mesh, "parallel.pin": pins}
    usual = {"data.augment": "crop-flip", "train.norm_group": 8, **mode}
    return [train_and_save(world, lambda: network(True), until, {**usual, **case}, folder) for case in cases]


def assert_same_saved(got, wanted, tolerance=1e-9):
    """Compares the tensors of two checkpoints, those of the optimizer too."""
    assert_alike(got.model, wanted.model, tolerance, least=1e-6)
    for name, entries in wanted.optimizer["state"].items():
        tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        assert_alike(got.optimizer["state"][name], tensors, tolerance, least=1e-6)


@functools.cache
def _unsplit(until, setting):
    return run_on_ranks(_train_plan, 1, until, "", [WITH_PLANS[setting]])[0][0]


@pytest.mark.parametrize(("plan", "settings"), SETTINGS_OF_PLANS.items())
def test_a_split_network_makes_the_updates_of_one_process(plan, settings):
    assert SETTINGS_OF_PLANS.keys() == PLANS.keys()
    assert {name for names in SETTINGS_OF_PLANS.values() for name in names} == WITH_PLANS.keys()
    ranks = run_on_ranks(_train_plan, PLANS[plan][0], 6, plan, [WITH_PLANS[name] for name in settings])
    for name, *several in zip(settings, *ranks, strict=True):
        losses, saved, evaluated, _ = _unsplit(6, name)
        summed = [sum(each) for each in zip(*(result[0] for result in several), strict=True)]
        torch.testing.assert_close(torch.tensor(summed), torch.tensor(losses), rtol=1e-9, atol=0)
        assert_same_saved(several[0][1], saved)
        for result in several:
            assert torch.equal(result[2][0], evaluated[0])
            assert result[2][1] == pytest.approx(evaluated[1], rel=1e-9)


@pytest.mark.parametrize(
    ("first", "second", "pieces"), [("outputs", "two-axes", True), ("crossed", "", True), ("", "inputs", False)]
)
def test_a_run_resumes_under_another_plan(first, second, pieces, tmp_path):
    settings = {"checkpoint.pieces": pieces}
    _, saved, evaluated, _ = _unsplit(8, "plain")
    run_on_ranks(_train_plan, PLANS[first][0] if first else 1, 5, first, [settings], tmp_path)
    again = [{**settings, "checkpoint.resume": "auto"}]
    (resumed,), *_ = run_on_ranks(_train_plan, PLANS[second][0] if second else 1, 8, second, again, tmp_path)
    assert len(resumed[0]) == 3
    assert_same_saved(resumed[1], saved)
    assert torch.equal(resumed[2][0], evaluated[0])


@pytest.mark.parametrize(("mode", "why"), [("single", "process shards no ops"), ("data", "mode data shards no ops")])
def test_a_pin_under_a_mode_that_splits_nothing_is_refused(mode, why):
    flags = {"data.name": f"synthetic:{SAMPLES}x1x8x8x5", "parallel.mode": "data", "parallel.pin": ("*=n@dp",)}
    with pytest.raises(UserError, match=why), built(World(), network(True), flags, mode=mode):
        pass

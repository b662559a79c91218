"""cluster.shares = auto: who is slow takes less of each update, and the updates stay the same."""

import dataclasses
import os
import time

import pytest
from torch import nn

from manyhands.train import shares
from manyhands.train.loop import fit
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import assert_alike, built, by_case, linear, normed

BATCH, UPDATES = 32, 20
FLAGS = {
    "data.name": "synthetic:90x1x8x8x5", "train.batch": BATCH, "train.epochs": 50, "model.num_classes": 5,
    "train.precision": "fp64", "train.norm_group": 4, "cluster.shares": "auto",
}  # fmt: skip


class SlowForItsSamples(nn.Module):
    """Takes so long for each sample."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, pictures):
        if self.training:
            time.sleep(self.seconds * len(pictures))
        return pictures


def _train(world, folder, slow_s, until=UPDATES, **settings):
    """From the folder's checkpoint, if it has one, to a step: what was taken at the start, and the weights."""
    lazy = SlowForItsSamples(slow_s[world.rank] if not world.alone else 0.0)
    network = nn.Sequential(lazy, normed())
    with built(world, network, {**FLAGS, "train.max_steps": until, **settings}, folder) as trainer:
        first = trainer.feed.samples_by_rank()
        if until:
            fit(trainer)
        return first, {name: tensor.clone() for name, tensor in network.state_dict().items()}


@pytest.mark.slow
def test_measured_shares_are_reused_on_resume(tmp_path):
    folder = str(tmp_path / "run")
    first = run_on_ranks(_train, 2, folder, (0.002, 0.02), 4)
    assert sum(first[0][0]) == BATCH
    assert first[0][0][0] >= 2 * first[0][0][1]
    # Now the other one is slow, which would be found at the start of an epoch after a while.
    again = run_on_ranks(_train, 2, folder, (0.02, 0.002), 6)
    assert again[0][0] == first[0][0]
    elsewhere = run_on_ranks(_train, 3, folder, (0.02, 0.002, 0.002), 7)
    assert len(elsewhere[0][0]) == 3
    assert elsewhere[0][0][0] < min(elsewhere[0][0][1:])


@pytest.mark.slow
def test_shares_follow_a_machine_that_slows_down_for_good():
    for before, after in run_on_ranks(_slowing, 2):
        assert before[0] > before[1]
        assert after[0] < after[1]


def _slowing(world):
    shares._SELDOM = 0  # else a minute and more passes before it looks again
    lazy = SlowForItsSamples((0.002, 0.02)[world.rank])
    with built(world, nn.Sequential(lazy, linear()), FLAGS) as trainer:
        before = trainer.feed.samples_by_rank()
        lazy.seconds = (0.02, 0.002)[world.rank]
        trainer.hooks.balance_shares()
        return before, trainer.feed.samples_by_rank()


def _on_machines(world, folder, kinds, until, settings):
    """Each process as on a machine of its own, some of them with fewer cores than others."""
    if kinds[world.rank]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    there = dataclasses.replace(world, local_rank=0, local_size=1)
    return _train(there, folder, (0.002, 0.02), until, **{"cluster.shares": "machines", **settings})


several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a machine of one core has no kinds")


@several_cores
def test_by_default_machines_of_several_kinds_are_measured_and_the_updates_stay_the_same(tmp_path):
    alone = run_on_ranks(_train, 1, str(tmp_path / "alone"), ())[0]
    found = run_on_ranks(_on_machines, 2, str(tmp_path / "two"), (False, True), UPDATES, {})
    (taken, _), (other, _) = found
    assert taken == other
    assert taken[0] >= 2 * taken[1]
    for _, weights in found:
        assert_alike(weights, alone[1], 1e-9)
    # On machines of one kind the same run goes on with equal shares, whatever is kept.
    again = run_on_ranks(_on_machines, 2, str(tmp_path / "two"), (False, False), UPDATES + 2, {})
    assert again[0][0] == [BATCH // 2, BATCH // 2]


@several_cores
def test_shares_stay_equal_without_a_word():
    """On machines of one kind, in ways of training that can't share unequally, and where that is wished for."""
    local, equal = {"sync.method": "local"}, {"cluster.shares": "equal"}
    cases = [("", (False, False), 0, {}), ("", (False, True), 0, local), ("", (False, True), 0, equal)]
    for answers in by_case(2, _on_machines, cases):
        assert [taken for taken, _ in answers] == [[BATCH // 2, BATCH // 2]] * 2

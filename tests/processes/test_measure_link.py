"""The link between live processes: all get the same figures, and a small budget ends the measurement."""

import math

import torch.distributed as dist

from manyhands.sync.link_speeds import link_seconds
from manyhands.sync.measure import measure_link
from tests.processes.ranks import run_on_ranks


def _measured(world, budget_s):
    pair = dist.new_group([0, 1])
    within = measure_link(pair, world.device, budget_s) if world.rank < 2 else None
    return measure_link(None, world.device, budget_s), within


def test_all_processes_get_the_same_link():
    outcomes = run_on_ranks(_measured, 3, 1.0)
    assert len({whole for whole, _ in outcomes}) == 1
    assert outcomes[0][1] == outcomes[1][1]
    for link in (outcomes[0][0], outcomes[0][1]):
        # Between a slow modem and a machine's own memory.
        assert 1e4 < link.bytes_per_s < 1e12
        assert 0 <= link.latency_s < 1


def test_without_a_budget_one_size_is_measured():
    first, *others = run_on_ranks(_measured, 3, 0.0)
    assert all(other[0] == first[0] for other in others)
    assert link_seconds("all_reduce", 3, 1 << 20, first[0]) > 0


def test_alone_there_is_no_link_to_wait_for():
    (link,) = run_on_ranks(_alone, 1)
    assert link.bytes_per_s == math.inf
    assert link_seconds("all_reduce", 2, 1 << 30, link) == 0


def _alone(world):
    return measure_link(None, world.device)

"""A stop that one process alone was asked for ends an evaluation on all of them at the same block."""

import torch
import torch.distributed as dist

from manyhands.core.world import World
from manyhands.train import evaluate
from manyhands.train.evaluate import Interrupted, StopRequest
from manyhands.train.status import collectives_begun, moved_bytes
from tests.processes.ranks import run_on_ranks


def stopped_at(world, culprit, every_s):
    evaluate.ASK_S = every_s
    done = 0
    request = StopRequest(world, lambda: world.rank == culprit and done > 5)
    try:
        for done in range(40):
            request.check_stop(done)
    except Interrupted:
        return done
    return None


def test_one_was_asked_and_all_stop():
    for every_s in (1e-9, 1e-3):
        one, other = run_on_ranks(stopped_at, 2, 1, every_s)
        assert one == other
        assert one is not None or every_s > 1e-9
    assert run_on_ranks(stopped_at, 1, 0, 1e-9) == [6]


def test_nobody_was_asked():
    assert run_on_ranks(stopped_at, 2, None, 1e-9) == [None, None]


def test_blocks_that_seem_to_take_no_time_are_not_handed_over_all_at_once(monkeypatch):
    monkeypatch.setattr(evaluate, "ASK_S", 1e9)
    asked = []
    request = StopRequest(World(), lambda: asked.append(done))
    for done in range(40):
        request.check_stop(done)
    assert asked == [0, 1, 3, 7, 15, 31]


def seen_by(world):
    before = collectives_begun(), moved_bytes()
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))
    return collectives_begun() - before[0], moved_bytes() - before[1]


def test_who_came_to_how_many_collectives_and_what_moved_is_known():
    for calls, moved in run_on_ranks(seen_by, 2):
        assert calls == 3
        # Where the system tells: what was received at least.
        assert moved == 0 or moved > 3 * 100_000

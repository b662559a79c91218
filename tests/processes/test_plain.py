"""Plain data and tensors arrive as they were sent."""

import math

import pytest
import torch

from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.parallel.group.plain import broadcast_plain, broadcast_result, broadcast_tensors, gather_plain
from tests.processes.ranks import run_on_ranks

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 4),
}


def _exchange(world):
    mine = {"rank": world.rank, "words": "众手" * world.rank, "best": math.inf}
    tensors = broadcast_tensors(TENSORS if world.rank == 0 else {}, world)
    return gather_plain(mine, world), broadcast_plain(mine if world.rank == 0 else None, world), tensors


def test_every_process_gets_the_same():
    for gathered, sent, tensors in run_on_ranks(_exchange, 3):
        assert gathered == [{"rank": rank, "words": "众手" * rank, "best": math.inf} for rank in range(3)]
        assert sent == gathered[0]
        assert list(tensors) == list(TENSORS)
        for name, wanted in TENSORS.items():
            assert tensors[name].dtype == wanted.dtype
            assert torch.equal(tensors[name], wanted)


def _result(world, error):
    def make():
        assert world.is_main, "rank 0 alone makes it"
        if error:
            raise error
        return {"value": 3}

    try:
        return broadcast_result(make, world)
    except ManyhandsError as raised:
        return type(raised), raised.message, raised.where, raised.hints


@pytest.mark.parametrize("kind", [UserError, RunError, None])
def test_what_rank_0_makes_or_why_it_cannot_is_the_same_on_all(kind):
    error = kind and kind("the plan is damaged", "plan.json", ("choose another",))
    wanted = (kind, "the plan is damaged", "plan.json", ("choose another",)) if kind else {"value": 3}
    assert run_on_ranks(_result, 2, error) == [wanted] * 2

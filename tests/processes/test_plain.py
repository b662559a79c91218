"""Plain data and tensors arrive as they were sent."""

import math

import torch

from manyhands.parallel.plain import broadcast_plain, broadcast_tensors, gather_plain
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

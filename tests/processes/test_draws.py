"""What ops draw: alike where processes have the same values, apart where they have others."""

import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from manyhands.core.mesh import Mesh
from manyhands.data.order import shares_of_micro_batch
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import Extent, convert, value_of
from manyhands.parallel.network import MicroBatchShape
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.execute import SplitNetwork, batch_axes
from manyhands.parallel.split.graph import INPUT
from manyhands.parallel.split.strategy import resolve
from manyhands.parallel.split.tracing import describe_network
from tests.processes.ranks import run_on_ranks

SAMPLES, CHANNELS = 12, 10
MESH = (("dp", 2), ("tp", 2))
DROPS = {
    "dropout": lambda: nn.Dropout(0.5),
    "channels": lambda: nn.Dropout2d(0.5),
    "depth": lambda: StochasticDepth(0.5, "row"),
}


class Dropping(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.same = nn.Conv2d(CHANNELS, CHANNELS, 1)
        nn.init.dirac_(self.same.weight)
        nn.init.zeros_(self.same.bias)
        self.drop = drop

    def forward(self, x):
        return self.drop(self.same(x)).mean((2, 3))


def _masks(world, kind, strategy, axes=MESH, seed=3):
    """Pieces of what is left of ones, by place; each with the seed that the executor gives."""
    mesh = Mesh(axes)
    grid, network = Grid(mesh, world), Dropping(DROPS[kind]()).train()
    graph = describe_network(network, torch.zeros(CHANNELS, 1, 1))
    op = next(one for one in graph.ops.values() if one.name.startswith("drop"))
    letters = resolve(Plan(mesh, {op.name: strategy, "mean": strategy}), graph)
    split = SplitNetwork(network, graph, graph, letters, grid).train()
    found = []
    for number in (seed, seed + 1):
        count = grid.parts(batch_axes(split.letters[INPUT]))
        share = lambda parts, index: shares_of_micro_batch(SAMPLES, 0, (0, SAMPLES), parts)[index]  # noqa: E731
        split.begin_micro_batch(MicroBatchShape(SAMPLES, SAMPLES, share, number))
        given = split(torch.ones(SAMPLES // count, CHANNELS, 1, 1)).detach()
        side = value_of([0 if letter == "n" else "R" for letter in letters["loss"]])
        found.append(convert(given, side, ("R",) * len(axes), Extent((SAMPLES, CHANNELS), 1), grid))
    grid.release()
    return found


STRATEGIES = ["n@dp,tp", "n@dp c@tp", "c@dp,tp", "n@dp r@tp", "r@dp c@tp"]
CASES = [(kind, strategy) for kind in DROPS for strategy in STRATEGIES]


def _all_masks(world):
    return {case: _masks(world, *case) for case in CASES}


@pytest.fixture(scope="module")
def masks():
    return run_on_ranks(_all_masks, Mesh(MESH).size)


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_masks(kind, strategy, masks):
    by_rank = [found[kind, strategy] for found in masks]
    first, second = by_rank[0]
    # What all of them put together is one tensor, so replicas drew alike.
    for masks in by_rank:
        assert torch.equal(masks[0], first)
        assert torch.equal(masks[1], second)
    assert not torch.equal(first, second)
    assert 0.2 < (first > 0).float().mean() < 0.8
    if kind == "depth":
        assert all(len(set(row.tolist())) == 1 for row in first), "a sample is dropped in all of its channels"
    if "n@dp" in strategy:
        assert not torch.equal(first[: SAMPLES // 2], first[SAMPLES // 2 :])
    if "c@" in strategy and kind != "depth":
        assert not torch.equal(first[:, : CHANNELS // 2], first[:, CHANNELS // 2 :])

"""What ops draw: alike where processes have the same values, apart where they have others; and plan.json names it.

It names everything that makes a run depend on the number of processes, and nothing else.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torchvision.ops import StochasticDepth

from manyhands.core.mesh import Mesh
from manyhands.core.world import World
from manyhands.data.order import equal_share_function
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import Extent, convert, value_layout
from manyhands.parallel.network import MicroBatchShape
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.execute import SplitNetwork, batch_axes
from manyhands.parallel.split.graph import INPUT
from manyhands.parallel.split.strategy import resolve_letters
from manyhands.parallel.split.tracing import describe_network
from manyhands.train.trainer import process_count_dependence_reasons
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built, by_case

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


def _masks(world, kind, strategy):
    """Pieces of what is left of ones, by place; each with the seed that the executor gives."""
    mesh, network = Mesh(MESH), Dropping(DROPS[kind]()).train()
    grid, graph = Grid(mesh, world), describe_network(network, torch.zeros(CHANNELS, 1, 1))
    op = next(one for one in graph.ops.values() if one.name.startswith("drop"))
    letters = resolve_letters(Plan(mesh, {op.name: strategy, "mean": strategy}), graph)
    split = SplitNetwork(network, graph, graph, letters, grid).train()
    side = value_layout([0 if letter == "n" else "R" for letter in letters["loss"]])
    count, found = grid.parts(batch_axes(split.letters[INPUT])), []
    for seed in (3, 4):
        share = equal_share_function(SAMPLES, 0, (0, SAMPLES))
        split.begin_micro_batch(MicroBatchShape(SAMPLES, SAMPLES, share, seed))
        given = split(torch.ones(SAMPLES // count, CHANNELS, 1, 1)).detach()
        found.append(convert(given, side, ("R",) * len(MESH), Extent((SAMPLES, CHANNELS), 1), grid))
    grid.release()
    return found


STRATEGIES = ["n@dp,tp", "n@dp c@tp", "c@dp,tp", "n@dp r@tp", "r@dp c@tp"]
CASES = [(kind, strategy) for kind in DROPS for strategy in STRATEGIES]


def test_masks():
    for (kind, strategy), by_rank in zip(CASES, by_case(Mesh(MESH).size, _masks, CASES), strict=True):
        first, second = by_rank[0]
        # What all of them put together is one tensor, so replicas drew alike.
        assert all(torch.equal(torch.stack(masks), torch.stack(by_rank[0])) for masks in by_rank), (kind, strategy)
        assert not torch.equal(first, second)
        assert 0.2 < (first > 0).float().mean() < 0.8
        if kind == "depth":
            assert all(len(set(row.tolist())) == 1 for row in first), "a sample is dropped in all of its channels"
        if "n@dp" in strategy:
            assert not torch.equal(first[: SAMPLES // 2], first[SAMPLES // 2 :])
        if "c@" in strategy and kind != "depth":
            assert not torch.equal(first[:, : CHANNELS // 2], first[:, CHANNELS // 2 :])


class Between(nn.Module):
    """Has something done with a picture's rows, adds them up, and tells classes apart."""

    def __init__(self, between):
        super().__init__()
        self.between, self.head = between, nn.Linear(8, 5)

    def forward(self, images):
        return self.head(self.between(images[:, 0]).mean(1))


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, values):
        return values * (torch.rand(len(values), 1, 1) >= self.drop_prob)


class Functional(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, values):
        return F.dropout(values, self.share, training=self.training and self.share > 0)


class Mixed(nn.Module):
    """Normalizes rows of which each has values of all samples."""

    def __init__(self, share):
        super().__init__()
        self.norm = nn.BatchNorm1d(8) if share else nn.Identity()

    def forward(self, values):
        return self.norm(values.transpose(0, 1).flatten(0, 1)).view(8, -1, 8).transpose(0, 1)


def _encoder(share):
    return nn.TransformerEncoderLayer(8, 2, 8, dropout=share, batch_first=True)


def _found(world, between=None, **settings):
    flags = {"data.name": "synthetic:20x1x8x8x5", "train.batch": 8, **settings}
    with built(world, Between(between or nn.Identity()), flags) as trainer:
        return process_count_dependence_reasons(trainer)


NAMED = [
    (lambda share: StochasticDepth(share, "row"), ["Stochastic depth masks"]),
    (DropPath, ["Stochastic depth masks"]),
    (nn.Dropout, ["Dropout masks"]),
    (Functional, ["The network's random numbers"]),
    (_encoder, ["Dropout masks", "Attention dropout masks"]),
    (Mixed, ["1 BatchNorm layer(s) normalize rows"]),
]


@pytest.mark.parametrize(("make", "wanted"), NAMED)
def test_what_draws_or_mixes_is_named_where_it_does(make, wanted):
    found = _found(World(), make(0.3))
    assert [line[: len(words)] for line, words in zip(found, wanted, strict=True)] == wanted
    if make is not DropPath:  # which draws for nothing at a share of 0
        assert _found(World(), make(0.0)) == []


def _of_agreeing(world):
    return _found(world, **{"sync.method": "bf16", "parallel.gradients_mean": "false"})


def test_rounded_and_added_gradients_are_named():
    for found in run_on_ranks(_of_agreeing, 2):
        assert "rounded to bf16" in found[0]
        assert "gradients_mean = false" in found[1]

"""plan.json names everything that makes a run depend on the number of processes, and nothing else."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torchvision.ops import StochasticDepth

from manyhands.core.world import World
from manyhands.train.trainer import dependence_reasons
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built


class Net(nn.Module):
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
    with built(world, Net(between or nn.Identity()), flags) as trainer:
        return dependence_reasons(trainer)


CASES = [
    (lambda share: StochasticDepth(share, "row"), ["Stochastic depth masks"]),
    (DropPath, ["Stochastic depth masks"]),
    (nn.Dropout, ["Dropout masks"]),
    (Functional, ["The network's random numbers"]),
    (_encoder, ["Dropout masks", "Attention dropout masks"]),
    (Mixed, ["1 BatchNorm layer(s) normalize rows"]),
]


@pytest.mark.parametrize(("make", "wanted"), CASES)
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

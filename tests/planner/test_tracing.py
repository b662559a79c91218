"""Describing a network: torch's own layers aren't computed, and mixing is seen all the same."""

import pytest
import torch
from torch import nn

from manyhands.parallel.split.tracing import describe_network


def test_layers_are_described_without_computing_them():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    for parameter in network.parameters():
        nn.init.constant_(parameter, torch.nan)
    graph = describe_network(network.train(), torch.zeros(3, 8, 8))
    assert all(op.batchwise and op.batched for op in graph.ops.values() if op.extents)
    assert [op.extent.dims for op in graph.ops.values() if op.extents][1:] == [(3, 8, 6, 6)] * 3 + [(3, 288), (3, 4)]


def test_a_convolution_of_parameters_is_no_batch():
    class Filters(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw, self.conv = nn.Parameter(torch.randn(1, 3, 4, 4)), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return (x * self.conv(self.raw)).flatten(1)

    graph = describe_network(Filters().train(), torch.zeros(3, 4, 4))
    assert not graph.ops["conv"].batched
    assert graph.ops["mul"].batchwise


def test_what_layers_are_thought_to_give_shows_mixing_behind_them():
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            differ = self.first(x) - self.second(x)
            return torch.cumsum(differ, 0).flatten(1)

    graph = describe_network(Mixes().train(), torch.zeros(3, 4, 4))
    assert graph.ops["sub"].batchwise
    assert not graph.ops["cumsum"].batchwise


def test_what_mixes_samples_before_a_convolution_is_seen_all_the_same():
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x - x.mean(0, keepdim=True)).flatten(1)

    graph = describe_network(Mixes().train(), torch.zeros(3, 4, 4))
    assert not graph.ops["conv"].batchwise


class Recurrent(nn.Module):
    """Reads its samples as if they came one after the other."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(12, 5)

    def forward(self, x):
        return self.recurrent(x.flatten(1)[:, None])[0][:, 0]


class RunningSum(nn.Module):
    """Adds the samples before to each."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        return self.fc(x.flatten(1)).cumsum(0)


class SumOfTheRest(RunningSum):
    """Adds the samples behind to each."""

    def forward(self, x):
        return self.fc(x.flatten(1)).flip(0).cumsum(0).flip(0)


@pytest.mark.parametrize("network", [Recurrent, RunningSum, SumOfTheRest])
def test_what_carries_from_sample_to_sample_mixes_them_in_either_direction(network):
    graph = describe_network(network().train(), torch.zeros(3, 2, 2))
    assert graph.ops["loss"].letters["n"] == "the network mixes samples"

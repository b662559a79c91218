"""Describing a network: what is known of torch's own layers isn't computed twice, and mixing is seen all the same."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyhands.parallel.tracing import describe_network


def test_convolutions_are_computed_once_to_see_whether_they_mix_samples():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    picture = torch.zeros(3, 8, 8)
    with FlopCounterMode(display=False) as once:
        network(torch.zeros(3, 3, 8, 8))
    with FlopCounterMode(display=False) as described:
        graph = describe_network(network.train(), picture)
    assert described.get_total_flops() == once.get_total_flops()
    assert all(op.batchwise for op in graph.ops.values())


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

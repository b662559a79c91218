"""Describing a network: what is known of torch's own layers isn't computed twice, and mixing is seen all the same."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyhands.parallel.describe import describe_network


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

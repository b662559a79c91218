"""Describing a network: torch's own layers aren't computed, and mixing is seen all the same."""

import pytest
import torch
from torch import nn

from manyhands.parallel.split.tracing import describe_network


class Net(nn.Module):
    """Layers and parameters by name, and a function of them and of the pictures."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.compute(self, x)


def test_layers_are_described_without_computing_them():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    for parameter in network.parameters():
        nn.init.constant_(parameter, torch.nan)
    graph = describe_network(network.train(), torch.zeros(3, 8, 8))
    assert all(op.batchwise and op.batched for op in graph.ops.values() if op.extents)
    assert [op.extent.dims for op in graph.ops.values() if op.extents][1:] == [(3, 8, 6, 6)] * 3 + [(3, 288), (3, 4)]


def conv(outputs=4):
    return nn.Conv2d(3, outputs, 1)


RAW = nn.Parameter(torch.randn(1, 3, 4, 4))


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        # A convolution of parameters is no batch.
        (
            Net(lambda net, x: (x * net.conv(net.raw)).flatten(1), raw=RAW, conv=conv(3)),
            {"conv.batched": False, "mul.batchwise": True},
        ),
        # What layers are thought to give shows mixing behind them, and mixing before a layer is seen all the same.
        (
            Net(lambda net, x: torch.cumsum(net.first(x) - net.second(x), 0).flatten(1), first=conv(), second=conv()),
            {"sub.batchwise": True, "cumsum.batchwise": False},
        ),
        (Net(lambda net, x: net.conv(x - x.mean(0, keepdim=True)).flatten(1), conv=conv()), {"conv.batchwise": False}),
    ],
)  # fmt: skip
def test_what_mixes_samples_is_seen_op_by_op(network, expected):
    ops = describe_network(network.train(), torch.zeros(3, 4, 4)).ops
    found = {name: getattr(ops[name.partition(".")[0]], name.partition(".")[2]) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    "network",
    [
        Net(lambda net, x: net.recurrent(x.flatten(1)[:, None])[0][:, 0], recurrent=nn.LSTM(12, 5)),
        Net(lambda net, x: net.fc(x.flatten(1)).cumsum(0), fc=nn.Linear(12, 5)),
        Net(lambda net, x: net.fc(x.flatten(1)).flip(0).cumsum(0).flip(0), fc=nn.Linear(12, 5)),
    ],
    ids=["recurrent", "sum of those before", "sum of those behind"],
)
def test_what_carries_from_sample_to_sample_mixes_them_in_either_direction(network):
    assert (
        describe_network(network.train(), torch.zeros(3, 2, 2)).ops["loss"].letters["n"] == "the network mixes samples"
    )

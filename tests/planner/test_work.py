"""Ops are run by themselves as in their network; one that can't be is priced by its size and named."""

import torch
from torch import nn

from manyhands.planner.find import SearchRequest, find
from manyhands.planner.timing import OpTimes
from tests.planner.nets import graph_of


class WithIndices(nn.Module):
    """A table of positions [tokens, tokens] picks biases, as in Swin; a mask is inverted; forward takes more words."""

    def __init__(self):
        super().__init__()
        self.biases = nn.Parameter(torch.zeros(7))
        self.register_buffer("positions", torch.arange(16).reshape(4, 4) % 7)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.last = nn.Linear(4, 3)

    def forward(self, x, mask=None, scale: float = 2.0):
        x = x.mean((2, 3)) * scale if mask is None else x * mask
        x = x + self.biases[self.positions].sum(0)
        return self.last(x * (~self.mask).float())


class Draws(nn.Module):
    """Draws in place, which a made-up input that wants a gradient doesn't take."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = self.last(x.mean((2, 3)))
        return x * x.new_empty(x.shape[0], 1).bernoulli_(1.0)


def test_buffers_are_read_as_they_are_and_further_arguments_keep_their_defaults(tmp_path):
    graph = graph_of(WithIndices(), size=8, channels=4)
    assert [op.name for op in graph.ops.values() if op.name.startswith("input")] == ["input"]
    found = find(graph, SearchRequest(2, 8), OpTimes(folder=tmp_path))
    assert found.notes == ()


def test_an_op_that_can_not_be_timed_is_priced_by_its_size_and_named(tmp_path):
    times = OpTimes(folder=tmp_path)
    found = find(graph_of(Draws(), size=8, channels=4), SearchRequest(2, 8), times)
    (note,) = found.notes
    assert note.startswith("bernoulli can't be timed; the cost is estimated from the size (RuntimeError: ")
    assert (len(times.failed), times.estimated) == (1, 1)
    times.save()
    assert all("bernoulli" not in line for line in times.file.read_text().splitlines())

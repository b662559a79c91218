"""Networks that their authors split by hand: collectives with right gradients, and N processes as one."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.layouts import bounds
from manyhands.core.world import World
from manyhands.parallel.hybrid import open_mesh
from manyhands.parallel.marks import Parameter, layouts_of
from manyhands.parallel.modes.hybrid import hybrid_network
from tests.processes.ranks import run_on_ranks

MESHES = [("tp=2", "tp"), ("tp=3", "tp"), ("dp=2,tp=2", "tp"), ("dp=2,tp=2", "dp"), ("a=2,b=2", "a,b"), ("tp=1", "tp")]
# Whether what a method takes, and the gradient of what it gives, are equal on all processes along the axis. A number
# that all of them hold counts once in an inner product; pieces and terms of a sum count each.
EQUAL = {
    "enter": (True, False),
    "all_reduce": (False, True),
    "gather": (False, True),
    "scatter": (True, False),
    "reduce_scatter": (False, False),
}


def _random(shape, equal, grid, axes, seed):
    """The same on all processes along the axes where `equal`, else each its own."""
    rank = grid.mesh.peers(axes, grid.world.rank)[0] if equal else grid.world.rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank), dtype=torch.float64)


def _pairings(world, mesh, names, cases):
    """For each case <f(x), y> and <x, transposed f(y)> over all processes."""
    grid = open_mesh(mesh, world)
    axis = grid.axis(*names.split(","))
    numbers = [grid.mesh.names.index(name) for name in axis.names]
    found = []
    for method, shape, dim, seed in cases:
        takes, gives = EQUAL[method]
        local = list(shape)
        if method == "gather":
            local[dim] = bounds(shape[dim], axis.size)[axis.rank + 1] - bounds(shape[dim], axis.size)[axis.rank]
        x = _random(local, takes, grid, numbers, seed).requires_grad_()
        y = getattr(axis, method)(x, *([] if method in {"enter", "all_reduce"} else [dim]))
        back = _random(y.shape, gives, grid, numbers, seed + 500)
        y.backward(back)
        once = 1 / axis.size
        found.append([float((y * back).sum()) * (once if gives else 1), float((x * x.grad).sum()) * (once if takes else 1)])
    return torch.tensor(found)


CASES = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.sampled_from(sorted(EQUAL)), st.just(shape), st.integers(0, len(shape) - 1), st.integers(0, 400)
        )
    ),
    min_size=8,
    max_size=30,
)


@pytest.mark.parametrize(("mesh", "names"), MESHES)
@settings(max_examples=6)
@given(cases=CASES)
def test_each_collectives_backward_is_its_adjoint(mesh, names, cases):
    size = torch.tensor([int(part.partition("=")[2]) for part in mesh.split(",")]).prod().item()
    sums = sum(run_on_ranks(_pairings, size, mesh, names, cases))
    torch.testing.assert_close(sums[:, 0], sums[:, 1], rtol=1e-12, atol=1e-12)


def _forwards(world):
    grid = open_mesh(f"tp={world.size}", world)
    tp = grid.axis("tp")
    whole = torch.arange(35.0).reshape(5, 7)
    term = whole * (tp.rank + 1)
    count = sum(range(1, tp.size + 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        small = tp.all_reduce(tp.enter(torch.ones(2, 3)) @ torch.ones(3, 2))
    equal = [
        torch.equal(tp.enter(whole), whole),
        torch.equal(tp.all_reduce(term), count * whole),
        torch.equal(tp.gather(tp.scatter(whole, -1), -1), whole),
        torch.equal(tp.gather(tp.scatter(whole, 0), 0, length=5), whole),
        torch.equal(tp.gather(tp.reduce_scatter(term, 1), 1), count * whole),
        torch.equal(tp.reduce_scatter(term, 1), tp.scatter(tp.all_reduce(term), 1)),
        torch.equal(tp.gather(tp.shard(whole, 1).detach(), 1), whole),
        small.dtype == torch.bfloat16 and float(small.detach()[0, 0]) == 3 * tp.size,
    ]
    grid.release()
    return equal


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_they_give(size):
    for equal in run_on_ranks(_forwards, size):
        assert all(equal), equal


class Of003(nn.Module):
    """Document 003's network: a weight that is cut in its second dimension, and the sum put together by hand."""

    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.axis("tp")
        self.weight = self.tp.shard(torch.rand(512, 128), dim=1)

    def forward(self, x):
        x = self.tp.enter(x) @ self.weight
        return self.tp.all_reduce(x.sum(-1))


class Marked003(nn.Module):
    """The same as MindSpore's users write it: each process makes its own slice."""

    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.axis("tp")
        mine = torch.rand(512, 128).chunk(self.tp.size, 1)[self.tp.rank]
        self.weight = Parameter(mine, layerwise_parallel=True, shape=(512, 128))

    def forward(self, x):
        return self.tp.all_reduce((x @ self.weight).sum(-1))


class Pair(nn.Module):
    """Two whole layers around a pair of which the first is cut by outputs and the second by inputs; 7 and 5 features
    are cut unevenly.
    """

    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.axis("tp")
        self.first = nn.Linear(512, 5)
        self.norm = nn.BatchNorm1d(5)
        self.up = self.tp.shard_module(nn.Linear(5, 7), weight=0, bias=0)
        self.inner = self.tp.shard_module(nn.BatchNorm1d(7), weight=0, bias=0, running_mean=0, running_var=0)
        self.down = self.tp.shard_module(nn.Linear(7, 6, bias=False), weight=1)
        self.bias = nn.Parameter(torch.rand(6))
        self.last = nn.Linear(6, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.tanh(self.up(self.tp.enter(x)))
        x = self.tp.all_reduce(self.down(x)) + self.bias
        return self.last(torch.relu(x))[:, 0]


class Pieces(nn.Module):
    """Uneven pieces that are gathered, scattered and reduce-scattered, also by samples over the other axis."""

    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.axis("tp")
        self.up = self.tp.shard_module(nn.Linear(512, 7), weight=0, bias=0)
        self.down = self.tp.shard_module(nn.Linear(7, 5, bias=False), weight=1)
        self.whole = nn.Linear(7, 5)
        self.end = Parameter(*self._end())

    def _end(self):
        return (self.tp.shard(torch.rand(5), 0).detach(),)

    def forward(self, x):
        x = torch.tanh(self.up(self.tp.enter(x)))
        both = self.tp.gather(x, -1)
        parts = self.tp.reduce_scatter(self.down(x), 1)
        parts = torch.tanh(parts) + self.tp.scatter(self.whole(both), 1)
        return self.tp.gather(parts * self.end, 1).sum(1)

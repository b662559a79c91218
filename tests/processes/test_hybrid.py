"""Networks that their authors split by hand: collectives with right gradients, and N processes as one."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh, shard_boundaries
from manyhands.core.world import World
from manyhands.data.order import equal_share_function
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.mesh.grid import open_mesh
from manyhands.parallel.mesh.marks import Parameter, state_dict_layouts
from manyhands.parallel.modes.hybrid import apply, hybrid_network
from manyhands.parallel.network import MicroBatchShape, ModeRequest
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import Of003, assert_alike, full_tensor

# Whether what a method takes, and the gradient of what it gives, are equal on all processes along the axis. A number
# that all of them hold counts once in an inner product; pieces and terms of a sum count each.
EQUAL = {
    "enter": (True, False),
    "all_reduce": (False, True),
    "gather": (False, True),
    "scatter": (True, False),
    "reduce_scatter": (False, False),
    "all_to_all": (False, False),
}


def _random(shape, equal, grid, axes, seed):
    """The same on all processes along the axes where `equal`, else each its own."""
    rank = grid.mesh.peers(axes, grid.world.rank)[0] if equal else grid.world.rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank), dtype=torch.float64)


def _pairings(grid, names):
    """For each case <f(x), y> and <x, transposed f(y)> over all processes, along some axes."""
    axis = grid.axis(*names)
    numbers = [grid.mesh.names.index(name) for name in axis.names]
    found = []
    for method, shape, dim, seed in _cases(random.Random(len(names))):
        takes, gives = EQUAL[method]
        local = list(shape)
        dims = [dim]
        if method == "all_to_all":
            # Two dimensions at least: the one before is cut where this one was.
            local, shape, dims = [*local, 4], [*shape, 4], [len(shape), dim]
        if method in {"gather", "all_to_all"}:
            first, last = shard_boundaries(shape[dim], axis.size)[axis.rank : axis.rank + 2]
            local[dim] = last - first
        x = _random(local, takes, grid, numbers, seed).requires_grad_()
        y = getattr(axis, method)(x, *([] if method in {"enter", "all_reduce"} else dims))
        back = _random(y.shape, gives, grid, numbers, seed + 500)
        y.backward(back)
        once = 1 / axis.size
        inner = float((y.detach() * back).sum()), float((x.detach() * x.grad).sum())
        found.append([inner[0] * (once if gives else 1), inner[1] * (once if takes else 1)])
    return torch.tensor(found, dtype=torch.float64)


def _cases(chance):
    """Each method on some random shapes."""
    for method in sorted(EQUAL) * 8:
        shape = [chance.randint(1, 5) for _ in range(chance.randint(1, 3))]
        yield method, shape, chance.randrange(len(shape)), chance.randint(0, 400)


def _forwards(grid):
    """Whether collectives along tp give what they say."""
    tp = grid.axis("tp")
    whole = torch.arange(35.0).reshape(5, 7)
    term = whole * (tp.rank + 1)
    count = sum(range(1, tp.size + 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        small = tp.all_reduce(tp.enter(torch.ones(2, 3)) @ torch.ones(3, 2))
    return [
        torch.equal(tp.enter(whole), whole),
        torch.equal(tp.all_reduce(term), count * whole),
        torch.equal(tp.gather(tp.scatter(whole, -1), -1), whole),
        torch.equal(tp.gather(tp.scatter(whole, 0), 0, length=5), whole),
        torch.equal(tp.gather(tp.reduce_scatter(term, 1), 1), count * whole),
        torch.equal(tp.reduce_scatter(term, 1), tp.scatter(tp.all_reduce(term), 1)),
        torch.equal(tp.gather(tp.shard(whole, 1).detach(), 1), whole),
        small.dtype == torch.bfloat16 and float(small.detach()[0, 0]) == 3 * tp.size,
    ]


class Marked003(Of003):
    """The same as MindSpore's users write it: each process makes its own slice."""

    def __init__(self, mesh):
        super().__init__(mesh, mark=False)
        self.weight = Parameter(self.weight.detach(), layerwise_parallel=True, shape=(512, 128))


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
        x = torch.tanh(self.inner(self.up(self.tp.enter(x))))
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
        self.end = self.tp.shard(torch.rand(5))

    def forward(self, x):
        x = torch.tanh(self.up(self.tp.enter(x)))
        both = self.tp.gather(x, -1)
        parts = self.tp.reduce_scatter(self.down(x), 1)
        parts = torch.tanh(parts) + self.tp.scatter(self.whole(both), 1)
        return self.tp.gather(parts * self.end, 1).sum(1)


def _trained(world, make, mesh, samples, updates):
    """Losses, norms of gradients, the whole network and its gradients after some updates in double precision."""
    torch.manual_seed(1)
    grid = open_mesh(mesh, world)
    model = make(grid).double()
    group_batch_norms(model)
    network = apply(model, world, ModeRequest(grid=grid, samples=samples))
    gradients = Gradients(network, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    parts, place = network.share.parts, network.share.index
    losses, norms = [], []
    for step in range(updates):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.rand(12, 512, generator=draw).double(), torch.rand(12, generator=draw).double()
        optimizer.zero_grad()
        # Two passes, so that gradients are held back in the first one.
        for first in (0, 6):
            share_of = equal_share_function(12, 6, (first, first + 6))
            network.begin_micro_batch(MicroBatchShape(6, 12, share_of, step))
            share = share_of(parts, place)
            part = slice(share.start, share.stop)
            loss = F.mse_loss(network.call(x[part]) / 100, y[part], reduction="sum") / 12
            gradients.backward_custom_loss(loss, last=first > 0)
            losses.append(float(loss.detach()) / (world.size / parts))
        gradients.finish()
        norms.append(float(network.gradient_norm()))
        optimizer.step()
        network.finish_update()
    whole = network.full_state_dict()
    gradients = {name: full_tensor(name, one.grad, network) for name, one in model.named_parameters()}
    network.close()
    return losses, norms, whole, gradients


MAKES = [Of003, Marked003, Pair, Pieces]


def _all_of(world, mesh, makes, samples):
    """On a mesh: inner products along axes and all of them, what collectives give, and trained networks."""
    grid = open_mesh(mesh, world)
    axes = [(name,) for name in grid.mesh.names] + [grid.mesh.names] * (len(grid.mesh.names) > 1)
    if world.size == 4:
        with pytest.raises(UserError, match=r"shards have lengths \[1, 4\]"):  # on all processes
            grid.axis("tp").gather(torch.zeros(4 if grid.axis("tp").rank else 1), 0)
    pairings, forwards = torch.cat([_pairings(grid, names) for names in axes]), _forwards(grid)
    network = hybrid_network(nn.Linear(3, 2), grid)  # without marks
    unmarked = network.grid.parts(network.samples), {one.gradient_axes for one in network.layouts.values()}
    return pairings, forwards, unmarked, [_trained(world, make, mesh, samples, 4) for make in makes]


# In tp=2,dp=2 the axis of the samples is not the first one.
@pytest.mark.parametrize(
    ("mesh", "makes", "samples"),
    [*((mesh, MAKES, None) for mesh in ("tp=1", "tp=2", "tp=3", "dp=2,tp=2")), ("tp=2,dp=2", [Pair], ["dp"])],
)
def test_each_collectives_backward_is_its_adjoint_and_as_many_processes_as_you_like_train_as_one(mesh, makes, samples):
    parsed = parse_mesh(mesh)
    pairings, forwards, unmarked, trained = zip(*run_on_ranks(_all_of, parsed.size, mesh, makes, samples), strict=True)
    torch.testing.assert_close(sum(pairings)[:, 0], sum(pairings)[:, 1], rtol=1e-12, atol=1e-12)
    assert all(all(equal) for equal in forwards), forwards
    # A network without marks is data parallel over all.
    assert parsed.size < 4 or unmarked == ((4, {(0, 1)}),) * 4
    single = ",".join(f"{name}=1" for name in parsed.names)
    for make, *several in zip(makes, *trained, strict=True):
        alone = _trained(World(), make, single, None, 4)
        losses = [sum(one) for one in zip(*(result[0] for result in several), strict=True)]
        assert losses == pytest.approx(alone[0], rel=1e-12)
        for _, norms, whole, gradients in several:
            assert norms == pytest.approx(alone[1], rel=1e-12)
            assert_alike(whole, alone[2], 1e-12, least=1e-3)
            assert_alike(gradients, alone[3], 1e-12, least=1e-3)
            torch.testing.assert_close((whole, gradients), several[0][2:], rtol=1e-12, atol=1e-14)


def _grid(mesh, rank=0):
    """A mesh of which this process is one place, without groups: for what is said before anything is sent."""
    sizes = parse_mesh(mesh)
    grid = open_mesh(dict.fromkeys(sizes.names, 1))
    grid.mesh, grid.world = sizes, World(rank, sizes.size)
    return grid


@given(shape=st.tuples(st.integers(3, 9), st.integers(2, 9)), rank=st.integers(0, 5), both=st.booleans())
def test_pieces_lie_where_their_layout_says(shape, rank, both):
    grid = _grid("dp=2,tp=3", rank)
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    tp, dp = grid.axis("tp"), grid.axis("dp")
    module = nn.Module()
    module.weight = dp.shard(tp.shard(whole, 0), -1) if both else tp.shard(whole, 0)
    module = copy.deepcopy(module).double()
    layout = state_dict_layouts(module, grid.mesh, rank)["weight"]
    assert layout.shape == shape
    assert layout.sharded_axes == ({0, 1} if both else {1})
    assert torch.equal(module.weight, whole[tuple(slice(*edges) for edges in layout.region(grid.mesh, rank))].double())


def _of_another_length(_):
    module = nn.Module()
    module.weight = Parameter(torch.zeros(5), layerwise_parallel="tp", shape=(7,))
    state_dict_layouts(module, parse_mesh("tp=2"), 0)


def test_what_the_marks_mean():
    def layout(mesh, rank=0, **mark):
        module = nn.Module()
        module.weight = Parameter(torch.zeros(4, 6), **mark)
        return state_dict_layouts(module, parse_mesh(mesh), rank)["weight"]

    assert layout("dp=2,tp=2") == layout("dp=2", shape=(4, 6)) == layout("tp=1", layerwise_parallel=False)
    assert layout("dp=2,tp=2", layerwise_parallel=True).shape == (8, 6)
    assert layout("dp=2,tp=2", layerwise_parallel=True).cuts == ((0, (1,)),)
    assert layout("dp=2", layerwise_parallel=True).cuts == ((0, (0,)),)
    assert layout("dp=2,tp=2", layerwise_parallel="dp").cuts == ((0, (0,)),)
    assert layout("dp=2,tp=2", layerwise_parallel=("tp", -1)).cuts == ((1, (1,)),)
    assert layout("dp=2,tp=2", layerwise_parallel=True, shape=(4, 12)).cuts == ((1, (1,)),)
    assert layout("tp=2", 1, layerwise_parallel=True, shape=(4, 11)).shape == (4, 11)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda grid: grid.axis("pp"), 'no axis "pp"'),
        (lambda grid: grid.axis("tp", "tp"), "twice"),
        (lambda grid: grid.axis(), "no mesh axis is given"),
        (lambda grid: grid.axis("tp").shard(torch.zeros(4, 2), 2), "no dimension 2"),
        (lambda grid: grid.axis("tp").shard(torch.zeros(4, 2), 1), "too short for 3"),
        (lambda grid: grid.axis("tp").shard(grid.axis("tp").shard(torch.zeros(9, 9)), 1), "already sharded"),
        (lambda grid: grid.axis("tp").shard_module(nn.Linear(3, 3), wait=0), "has no wait"),
        (lambda grid: grid.axis("tp").gather(torch.zeros(2), 0, length=9), "shards have lengths"),
        (lambda grid: Parameter(torch.zeros(2), layerwise_parallel=("tp", 1)), "doesn't fit dimension 1 of the tensor"),
        (lambda grid: Parameter(torch.zeros(2), layerwise_parallel=(1, "tp")), "layerwise_parallel can't be"),
        (lambda grid: Parameter(torch.zeros(2), shape=(4,)), "but the unsharded tensor has shape"),
        (lambda grid: open_mesh("dp=2,tp=3"), "for 6 processes, but 1 are running"),
        (lambda grid: open_mesh("dp"), "is not a mesh"),
        (_of_another_length, r"weight on rank 0 has shape \(5,\), expected \(3,\)"),
    ],
)
def test_mistakes_are_named(mistake, words):
    with pytest.raises(UserError, match=words):
        mistake(_grid("dp=2,tp=3"))

"""verify_gradients names a sum that is missing or doubled, and finds nothing wrong where nothing is."""

import pytest
import torch
from torch import nn

from manyhands.core.errors import RunError, UserError
from manyhands.core.mesh import parse_mesh
from manyhands.parallel.mesh.grid import open_mesh
from manyhands.parallel.verify import verify_gradients
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import Of003


class Net(nn.Module):
    """A whole layer, a pair that is cut, and a whole layer; each fault removes, doubles or moves one collective."""

    def __init__(self, mesh, fault=""):
        super().__init__()
        self.tp, self.fault = mesh.axis("tp"), fault
        self.dp = mesh.axis("dp") if "dp" in mesh.mesh.names else self.tp
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.up = self.tp.shard_module(nn.Linear(5, 7), weight=0, bias=0)
        self.down = self.tp.shard_module(nn.Linear(7, 4, bias=False), weight=1)
        self.drop = nn.Dropout(0.5)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        x = self._enter(torch.relu(self.norm(self.first(x))))
        x = self.down(torch.tanh(self.up(x)))
        if self.fault == "bias inside":
            return self.drop(self.tp.all_reduce(x + self.bias))
        x = self._reduce(x)
        if self.fault == "piece":
            return self.tp.scatter(x, 1)
        return self.drop(x) + self.bias

    def _enter(self, x):
        entered = {
            "no enter": [],
            "enter twice": [self.tp, self.tp],
            "enter over dp": [self.dp],
            "enter over both": [self.tp, self.dp],
        }
        for axis in entered.get(self.fault, [self.tp]):
            x = axis.enter(x)
        return x

    def _reduce(self, x):
        reduced = {"no reduce": [], "reduce twice": [self.tp, self.tp], "reduce over dp": [self.dp]}
        for axis in reduced.get(self.fault, [self.tp]):
            x = axis.all_reduce(x)
        if self.fault == "reduce back too":
            x = self.tp.enter(x)
        return x / self.tp.size if self.fault == "mean" else x


BEFORE = {"first.weight", "first.bias", "norm.weight", "norm.bias"}
CUT = {"up.weight", "up.bias", "down.weight"}
# What each fault is called, over which axis, and in which of a network's values it is seen.
FAULTS = {
    "no enter": ("missing", ("tp",), BEFORE),
    "enter twice": ("doubled", ("tp",), BEFORE),
    "no reduce": ("missing", ("tp",), {"output"}),
    "reduce twice": ("doubled", ("tp",), {"output"}),
    "reduce back too": ("doubled", ("tp",), BEFORE | CUT),
    "bias inside": ("wrong", (), {"output"}),
    "mean": ("wrong", (), {"output"} | BEFORE | CUT),
    "piece": ("cut", (), {"output"}),
}
WRONG_AXIS = {
    "enter over dp": ("wrong", (), BEFORE),
    "enter over both": ("wrong", (), BEFORE),
    "reduce over dp": ("wrong", (), {"output"}),
}


def _check(world, mesh, fault, as_function, labels):
    grid = open_mesh(mesh, world)
    torch.manual_seed(5)
    net = (lambda place: Net(place, fault)) if as_function else Net(grid, fault)
    sample = torch.randn(9, 6)
    classes = torch.randint(0, 4, (9,)) if labels else None
    result = verify_gradients(net, sample, classes, mesh=grid if as_function else None)
    return [(one.name, one.cause, one.axes) for one in result.findings], str(result), result.worst, result.compared


def _check_all(world, mesh, faults):
    """What is found of a right network, which is given in four ways, and of each fault."""
    ways = [(as_function, labels) for as_function in (False, True) for labels in (False, True)]
    right = [_check(world, mesh, "", as_function, labels) for as_function, labels in ways]
    return right, {fault: _check(world, mesh, fault, False, False) for fault in faults}


@pytest.mark.parametrize(
    ("mesh", "faults"),
    [
        ("tp=1", []),
        ("tp=2", list(FAULTS)),
        ("tp=3", []),
        ("dp=2,tp=2", [*WRONG_AXIS, "no enter", "reduce twice", "bias inside"]),
    ],
)
def test_what_is_right_is_found_right_and_a_fault_is_named(mesh, faults):
    (right, wrong), *others = run_on_ranks(_check_all, parse_mesh(mesh).size, mesh, faults)
    assert all(other == (right, wrong) for other in others)
    for findings, _, worst, compared in right:
        assert findings == []
        assert worst < 1e-8
        assert compared == 8
    for fault, (findings, text, *_) in wrong.items():
        cause, axes, names = {**FAULTS, **WRONG_AXIS}[fault]
        named = {name for name, found, over in findings if (found, over) == (cause, axes)}
        # The gradient of a bias before BatchNorm is zero, so nothing can be wrong with it.
        assert named | {"first.bias"} == names | {"first.bias"}, text
        assert {name for name, *_ in findings} == named, text


class Curved(nn.Module):
    """Two whole layers with work between them that is split, and a sum that is left out before what is not linear."""

    def __init__(self, mesh, right):
        super().__init__()
        self.tp, self.right = mesh.axis("tp"), right
        self.first = nn.Linear(6, 4)
        self.middle = self.tp.shard_module(nn.Linear(4, 4, bias=False), weight=1)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.middle(self.tp.scatter(self.first(x), 1))
        x = torch.relu(self.tp.all_reduce(x) if self.right else x)
        return self.last(x)


def _others(world):
    grid = open_mesh(f"tp={world.size}", world)
    torch.manual_seed(2)
    found = {}
    for word, make, width in [
        ("003", Of003, 512),
        ("003 without a sum", lambda mesh: Of003(mesh, 0), 512),
        ("003 with two sums", lambda mesh: Of003(mesh, 2), 512),
        ("003 without a mark", lambda mesh: Of003(mesh, 1, mark=False), 512),
        ("curved", lambda mesh: Curved(mesh, right=True), 6),
        ("curved without a sum", lambda mesh: Curved(mesh, right=False), 6),
    ]:
        result = verify_gradients(make, torch.rand(6, width), mesh=grid)
        found[word] = [(one.name, one.cause) for one in result.findings]
    # A network that exists is tried as it is, and left as it was.
    net = Of003(grid, 2)
    before = net.weight.detach().clone()
    with pytest.raises(RunError, match="summed twice over tp"):
        verify_gradients(net, torch.rand(4, 512), check=True)
    found["left"] = torch.equal(before, net.weight) and net.weight.grad is None
    # Each process its own random numbers.
    torch.manual_seed(world.rank)
    apart = nn.Linear(6, 2)
    found["apart"] = [
        (one.name, one.cause) for one in verify_gradients(apart, torch.rand(4, 6), mesh=grid, samples=()).findings
    ]
    for samples in (1, 0):
        with pytest.raises(UserError, match=r"can.t be divided among"):
            verify_gradients(nn.Linear(3, 2), torch.rand(samples, 3), mesh=open_mesh("dp=2", world))
    return found


def test_003_and_others():
    for found in run_on_ranks(_others, 2):
        assert found["003"] == found["curved"] == []
        assert found["003 without a sum"] == [("output", "missing")]
        assert found["003 with two sums"] == [("output", "doubled")]
        assert found["003 without a mark"] == [("weight", "mark")]
        assert found["curved without a sum"][0] == ("output", "wrong")
        assert found["apart"] == [("weight", "replicas"), ("bias", "replicas")]
        assert found["left"]


def test_a_network_without_a_mesh_is_refused():
    with pytest.raises(UserError, match="no module of the network stores"):
        verify_gradients(nn.Linear(3, 2), torch.rand(4, 3))

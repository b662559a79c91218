"""verify_gradients names what is missing, doubled or over the wrong axis, and has nothing to say of what is right."""

import pytest
import torch
from torch import nn

from manyhands.core.errors import RunError
from manyhands.core.mesh import parse_mesh
from manyhands.parallel.hybrid import open_mesh
from manyhands.parallel.verify import verify_gradients
from tests.processes.ranks import run_on_ranks


class Net(nn.Module):
    """A whole layer, a pair that is cut, and a whole layer; each fault takes, doubles or moves one collective."""

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
        x = torch.relu(self.norm(self.first(x)))
        if self.fault == "enter twice":
            x = self.tp.enter(x)
        if self.fault == "enter over dp":
            x = self.dp.enter(x)
        elif self.fault != "no enter":
            x = self.tp.enter(x)
        if self.fault == "enter over both":
            x = self.dp.enter(x)
        x = self.down(torch.tanh(self.up(x)))
        if self.fault == "bias inside":
            return self.drop(self.tp.all_reduce(x + self.bias))
        if self.fault == "reduce twice":
            x = self.tp.all_reduce(x)
        if self.fault == "reduce over dp":
            x = self.dp.all_reduce(x)
        elif self.fault != "no reduce":
            x = self.tp.all_reduce(x)
        if self.fault == "reduce back too":
            x = self.tp.enter(x)
        if self.fault == "mean":
            x = x / self.tp.size
        if self.fault == "piece":
            return self.tp.scatter(x, 1)
        return self.drop(x) + self.bias


BEFORE = {"first.weight", "first.bias", "norm.weight", "norm.bias"}
CUT = {"up.weight", "up.bias", "down.weight"}
# What each fault is called, over which axis, and in which of a network's values it is seen.
FAULTS = {
    "no enter": ("missing", ("tp",), BEFORE),
    "enter twice": ("doubled", ("tp",), BEFORE),
    "no reduce": ("missing", ("tp",), {"output"}),
    "reduce twice": ("doubled", ("tp",), {"output"}),
    "reduce back too": ("doubled", ("tp",), BEFORE | CUT),
    "bias inside": ("doubled", (), {"output"}),
    "piece": ("cut", ("tp",), {"output"}),
}
WRONG_AXIS = {
    "enter over dp": ("wrong axis", ("tp", "dp"), BEFORE),
    "enter over both": ("doubled", ("dp",), BEFORE),
    "reduce over dp": ("wrong axis", ("tp", "dp"), {"output"}),
}


def _check(world, mesh, fault, as_function, labels):
    grid = open_mesh(mesh, world)
    torch.manual_seed(5)
    net = (lambda place: Net(place, fault)) if as_function else Net(grid, fault)
    sample = torch.randn(9, 6)
    classes = torch.randint(0, 4, (9,)) if labels else None
    result = verify_gradients(net, sample, classes, mesh=grid if as_function else None)
    return [(one.name, one.cause, one.axes) for one in result.findings], str(result), result.worst, result.compared


def _everywhere(mesh, fault, *, as_function=False, labels=False):
    results = run_on_ranks(_check, parse_mesh(mesh).size, mesh, fault, as_function, labels)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3", "dp=2", "dp=2,tp=2", "tp=2,dp=2"])
def test_what_is_right_is_found_right(mesh, as_function, labels):
    mesh = mesh if "tp" in mesh else f"{mesh},tp=1"
    findings, _, worst, compared = _everywhere(mesh, "", as_function=as_function, labels=labels)
    assert findings == []
    assert worst < 1e-8
    assert compared == 8


@pytest.mark.parametrize(
    ("mesh", "fault"),
    [(mesh, fault) for mesh in ("tp=2", "dp=2,tp=2") for fault in FAULTS]
    + [("dp=2,tp=2", fault) for fault in WRONG_AXIS],
)
def test_a_fault_is_named(mesh, fault):
    cause, axes, names = {**FAULTS, **WRONG_AXIS}[fault]
    findings, text, *_ = _everywhere(mesh, fault)
    named = {name for name, found, over in findings if (found, over) == (cause, axes)}
    # The gradient of a bias before BatchNorm is zero, so nothing can be wrong with it.
    assert named | {"first.bias"} == names | {"first.bias"}, text
    assert {name for name, *_ in findings} == named, text

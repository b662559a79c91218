"""What splits badly unless one takes care: statements in place, numbers of the batch, shared weights, own losses."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh
from manyhands.parallel.plan import Plan
from tests.processes.cut import CutNetwork
from tests.processes.ranks import run_on_ranks

SAMPLES = 6


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.a(x)
        x.relu_()
        return self.b(x)


class InPlaceFunction(InPlace):
    def forward(self, x):
        x = self.a(x)
        F.relu(x, inplace=True)
        return self.b(x)


class ByCount(InPlace):
    def forward(self, x):
        return self.b(self.a(x) * (1 / x.shape[0]) / x.size(0) ** 0.5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False), nn.Linear(12, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Functional(InPlace):
    def forward(self, x):
        hidden = F.linear(torch.relu(F.linear(x, self.a.weight, self.a.bias)), self.b.weight, self.b.bias)
        return hidden + self.b(torch.relu(self.a(x)))


class Remembers(InPlace):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(()))

    def forward(self, x):
        self.m = 0.9 * self.m + 0.1
        return self.b(torch.relu(self.a(x)))


def _reference(make, x, y, loss, calls):
    torch.manual_seed(0)
    net = make().double()
    value = sum(loss(net(x), y) for _ in range(calls)) / calls
    (value * calls).backward()
    return value.item(), {name: parameter.grad for name, parameter in net.named_parameters()}


def _split(world, make, ops, loss=None, calls=1):
    torch.manual_seed(0)
    net = make().double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 12, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    expected, wanted = _reference(make, x, y, loss or F.cross_entropy, calls)
    model = CutNetwork(net, Plan(parse_mesh(f"dp={world.size}"), ops), x[0], world, loss)
    for _ in range(calls):
        value = model.backward(x, y)
    gradients = {}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.grad
    gradients = model.full_state_dict()
    model.release()
    worst = max(float((gradients[name] - one).abs().max()) for name, one in wanted.items())
    return abs(value - expected), worst


CASES = [
    (InPlace, {"a": "o@dp"}),
    (InPlaceFunction, {"b": "i@dp"}),
    (InPlace, {}),
    (ByCount, {}),
    (ByCount, {"b": "r@dp"}),
    (Tied, {"a": "o@dp"}),
    (Tied, {"a": "i@dp", "c": "o@dp"}),
    (Functional, {}),
    (Functional, {"a": "o@dp"}),
    (Functional, {"linear": "o@dp", "b": "o@dp"}),
    (Remembers, {}),
]


@pytest.mark.parametrize(("make", "ops"), CASES, ids=lambda word: getattr(word, "__name__", None))
def test_one_process_s_loss_and_gradients_come_out(make, ops):
    for value, worst in run_on_ranks(_split, 2, make, ops):
        assert value <= 1e-12
        assert worst <= 1e-12


def test_gradients_of_two_calls_add_up():
    for _, worst in run_on_ranks(_split, 2, InPlace, {"a": "o@dp"}, None, 2):
        assert worst <= 1e-12


def _squares(output, labels):
    return ((output - F.one_hot(labels, 4)) ** 2).mean()


def _refused(world, make, ops, loss):
    try:
        _split(world, make, ops, loss)
    except UserError as error:
        return error.message
    return ""


@pytest.mark.parametrize("ops", [{"b": "o@dp"}, {"b": "o@dp", "loss": "o@dp"}])
def test_a_loss_of_the_user_s_own(ops):
    for value, worst in run_on_ranks(_split, 2, InPlace, ops, _squares):
        assert value <= 1e-12
        assert worst <= 1e-12


class Scaled(InPlace):
    def forward(self, x):
        return self.b(torch.relu(self.a(x))) + (x @ self.a.weight.T) @ (2 * self.b.weight.T)


def test_a_parameter_that_is_read_in_another_way_too_can_t_be_cut():
    for what in run_on_ranks(_refused, 2, Scaled, {"b": "o@dp"}, None):
        assert "can't be split" in what
        assert "would split differently" in what

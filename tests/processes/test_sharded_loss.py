"""Losses of the user's own in small operators, with the classes cut: the loss and gradients of one process."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh
from manyhands.parallel.plan import Plan
from tests.processes.cut import CutNetwork
from tests.processes.ranks import run_on_ranks

SAMPLES, CLASSES = 5, 7


class Expanded(nn.Module):
    """Cross-entropy as the formula says it, in small operators."""

    def __init__(self, sparse=True):
        super().__init__()
        self.sparse = sparse

    def forward(self, logit, label):
        logit_max = torch.max(logit, -1, keepdim=True)[0]
        exp = torch.exp(torch.sub(logit, logit_max))
        exp_sum = torch.sum(exp, -1, keepdim=True)
        softmax_result = torch.div(exp, exp_sum)
        if self.sparse:
            label = F.one_hot(label, logit.shape[1])
        softmax_result_log = torch.log(softmax_result)
        loss = torch.sum(torch.mul(softmax_result_log, label), -1)
        loss = torch.mul(torch.tensor(-1.0), loss)
        return torch.mean(loss, -1)


def by_methods(output, labels):
    """The same in methods, a value for each sample."""
    shifted = output - output.max(dim=1, keepdim=True).values
    logarithms = shifted - shifted.exp().sum(dim=1, keepdim=True).log()
    return -(logarithms * F.one_hot(labels, num_classes=output.size(1)).float()).sum(1)


def squares(output, labels):
    return ((output - F.one_hot(labels, CLASSES)) ** 2).mean()


def above_the_largest(output, labels):
    """Whose gradient goes through the maximum."""
    return (output.max(1)[0] * 2 - (output * F.one_hot(labels, CLASSES)).sum(1)).mean()


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, CLASSES)).double()


def _batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def _cut(world, loss, mesh, ops):
    net = _network()
    x, labels = _batch()
    model = CutNetwork(net, Plan(parse_mesh(mesh), ops), x[0], world, loss)
    value = model.backward(x, labels)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.grad
    gradients = model.full_state_dict()
    model.release()
    return value, gradients


PLANS = [("dp=2", {"loss": "o@dp"}), ("dp=3", {"2": "o@dp", "loss": "o@dp"}), ("dp=2,tp=2", {"loss": "n@dp o@tp"})]


@pytest.mark.parametrize("loss", [Expanded(), by_methods, squares, above_the_largest])
@pytest.mark.parametrize(("mesh", "ops"), PLANS)
def test_the_loss_and_gradients_are_those_of_one_process(loss, mesh, ops):
    net, (x, labels) = _network(), _batch()
    value = loss(net(x), labels).mean()
    value.backward()
    wanted = {name: one.grad for name, one in net.named_parameters()}
    for found, gradients in run_on_ranks(_cut, parse_mesh(mesh).size, loss, mesh, ops):
        assert abs(found - value.item()) <= 1e-12
        assert max(float((gradients[name] - one).abs().max()) for name, one in wanted.items()) <= 1e-12


def _unruled(output, labels):
    return F.cross_entropy(output.cumsum(1), labels)


def _refused(world, loss):
    try:
        _cut(world, loss, "dp=2", {"loss": "o@dp"})
    except UserError as error:
        return error.message
    return ""


def test_what_has_no_rule_is_refused_by_name():
    for what in run_on_ranks(_refused, 2, _unruled):
        assert "cumsum of this loss has no rule" in what


class SemiAutoParallelNet(nn.Module):
    """A product with a parameter of its own, and a sum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(512, 128))

    def forward(self, x):
        return (x @ self.weight).sum(-1, keepdim=True)


def _document(world):
    torch.manual_seed(0)
    net = SemiAutoParallelNet().double()
    x, wanted = torch.rand(4, 512, dtype=torch.float64), torch.arange(4)
    (net(x)[:, 0] - wanted).square().mean().backward()
    truth = net.weight.grad.clone()
    net.weight.grad = None
    plan = Plan(parse_mesh("dp=2"), {"matmul": "{(1, 1),(1, 2)}"})
    model = CutNetwork(net, plan, x[0], world, lambda output, labels: (output[:, 0] - labels).square().mean())
    model.backward(x, wanted)
    columns = slice(64 * world.rank, 64 * (world.rank + 1))
    error = float((net.weight.grad - truth[:, columns]).abs().max())
    cuts = model.plan.layouts["weight"].cuts
    model.release()
    return tuple(net.weight.shape), cuts, error


def test_a_product_with_a_parameter_is_cut_as_its_pin_says():
    for shape, cuts, error in run_on_ranks(_document, 2):
        assert shape == (512, 64)
        assert cuts == ((1, (0,)),)
        assert error <= 1e-10

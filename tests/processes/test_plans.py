"""Any plan gives one process's losses and gradients: for known networks, what splits badly, and own losses.

More random plans were run once: the table is in docs/experiments/parallel.md.
"""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.parallel.plan import Plan
from tests.planner.nets import random_plan
from tests.processes.parity import BATCH, NETWORKS, assert_as_one_process, truth_of

TWO, FOUR = (("dp", 2),), (("dp", 4),)
SQUARE, CUBE = (("dp", 2), ("tp", 2)), (("dp", 2), ("tp", 2), ("tp2", 2))
# Each network once and each mesh with one network at least; of vgg also BatchNorm's groups smaller than the batch.
FAST = [("resnet", TWO, [0], {}), ("vgg", SQUARE, [10, 11], {"group": 4}), ("vit", FOUR, [0], {})]
FIVE, SINGLE = {"updates": 5}, {"updates": 1, "dtype": torch.float32, "tolerance": 1e-4}
SLOW = [("efficientnet_b0", TWO, [100, 101], FIVE), ("convnext", SQUARE, [100], FIVE), ("densenet", TWO, [100], FIVE)]
SLOW += [("resnet", SQUARE, [100], FIVE), ("vit", SQUARE, range(100, 103), FIVE), ("vgg", FOUR, [100, 101], FIVE)]
SLOW += [("vgg", CUBE, [100, 101], FIVE), ("vgg", TWO, [20, 21], SINGLE), ("vit", SQUARE, [20, 21], SINGLE)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "axes", "seeds", "how"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_random_plans_make_the_updates_of_one_process(name, axes, seeds, how):
    """BatchNorm's groups are the whole batch by default, since over few values its gradients are mostly rounding."""
    assert {name for name, *_ in [*FAST, *SLOW]} == set(NETWORKS)
    (make, size), numbers = NETWORKS[name], torch.Generator().manual_seed(9)
    pictures = torch.randn(BATCH, 3, size, size, generator=numbers, dtype=how.get("dtype", torch.float64))
    truth = truth_of(make, pictures, how.get("updates", 2), how.get("group", BATCH))
    plans = [(f"{name} {seed}", truth, random_plan(truth.graph(), Mesh(axes), seed)) for seed in seeds]
    assert_as_one_process(plans, how.get("tolerance", 1e-9))


class Layers(nn.Module):
    """Two layers; the function says what is done with them: of the module and x."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.forward_of = nn.Linear(12, 8), nn.Linear(8, 4), forward

    def forward(self, x):
        return self.forward_of(self, x)


def _in_place(self, x):
    x = self.a(x)
    x.relu_()
    return self.b(x)


def _in_place_by_function(self, x):
    x = self.a(x)
    F.relu(x, inplace=True)
    return self.b(x)


def _by_count(self, x):
    # Evaluation may take any number of samples.
    return self.b(self.a(x) * (1 / x.shape[0]) / x.size(0) ** 0.5) if self.training else self.b(self.a(x))


def _functional(self, x):
    hidden = F.linear(torch.relu(F.linear(x, self.a.weight, self.a.bias)), self.b.weight, self.b.bias)
    return hidden + self.b(torch.relu(self.a(x)))


def _read_otherwise(self, x):
    return self.b(torch.relu(self.a(x))) + (x @ self.a.weight.T) @ (2 * self.b.weight.T)


class Remembers(Layers):
    def __init__(self):
        super().__init__(_in_place)
        self.register_buffer("m", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.m = 0.9 * self.m + 0.1
        return super().forward(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False), nn.Linear(12, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def squares(output, labels):
    return ((output - F.one_hot(labels, output.shape[1])) ** 2).mean()


# What splits badly unless one takes care: statements in place, numbers of the batch, shared weights, own losses.
HAZARDS = {
    "in place": (functools.partial(Layers, _in_place), [{"a": "o@dp"}, {}]),
    "in place by function": (functools.partial(Layers, _in_place_by_function), [{"b": "i@dp"}]),
    "by count": (functools.partial(Layers, _by_count), [{}, {"b": "r@dp"}]),
    "tied": (Tied, [{"a": "o@dp"}, {"a": "i@dp", "c": "o@dp"}]),
    "functional": (functools.partial(Layers, _functional), [{}, {"a": "o@dp"}, {"linear": "o@dp", "b": "o@dp"}]),
    "remembers": (Remembers, [{}]),
    "own loss": (functools.partial(Layers, _in_place), [{"b": "o@dp"}, {"b": "o@dp", "loss": "o@dp"}]),
}


def _truth(make, features, classes, loss=None, samples=6):
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return truth_of(make, x, 1, samples, loss=loss, classes=classes)


def test_what_splits_badly_gives_one_processs_loss_and_gradients():
    cases = []
    for name, (make, plans) in HAZARDS.items():
        truth = _truth(make, 12, 4, squares if name == "own loss" else None)
        cases += [(f"{name} {ops}", truth, Plan(parse_mesh("dp=2"), ops)) for ops in plans]
    assert_as_one_process(cases, 1e-12)


def expanded(logit, label):
    """Cross-entropy as the formula says it, in small operators."""
    logit_max = torch.max(logit, -1, keepdim=True)[0]
    exp = torch.exp(torch.sub(logit, logit_max))
    exp_sum = torch.sum(exp, -1, keepdim=True)
    softmax_result = torch.div(exp, exp_sum)
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


def above_the_largest(output, labels):
    """Whose gradient goes through the maximum."""
    return (output.max(1)[0] * 2 - (output * F.one_hot(labels, 7)).sum(1)).mean()


PLANS = {"dp=2": {"loss": "o@dp"}, "dp=3": {"2": "o@dp", "loss": "o@dp"}, "dp=2,tp=2": {"loss": "n@dp o@tp"}}


def _classifier():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7))


@pytest.mark.parametrize("mesh", PLANS)
def test_own_losses_in_small_operators_with_the_classes_split_are_those_of_one_process(mesh):
    plan, losses = Plan(parse_mesh(mesh), PLANS[mesh]), (expanded, by_methods, squares, above_the_largest)
    cases = [(loss.__name__, _truth(_classifier, 6, 7, loss, samples=5), plan) for loss in losses]
    assert_as_one_process(cases, 1e-12)


def cumulated(output, labels):
    return F.cross_entropy(output.cumsum(1), labels)


@pytest.mark.parametrize(
    ("how", "ops", "word"),
    [
        ((_classifier, 6, 7, cumulated), {"loss": "o@dp"}, "cumsum of this loss has no rule"),
        # A parameter that is read in another way too.
        ((functools.partial(Layers, _read_otherwise), 12, 4), {"b": "o@dp"}, "would split differently"),
    ],
)
def test_what_has_no_rule_is_refused_by_name_on_both_processes(how, ops, word):
    with pytest.raises(AssertionError) as refused:
        assert_as_one_process([("", _truth(*how), Plan(parse_mesh("dp=2"), ops))], 0)
    assert UserError.__name__ in str(refused.value)
    assert str(refused.value).count(word) >= 2

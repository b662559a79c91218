"""Every rule alone: each letter that it allows, on numbers of processes that divide some of its lengths and not others.

In front of the op stands a product with a parameter of the pictures' shape, whose gradient is the op's input gradient.
"""

import functools
import itertools
import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from manyhands.core.mesh import Mesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.graph import LOSS
from manyhands.parallel.split.rules import OPAQUE
from manyhands.parallel.split.rules import RULES as KNOWN
from manyhands.parallel.split.strategy import refusal, write_strategy
from tests.processes.parity import CLASSES, assert_as_one_process, truth_of
from tests.processes.test_norm import Activated

SAMPLES = 7
TWO, THREE, SQUARE = Mesh((("dp", 2),)), Mesh((("dp", 3),)), Mesh((("dp", 2), ("tp", 2)))


class Scaled(nn.Module):
    """A parameter times the pictures, an op of RULES, and a layer that makes classes of whatever the op gives."""

    def __init__(self, kind, place):
        super().__init__()
        _, make, shape = RULES[kind][place]
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)
        self.op = make()
        with torch.no_grad():
            features = self.op(torch.rand(SAMPLES, *shape)).flatten(1).shape[1]
        self.last = nn.Linear(features, CLASSES)

    def forward(self, x):
        return self.last(torch.flatten(self.op(x * self.scale), 1))


class Called(nn.Module):
    """A function with a few parameters of its own, as a module that is looked into."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(shape) + 0.5) for shape in shapes)

    def forward(self, x):
        return self.function(x, *self.weights)


class Attention(nn.Module):
    def __init__(self, need_weights=False, **how):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True, **how)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Words(nn.Module):
    """Whole numbers in, as a text's."""

    def __init__(self):
        super().__init__()
        self.op = nn.Embedding(11, 8)
        self.last = nn.Linear(8 * 5, CLASSES)

    def forward(self, x):
        return self.last(torch.flatten(self.op(x), 1))


def _two(x, a, b):
    return torch.cat([x * a, x + b, x], 1)


class Tokens(nn.Module):
    """Normalizes [samples x tokens, C], as timm's LeViT does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(9)

    def forward(self, x):
        return self.norm(x.flatten(0, 1)).view_as(x)


def _added(x, bias, weight):
    return torch.addmm(bias, x, weight)


PICTURE, WIDE, LINE = (4, 6, 6), (12, 4, 4), (4, 9)
RULES = {
    "conv": [
        ("plain", lambda: nn.Conv2d(4, 6, 3), PICTURE),
        ("strided, padded", lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), PICTURE),
        ("reflecting, dilated", lambda: nn.Conv2d(4, 5, 3, padding=2, dilation=2, padding_mode="reflect"), PICTURE),
        ("no bias", lambda: nn.Conv2d(4, 6, 3, bias=False), PICTURE),
        ("same, one point", lambda: nn.Conv2d(4, 6, 1, padding="same"), PICTURE),
        ("grouped", lambda: nn.Conv2d(12, 24, 3, groups=6, padding=1), WIDE),
        ("depth-wise", lambda: nn.Conv2d(12, 12, 3, groups=12, padding=1), WIDE),
        ("1d", lambda: nn.Conv1d(4, 6, 3), LINE),
        ("3d", lambda: nn.Conv3d(3, 4, 2), (3, 3, 4, 4)),
    ],
    "linear": [
        ("2-D", lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 10)), PICTURE),
        ("3-D", lambda: nn.Linear(12, 10), (5, 12)),
        ("no bias", lambda: nn.Linear(12, 10, bias=False), (5, 12)),
    ],
    "batch_norm": [
        ("2d", lambda: nn.BatchNorm2d(4), PICTURE),
        ("1d", lambda: nn.BatchNorm1d(4), LINE),
        ("features", lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36)), LINE),
        ("bare", lambda: nn.BatchNorm2d(4, affine=False), PICTURE),
        ("tokens as rows", Tokens, LINE),
        ("with an activation", lambda: Activated(4), PICTURE),
        ("no statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), PICTURE),
    ],
    "norm": [
        ("layer", lambda: nn.LayerNorm(12), (5, 12)),
        ("layer of all", lambda: nn.LayerNorm(LINE), LINE),
        ("group", lambda: nn.GroupNorm(6, 12), WIDE),
    ],
    "attention": [("self", lambda: Attention(), (5, 12)), ("no bias", lambda: Attention(bias=False), (5, 12))],
    "elementwise": [
        ("activations", lambda: nn.Sequential(nn.GELU(), nn.Hardswish(), nn.LeakyReLU(inplace=True)), PICTURE),
        ("a number", lambda: Called(lambda x: 2 - x / 3), PICTURE),
        ("per channel", lambda: Called(torch.mul, (4, 1, 1)), PICTURE),
        ("per channel, whole shape", lambda: Called(torch.mul, (1, 4, 1, 1)), PICTURE),
        ("per pixel", lambda: Called(torch.add, (6, 6)), PICTURE),
        ("one value", lambda: Called(torch.mul, ()), PICTURE),
        ("parameter first", lambda: Called(lambda x, w: w - x, (1, 4, 6, 6)), PICTURE),
        ("attention by channel", lambda: Called(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()), PICTURE),
        ("attention by pixel", lambda: Called(lambda x: x * x.mean(1, keepdim=True)), PICTURE),
        ("itself", lambda: Called(lambda x: x + x), PICTURE),
    ],
    "pool": [
        ("largest", lambda: nn.MaxPool2d(3, 2, 1), PICTURE),
        ("mean", lambda: nn.AvgPool2d(2), PICTURE),
        ("adaptive", lambda: nn.AdaptiveAvgPool2d(2), PICTURE),
        ("of lines", lambda: nn.AvgPool1d(3), LINE),
        ("flat", lambda: nn.Flatten(), WIDE),
        ("flat pixels", lambda: nn.Flatten(2), PICTURE),
        ("method", lambda: Called(lambda x: x.flatten(1)), WIDE),
        ("larger", lambda: nn.Upsample(scale_factor=2), PICTURE),
        ("larger, function", lambda: Called(functools.partial(F.interpolate, size=(9, 9))), PICTURE),
    ],
    "reduce": [
        ("over pixels", lambda: Called(lambda x: x.mean([2, 3])), PICTURE),
        ("over pixels by name", lambda: Called(lambda x: torch.mean(x, dim=(-1, -2), keepdim=True)), PICTURE),
        ("over channels", lambda: Called(lambda x: x.mean(1)), PICTURE),
        ("sum over features", lambda: Called(lambda x: x.sum(-1, keepdim=True) * x), (5, 12)),
        ("of features", lambda: nn.Sequential(nn.Linear(12, 10), Called(lambda x: x * x.mean(-1, True))), (5, 12)),
        ("sum, one left", lambda: nn.Sequential(nn.Linear(12, 10), Called(lambda x: x.sum(dim=2))), (5, 12)),
        ("largest over tokens", lambda: nn.Sequential(nn.Linear(12, 10), Called(lambda x: x.amax(1))), (5, 12)),
    ],
    "matmul": [
        ("operator", lambda: Called(operator.matmul, (12, 10)), (5, 12)),
        ("flat", lambda: nn.Sequential(nn.Flatten(), Called(torch.mm, (60, 10))), (5, 12)),
        ("method", lambda: Called(lambda x, w: x.matmul(w), (12, 10)), (5, 12)),
        ("a vector", lambda: Called(torch.matmul, (12,)), (5, 12)),
        ("transposed", lambda: Called(lambda x, w: x @ w.T, (10, 12)), (5, 12)),
        ("transposed by method", lambda: Called(lambda x, w: x @ w.t(), (10, 12)), (5, 12)),
        ("twice transposed", lambda: Called(lambda x, w: (x @ w.transpose(0, 1)) @ w, (10, 12)), (5, 12)),
        ("linear", lambda: Called(F.linear, (10, 12), (10,)), (5, 12)),
        ("linear by name", lambda: Called(lambda x, w: F.linear(input=x, weight=w), (10, 12)), (5, 12)),
        ("added", lambda: nn.Sequential(nn.Flatten(), Called(_added, (10,), (60, 10))), (5, 12)),
        ("weight in front", lambda: Called(lambda x, w: w @ x, (10, 5)), (5, 12)),
        ("computed weight", lambda: Called(lambda x, w: x @ (2 * w), (12, 10)), (5, 12)),
        ("of samples", lambda: Called(lambda x: x @ x.transpose(1, 2)), (5, 12)),
        ("of samples, both", lambda: Called(lambda x, w: torch.bmm(x * w, x.transpose(1, 2)), (5, 12)), (5, 12)),
        ("two ways", lambda: Called(lambda x, w: x @ w @ w, (12, 12)), (5, 12)),
    ],
    "one_hot": [
        ("of the largest", lambda: Called(lambda x: x[..., :7] * F.one_hot(x[..., :7].argmax(-1), 7)), (5, 12))
    ],
    "reorder": [
        ("channels last", lambda: Called(lambda x: x.permute(0, 2, 3, 1)), PICTURE),
        ("by tuple", lambda: Called(lambda x: torch.permute(x, (0, 3, 1, 2))), PICTURE),
        ("transposed", lambda: Called(lambda x: x.transpose(1, 2)), PICTURE),
        ("from the end", lambda: Called(lambda x: torch.transpose(x, -1, 1)), PICTURE),
    ],
    "concat": [
        ("channels", lambda: Called(_two, (4, 1, 1), (6, 6)), PICTURE),
        ("pixels", lambda: Called(lambda x: torch.cat((x, x), 3)), PICTURE),
        ("stacked", lambda: Called(lambda x: torch.stack((x, 2 * x), 2)), PICTURE),
    ],
    "opaque": [
        ("cumulative sum", lambda: Called(lambda x: x.cumsum(2)), PICTURE),
        ("attention with weights", lambda: Attention(need_weights=True), (5, 12)),
        ("softmax", lambda: nn.Softmax(1), PICTURE),
        ("samples mixed", lambda: Called(lambda x: x - x.roll(1, 0)), PICTURE),
        ("largest", lambda: Called(lambda x: x * x.max(2, True)[0]), (5, 12)),
        ("transposed convolution", lambda: nn.ConvTranspose2d(4, 3, 2), PICTURE),
        ("halves", lambda: Called(lambda x: torch.add(*x.chunk(2, 1))), PICTURE),
        ("recurrent", lambda: Called(lambda x: x.roll(1, -1)), PICTURE),
        ("from the middle", lambda: Called(lambda x: x[:, 1:3] * x[:, :2]), PICTURE),
    ],
}


def _truth(kind, place, group=SAMPLES):
    shape = RULES[kind][place][2]
    pictures = torch.randn(SAMPLES, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return truth_of(functools.partial(Scaled, kind, place), pictures, 1, group)


def _plans(truth, mesh, kind):
    """A plan for each op of the kind and each pair of letters, where the rest of the network shares out samples."""
    for op in truth.graph().ops.values():
        if op.kind == kind and op.name.startswith(("op", LOSS)):
            for letters in itertools.combinations_with_replacement(op.allowed_letters(), len(mesh.axes)):
                if not refusal(op, letters, mesh):
                    yield Plan(mesh, {op.name: write_strategy(letters, mesh)})


def _cases(kind, mesh, group=SAMPLES, *, most=99, once=False):
    """A case for each plan of each variant; `once`: only with letters that no variant before has, or one."""
    cases, seen = [], set()
    for place, (word, *_) in enumerate(RULES[kind][:most]):
        truth = _truth(kind, place, group)
        found = list(_plans(truth, mesh, kind))
        assert found, word
        if once:
            found = [plan for plan in found if not seen.issuperset(plan.ops.values())] or found[-1:]
            seen |= {letters for plan in found for letters in plan.ops.values()}
        cases += [(f"{kind}, {word} {plan.ops}", truth, plan) for plan in found]
    return cases


SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("mesh", "once"),
    [(TWO, True), pytest.param(THREE, False, marks=SLOW), pytest.param(SQUARE, True, marks=SLOW)],
    ids=["2", "each variant at 3", "2x2"],
)
def test_each_placement_of_a_rule_equals_one_process(mesh, once):
    assert {rule.kind for rule in [*KNOWN, OPAQUE]} == {*RULES, "embedding"}
    assert_as_one_process([case for kind in RULES for case in _cases(kind, mesh, once=once)], 1e-9)


@pytest.mark.parametrize(("mesh", "group"), [(THREE, 4), (SQUARE, 3)], ids=["3", "2x2"])
def test_batch_norm_over_parts_of_the_batch_embedding_and_loss(mesh, group):
    numbers = torch.randint(0, 11, (SAMPLES, 5), generator=torch.Generator().manual_seed(3))
    words, classes = truth_of(Words, numbers, 1, SAMPLES), _truth("conv", 0)
    plans, losses = list(_plans(words, mesh, "embedding")), list(_plans(classes, mesh, LOSS))
    assert {letter for plan in plans for letter in "novr" if f"{letter}@" in plan.ops["op"]} == set("novr")
    assert any("o@" in plan.ops[LOSS] for plan in losses), "samples and classes are cut"
    cases = [(plan.ops, truth, plan) for truth, found in ((words, plans), (classes, losses)) for plan in found]
    assert_as_one_process([*_cases("batch_norm", mesh, group, most=2), *cases], 1e-9)

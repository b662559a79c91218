"""Ops that treat each value by itself: activations, sums and products, dropout."""

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.placement import SPREAD, Side

KIND = "elementwise"

MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity,
    nn.Dropout, nn.AlphaDropout,
)  # fmt: skip
FUNCTIONS: set[Any] = {
    torch.relu, F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    torch.sigmoid, F.sigmoid, torch.tanh, F.tanh, F.softplus, F.dropout, torch.exp, torch.log, torch.sqrt, torch.abs,
    operator.neg, operator.add, operator.sub, operator.mul, operator.truediv, operator.pow,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.square, torch.neg,
}  # fmt: skip
METHODS = {
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "add", "sub", "mul", "div", "pow", "square",
    "contiguous", "clone", "float", "double", "clamp",
}  # fmt: skip


def matches(op: Op) -> bool:
    if op.module is not None:
        return isinstance(op.module, MODULES) and op.forward in {kind.forward for kind in MODULES}
    node = op.node
    if node is None or op.reads_attribute:
        return False
    # torchvision's; it drops whole samples (or whole batches), the same in all of their channels.
    stochastic_depth = getattr(node.target, "__name__", "") == "stochastic_depth"
    return stochastic_depth or node.target in (FUNCTIONS if node.op == "call_function" else METHODS)


def describe(op: Op, inputs: list[Op]) -> None:
    """n, c (channels or features), r."""
    op.letters = whole_or_batch(op, inputs)
    dims = len(op.extent.dims)
    known = [one.feature for one in inputs if len(one.extent.dims) == dims and one.feature is not None]
    # With the first dimension grown by several rows a sample, other dimensions are as they were.
    if not known or known[0] == 0 or any(feature != known[0] for feature in known):
        return
    op.feature = known[0]
    sides: list[Side] = [_side(one, op, op.feature) for one in inputs]
    op.letters["c"] = Loop(tuple(sides), op.feature, length=op.extent.dims[op.feature])


def _side(source: Op, op: Op, feature: int) -> Side:
    """Where a source is cut when the result is cut in its feature dimension: broadcasting aligns the last ones."""
    dim = feature - (len(op.extent.dims) - len(source.extent.dims))
    if dim < 0 or (source.extent.dims[dim] == 1 and op.extent.dims[feature] > 1):
        return SPREAD
    return dim

"""Products of tensors: `x @ self.weight`, torch.matmul, F.linear, torch.addmm, scores of attention written out.

One operand holds the samples. The other is a parameter, something computed from parameters, or holds them as well.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import fx

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.placement import SPREAD, SUM, Side

KIND = "matmul"

FUNCTIONS: set[Any] = {operator.matmul, torch.matmul, torch.mm, torch.bmm}
METHODS = {"matmul", "mm", "bmm", "__matmul__"}
WITH_BIAS: set[Any] = {torch.addmm, "addmm"}
# The weight has its outputs first, as a layer's.
LINEAR: set[Any] = {F.linear}


@dataclass(frozen=True)
class Operands:
    """What a product reads."""

    left: fx.Node  # [..., k]
    right: fx.Node  # [..., k, m], or [k]; of `F.linear` [m, k]
    bias: fx.Node | None = None  # added to the result [..., m]; None if there is none


def matches(op: Op) -> bool:
    node = op.node
    if node is None or node.op not in {"call_function", "call_method"}:
        return False
    known = (FUNCTIONS | WITH_BIAS | LINEAR) if node.op == "call_function" else (METHODS | WITH_BIAS)
    return node.target in known and operands(node) is not None


def operands(node: fx.Node) -> Operands | None:
    """The two tensors, and what is added; None where they aren't given plainly."""
    words = {"input": 0, "weight": 1, "bias": 2, "other": 1, "mat2": 1} if node.target not in WITH_BIAS else {}
    given: dict[int, Any] = dict(enumerate(node.args))
    for word, value in node.kwargs.items():
        if word not in words:
            return None
        given[words[word]] = value
    if node.target in WITH_BIAS:
        given = {0: given.get(1), 1: given.get(2), 2: given.get(0)}
    left, right, bias = given.get(0), given.get(1), given.get(2)
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias in {left, right}):
        return None
    return Operands(left, right, bias)


def describe(op: Op, inputs: list[Op]) -> None:
    """n, o (columns of the result; rows where the samples are on the right), i (what is summed over), r."""
    op.letters = whole_or_batch(op, inputs)
    found = operands(op.node) if op.node is not None else None
    by_node = {one.node: one for one in inputs}
    if op.node is None or found is None or not op.batchwise or not {found.left, found.right} <= set(by_node):
        return
    left, right, bias = by_node[found.left], by_node[found.right], by_node.get(found.bias)
    summed, columns = _dims_of_right(op.node.target, right)
    last = len(op.extent.dims) - 1
    if left.batched:
        if len(left.extent.dims) < 2 or (right.batched and len(right.extent.dims) < 3):
            return
        rows, outputs = len(left.extent.dims) - 1, {right.name: columns}
    else:
        # The samples are on the right, so the left one's rows are the outputs.
        if len(left.extent.dims) != 2 or len(right.extent.dims) < 3 or bias is not None:
            return
        rows, columns, outputs, last = 1, 0, {left.name: 0}, last - 1
    terms: dict[str, Side] = {left.name: rows, right.name: summed}
    if bias is not None:
        # A term of the sum: whole on one process, zeros on the others.
        terms[bias.name] = SUM
        outputs[bias.name] = len(bias.extent.dims) - 1
    op.letters["i"] = Loop(_sides(inputs, terms), SUM, length=left.extent.dims[rows])
    if columns is None or last < 1 or (bias is not None and bias.extent.dims[-1:] != op.extent.dims[-1:]):
        return
    op.feature = last
    op.letters["o"] = Loop(_sides(inputs, outputs), last, length=op.extent.dims[last])


def _dims_of_right(target: Any, right: Op) -> tuple[int, int | None]:
    """The dimension of the right operand that is summed over, and the one of its columns."""
    dims = len(right.extent.dims)
    if target in LINEAR:
        return dims - 1, 0 if dims == 2 else None
    return (dims - 2, dims - 1) if dims > 1 else (0, None)


def _sides(inputs: list[Op], cut: Mapping[str, Side | None]) -> tuple[Side, ...]:
    """Where each source is cut, SPREAD where it isn't named."""
    found: list[Side] = []
    for one in inputs:
        side = cut.get(one.name)
        found.append(SPREAD if side is None else side)
    return tuple(found)

"""Sums, means and maxima over dimensions: pixels, tokens, features, or the classes of a loss in small operators."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid
from manyhands.parallel.placement import SUM

KIND = "reduce"

SUMS: set[Any] = {torch.sum, "sum"}
MEANS: set[Any] = {torch.mean, "mean"}


def largest(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """torch.max over a dimension without the places: the gradient goes to one of equal values."""
    return values.max(dim, keepdim).values


MAXIMA: set[Any] = {largest}
LARGEST: set[Any] = {torch.amax, torch.amin, "amax", "amin"}


def matches(op: Op) -> bool:
    node = op.node
    known = SUMS | MEANS | MAXIMA | LARGEST
    return node is not None and node.op in {"call_function", "call_method"} and node.target in known


def describe(op: Op, inputs: list[Op]) -> None:
    """n, c (channels that stay), i (what is summed over), r."""
    op.letters = whole_or_batch(op, inputs)
    if len(inputs) != 1 or op.node is None:
        return
    source, dims = inputs[0], reduced(op, len(inputs[0].extent.dims))
    feature, whole = source.feature, source.extent.dims
    if not feature or dims is None:
        return
    if feature in dims:
        if op.node.target in SUMS | MEANS:
            op.letters["i"] = Loop((feature,), SUM, length=whole[feature])
        else:
            op.letters["i"] = "a maximum over a split dimension is supported only in a loss"
    elif 0 not in dims:
        kept = len(op.extent.dims) == len(whole)
        op.feature = feature if kept else feature - sum(dim < feature for dim in dims)
        op.letters["c"] = Loop((feature,), op.feature, length=whole[feature])


def reduced(op: Op, dims: int) -> set[int] | None:
    """The dimensions that are taken together, of so many; None if they aren't constant."""
    if op.node is None:
        return None
    given: Any = op.node.args[1] if len(op.node.args) > 1 else None
    for word in ("dim", "axis"):
        given = op.node.kwargs.get(word, given)
    chosen = range(dims) if given is None else [given] if isinstance(given, int) else given
    if not isinstance(chosen, list | tuple | range) or not all(isinstance(dim, int) for dim in chosen):
        return None
    numbers = {int(str(dim)) % dims for dim in chosen}
    return numbers or set(range(dims))


class MeanOfPart(nn.Module):
    """A term of a mean: the mean of a piece, by how much it is of the dimension's whole length."""

    def __init__(self, target: Any, dim: int, length: int) -> None:
        super().__init__()
        self._target, self._dim, self._length = target, dim, length

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        values: Tensor = args[0] if args else kwargs["input"]
        function = getattr(torch.Tensor, self._target) if isinstance(self._target, str) else self._target
        mean: Tensor = function(*args, **kwargs)
        return mean * (values.shape[self._dim] / self._length)


class LargestOfParts(nn.Module):
    """A maximum over a dimension cut into pieces, in their order; a collective. One of equal ones gets the gradient."""

    def __init__(self, group: Any, place: int, parts: int) -> None:
        super().__init__()
        self._group, self._place, self._parts = group, place, parts

    def forward(self, values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        """As `largest`."""
        found: Any = _LargestOfParts.apply(values, dim, self._group, self._place, self._parts)
        return found if keepdim else found.squeeze(dim)


class _LargestOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: Any, place: int, parts: int) -> Tensor:
        mine, index = values.max(dim, keepdim=True)
        everybody = mine.new_empty(parts, *mine.shape)
        dist.all_gather_into_tensor(everybody.view(-1), mine.contiguous().view(-1), group=group)
        found = everybody.max(0)
        ctx.save_for_backward(index, found.indices == place)
        ctx.shape, ctx.dim = values.shape, dim
        return found.values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, here = ctx.saved_tensors
        back = gradients[0].new_zeros(ctx.shape).scatter(ctx.dim, index, gradients[0] * here)
        return back, None, None, None, None


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = [axis for axis, letter in enumerate(letters) if letter == "i"]
    loop = op.letters.get("i")
    if grid.parts(cut) == 1 or op.node is None or not isinstance(loop, Loop) or op.node.target in SUMS:
        return None
    if op.node.target in MAXIMA:
        return LargestOfParts(grid.group(cut), grid.place(cut), grid.parts(cut))
    return MeanOfPart(op.node.target, int(loop.inputs[0]), loop.length)

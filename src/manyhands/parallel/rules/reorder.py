"""Permutations and transpositions: channels go to another dimension."""

from typing import Any

import torch

from manyhands.parallel.graph import Loop, Op, whole_or_batch

KIND = "reorder"
TARGETS: set[Any] = {torch.permute, torch.transpose, "permute", "transpose"}


def matches(op: Op) -> bool:
    """True for permute and transpose by constant dimensions, as functions, methods, or torchvision's module."""
    if op.module is not None:
        return type(op.module).__name__ == "Permute" and hasattr(op.module, "dims")
    return op.node is not None and op.node.target in TARGETS and _order(op) is not None


def describe(op: Op, inputs: list[Op]) -> None:
    """n, c (the channels, wherever they go), r."""
    op.letters = whole_or_batch(op, inputs)
    order, before = _order(op, len(inputs[0].extent.dims)), inputs[0].feature
    if order is None or before is None or order[0] != 0 or before == 0:
        return
    op.feature = order.index(before)
    op.letters["c"] = Loop((before,), op.feature, length=op.extent.dims[op.feature])


def _order(op: Op, dims: int = 0) -> list[int] | None:
    """For each dimension of the result, the one it was; None if that isn't constant."""
    if op.module is not None:
        return [int(dim) % max(dims, 1) for dim in op.module.dims]  # type: ignore[union-attr, arg-type]
    if op.node is None:
        return None
    given: list[Any] = list(op.node.args[1:]) or list(op.node.kwargs.values())
    numbers = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not all(isinstance(number, int) for number in numbers):
        return None
    if not dims:
        return numbers
    numbers = [number % dims for number in numbers]
    if op.node.target in {torch.transpose, "transpose"}:
        order = list(range(dims))
        order[numbers[0]], order[numbers[1]] = order[numbers[1]], order[numbers[0]]
        return order
    return numbers

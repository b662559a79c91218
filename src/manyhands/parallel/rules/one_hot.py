"""One row for each whole number, with a one in its place."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.core.mesh import bounds
from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid
from manyhands.parallel.placement import WHOLE

KIND = "one_hot"
TARGETS: set[Any] = {F.one_hot}


def matches(op: Op) -> bool:
    return op.node is not None and op.node.op == "call_function" and op.node.target in TARGETS and _count(op) > 0


def describe(op: Op, inputs: list[Op]) -> None:
    """n, c (classes), r."""
    op.letters = whole_or_batch(op, inputs)
    op.feature = len(op.extent.dims) - 1
    op.letters["c"] = Loop((WHOLE,), op.feature, length=_count(op))


def _count(op: Op) -> int:
    given: Any = None
    if op.node is not None:
        given = op.node.kwargs.get("num_classes", op.node.args[1] if len(op.node.args) > 1 else -1)
    return given if isinstance(given, int) else -1


class SomeClasses(nn.Module):
    """The columns of one process."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self._first, self._count = first, count

    def forward(self, numbers: Tensor, *_: Any, **__: Any) -> Tensor:
        """int64 [n, …] to int64 [n, …, count]."""
        own = torch.arange(self._first, self._first + self._count, device=numbers.device)
        return (numbers[..., None] == own).long()


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = [axis for axis, letter in enumerate(letters) if letter == "c"]
    if not cut:
        return None
    edges, place = bounds(_count(op), grid.parts(cut)), grid.place(cut)
    return SomeClasses(edges[place], edges[place + 1] - edges[place])

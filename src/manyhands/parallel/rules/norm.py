"""Normalisation of each sample by itself: layers and groups of channels."""

from typing import cast

from torch import nn

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid

KIND = "norm"


def matches(op: Op) -> bool:
    return op.forward in {nn.LayerNorm.forward, nn.GroupNorm.forward}


def describe(op: Op, inputs: list[Op]) -> None:
    """n, r; GroupNorm also c (groups of channels)."""
    op.letters = whole_or_batch(op, inputs)
    op.feature = inputs[0].feature
    if isinstance(op.module, nn.GroupNorm):
        op.feature = 1
        op.letters["c"] = Loop((1,), 1, {"weight": 0, "bias": 0}, length=op.module.num_groups, even=True)


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> None:
    """A GroupNorm of fewer groups, with as many channels in each."""
    parts = grid.parts([axis for axis, letter in enumerate(letters) if letter == "c"])
    if parts > 1:
        layer = cast(nn.GroupNorm, op.module)
        layer.num_groups //= parts
        layer.num_channels //= parts

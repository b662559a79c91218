"""Fully connected layers; features are the last dimension."""

from typing import cast

import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid
from manyhands.parallel.partial import PartialLayer
from manyhands.parallel.placement import SPREAD, SUM

KIND = "linear"


def matches(op: Op) -> bool:
    return op.forward is nn.Linear.forward


def describe(op: Op, inputs: list[Op]) -> None:
    """n, o (output features), i (input features), r."""
    layer = cast(nn.Linear, op.module)
    last = len(op.extent.dims) - 1
    op.feature = last
    op.letters = whole_or_batch(op, inputs)
    if last:
        op.letters["o"] = Loop((SPREAD,), last, {"weight": 0, "bias": 0}, length=layer.out_features)
        op.letters["i"] = Loop((last,), SUM, {"weight": 1}, frozenset({"bias"}), layer.in_features)


class PartialLinear(PartialLayer[nn.Linear]):
    """A layer over a part of the input features."""

    def forward(self, features: Tensor) -> Tensor:
        """A term of the sum: [N, …, in / parts] to [N, …, out]."""
        layer = self.layer
        return F.linear(features, layer.weight, self.own(layer.bias))


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    layer = cast(nn.Linear, op.module)
    inner = [axis for axis, letter in enumerate(letters) if letter == "i"]
    return PartialLinear(layer, grid.first(inner)) if inner and layer.bias is not None else None

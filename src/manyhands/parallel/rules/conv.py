"""Convolutions of one to three dimensions, also grouped and depth-wise."""

from typing import cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid
from manyhands.parallel.partial import PartialLayer
from manyhands.parallel.placement import SPREAD, SUM

KIND = "conv"


def matches(op: Op) -> bool:
    """True for torch's own convolutions; transposed ones stay whole."""
    return op.forward in {nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward}


def describe(op: Op, inputs: list[Op]) -> None:
    """n, o (output channels), i (input channels), c (groups), r."""
    layer = cast(_ConvNd, op.module)
    op.feature = 1
    op.letters = whole_or_batch(op, inputs)
    if layer.groups == 1:
        op.letters["o"] = Loop((SPREAD,), 1, {"weight": 0, "bias": 0}, length=layer.out_channels)
        op.letters["i"] = Loop((1,), SUM, {"weight": 1}, frozenset({"bias"}), layer.in_channels)
    else:
        op.letters["c"] = Loop((1,), 1, {"weight": 0, "bias": 0}, length=layer.groups, even=True)


class PartialConvolution(PartialLayer[_ConvNd]):
    """A convolution over a part of the input channels."""

    def forward(self, pictures: Tensor) -> Tensor:
        """A term of the sum: [N, C / parts, …] to [N, out, …]."""
        layer = self.layer
        return layer._conv_forward(pictures, layer.weight, self.own(layer.bias))  # type: ignore[attr-defined]


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    layer = cast(_ConvNd, op.module)
    layer.groups //= grid.parts([axis for axis, letter in enumerate(letters) if letter == "c"])
    inner = [axis for axis, letter in enumerate(letters) if letter == "i"]
    return PartialConvolution(layer, grid.first(inner)) if inner and layer.bias is not None else None

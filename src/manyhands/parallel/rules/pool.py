"""Ops that work on each channel by itself: pooling and flattening."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from manyhands.parallel.graph import Loop, Op, whole_or_batch

KIND = "pool"

MODULES: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Flatten, nn.Upsample, nn.ZeroPad2d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
FUNCTIONS: set[Any] = {
    F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.flatten,
    F.interpolate, F.dropout2d,
}  # fmt: skip
METHODS = {"flatten"}


def matches(op: Op) -> bool:
    if op.module is not None:
        return op.forward in {kind.forward for kind in MODULES}
    node = op.node
    return node is not None and (node.target in FUNCTIONS if node.op == "call_function" else node.target in METHODS)


def describe(op: Op, inputs: list[Op]) -> None:
    """n, c (channels), r."""
    op.letters = whole_or_batch(op, inputs)
    source, result = inputs[0].extent.dims, op.extent.dims
    if inputs[0].feature != 1 or len(source) < 3 or len(result) < 2 or result[1] % source[1]:
        return
    op.feature = 1
    flattened = result[1] != source[1]
    # A flattened channel is several features: pieces of equal numbers of channels alone are pieces of features.
    op.letters["c"] = Loop((1,), 1, length=source[1], even=flattened)

"""A small convolutional network with BatchNorm that is fast on a CPU, for pictures of at least 8x8 pixels."""

from typing import Any

from torch import nn

from manyhands.core.errors import UserError
from manyhands.models.interface import WHERE, construct

NAMES = ("cnn",)
SMALLEST = 8  # pixels
_COARSE = 16
_LAST_MAP = 4
_WIDEST = 4
_POOLED = 2


def build(name: str, *, channels: int, size: int, num_classes: int, arguments: dict[str, Any]) -> nn.Module:
    return construct(make_cnn, name, arguments, {"channels": channels, "size": size, "num_classes": num_classes})


def make_cnn(channels: int, size: int, num_classes: int, width: int = 16, dropout: float = 0.0) -> nn.Sequential:
    """Builds blocks of convolution, BatchNorm, ReLU and max-pool, then a block with average pool, and a linear layer.

    The first block has `width` channels; each further block doubles them, up to four times `width`. For pictures
    below 16x16 pixels, the first block has no max-pool. `dropout`: probability, below 1, before the linear layer.
    """
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise UserError(f"width is {width!r}, expected a whole number of at least 1", f"{WHERE}.width")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise UserError(f"dropout is {dropout!r}, expected a number of at least 0 and less than 1", f"{WHERE}.dropout")
    layers: list[nn.Module] = []
    inputs, outputs = channels, width
    if size < _COARSE:
        layers += _conv_block(inputs, outputs)
        inputs, outputs = outputs, 2 * outputs
    while size > _LAST_MAP:
        layers += [*_conv_block(inputs, outputs), nn.MaxPool2d(2)]
        inputs, outputs, size = outputs, min(2 * outputs, _WIDEST * width), size // 2
    layers += [*_conv_block(inputs, outputs), nn.AdaptiveAvgPool2d(_POOLED), nn.Flatten()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(outputs * _POOLED**2, num_classes))


def _conv_block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

"""A convolutional network that learns small color pictures in few epochs.

The first layer whitens 2x2 patches and isn't trained. Three groups of two convolutions follow. Their initial weights
copy the input channels. BatchNorm has no trainable scale, and a constant factor scales the outputs.

Source: Jordan 2024, arXiv:2404.00498, section 3, after Page 2019, "How to train your ResNet". Here the first layer has
no bias, so it needs no gradient at all.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands.core.errors import UserError
from manyhands.models.interface import WHERE, InitializedFromData, construct

NAMES = ("quicknet",)
SMALLEST = 9  # pixels
_GROUPS = 3
_AT_ONCE = 50
_PATCH = 2
_LEAST_VARIANCE = 5e-4  # of a whitened direction; limits how much rare directions are amplified
_NEW_STATISTICS = 0.4  # BatchNorm's momentum: the default of 0.1 is too slow for a run of few updates


def build(name: str, *, channels: int, size: int, num_classes: int, arguments: dict[str, Any]) -> nn.Module:
    return construct(QuickNet, name, arguments, {"channels": channels, "size": size, "num_classes": num_classes})


class QuickNet(InitializedFromData):
    """Whitening, three groups of two convolutions each, max-pool, and a linear layer with scaled outputs.

    Args:
        channels: number of channels of a picture.
        size: height and width of a picture, in pixels.
        num_classes: number of outputs.
        widths: output channels of each of the three groups.
        scale: factor of the outputs of the last layer. With a smaller factor, this layer learns more slowly.
    """

    def __init__(
        self, channels: int, size: int, num_classes: int, widths: tuple[int, ...] = (64, 128, 256), scale: float = 1 / 9
    ) -> None:
        super().__init__()
        if len(widths) != _GROUPS or not all(type(width) is int and width > 0 for width in widths):
            raise UserError(f"widths is {list(widths)}, expected three whole numbers", f"{WHERE}.widths")
        first = 2 * channels * _PATCH**2
        self.whiten = nn.Conv2d(channels, first, _PATCH, bias=False)
        self.whiten.weight.requires_grad = False
        pairs = zip((first, *widths), widths, strict=False)
        self.groups = nn.Sequential(nn.GELU(), *[_group(inputs, outputs) for inputs, outputs in pairs])
        left = (size - _PATCH + 1) >> _GROUPS
        self.pool = nn.Sequential(nn.MaxPool2d(left), nn.Flatten())
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = scale

    @override
    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.pool(self.groups(self.whiten(pictures)))) * self.scale

    @override
    @torch.no_grad()
    def initialize(self, pictures: Tensor) -> None:
        """Sets the first layer to whiten patches, so that its outputs have variance 1 in each principal direction."""
        parts = [_patches(part) for part in pictures.split(_AT_ONCE)]
        products, count = sum(part.T @ part for part in parts), sum(len(part) for part in parts)
        variances, directions = torch.linalg.eigh(products / count)
        filters = (directions / (variances + _LEAST_VARIANCE).sqrt()).T.reshape(-1, *self.whiten.weight.shape[1:])
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def _patches(pictures: Tensor) -> Tensor:
    """Returns all 2x2 patches of pictures [n, C, S, S] as float64 [patches, 4 C]."""
    windows = pictures.cpu().double().unfold(2, _PATCH, 1).unfold(3, _PATCH, 1)
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)


def _group(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        _convolution(inputs, outputs), nn.MaxPool2d(2), _norm(outputs), nn.GELU(),
        _convolution(outputs, outputs), _norm(outputs), nn.GELU(),
    )  # fmt: skip


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Creates a 3x3 convolution. Its initial weights copy the input channels to the first output channels."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.detach()[:inputs])
    return layer


def _norm(outputs: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(outputs, momentum=_NEW_STATISTICS)
    norm.weight.requires_grad = False
    return norm

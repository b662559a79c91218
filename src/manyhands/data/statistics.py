"""Mean and deviation of pixels."""

import math

import torch
from torch import Tensor

from manyhands.data.random import spread
from manyhands.data.transforms import Pixels

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_ENOUGH = 10_000


def measured_pixels(images: Tensor, augment: str) -> Pixels:
    """What suits pictures uint8 [N, C, S, S], by up to 10,000 of them; exact sums, so the same on every machine."""
    count, channels, size, _ = images.shape
    sums, squares, values = [0] * channels, [0] * channels, 0
    for block in spread(_ENOUGH, count).split(1000):
        part = images[block].to(torch.int64)
        sums = [a + b for a, b in zip(sums, part.sum((0, 2, 3)).tolist(), strict=True)]
        squares = [a + b for a, b in zip(squares, part.square().sum((0, 2, 3)).tolist(), strict=True)]
        values += len(block) * size * size
    means = [total / values for total in sums]
    deviations = [math.sqrt(max(0.0, s / values - m * m)) or 1.0 for s, m in zip(squares, means, strict=True)]
    rounded = [tuple(round(value / 255, 4) or 1e-4 for value in numbers) for numbers in (means, deviations)]
    return Pixels(size, channels, rounded[0], rounded[1], augment)


def photograph_pixels(size: int, channels: int, augment: str) -> Pixels:
    """What suits pictures that aren't measured: ImageNet's mean and deviation, averaged for grey."""
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if channels != 3:
        mean, std = ((sum(values) / 3,) * channels for values in (mean, std))
    return Pixels(size, channels, mean, std, augment)

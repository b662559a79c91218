"""Pictures made by chance, for trying speed and for tests: "synthetic", or "synthetic:1000x3x32x32x10".

The numbers are samples x channels x height x width x classes. A test split of a fifth as many is made alike. Each
class has a pattern of its own under the noise, so that a network does learn.
"""

import math

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.files import typed_number
from manyhands.core.seeds import derive
from manyhands.data.options import DataOptions
from manyhands.data.splits import ImagesInMemory, Splits, describe
from manyhands.data.transforms import Pixels

NAMES = ("synthetic", "synthetic:")
_USUAL = "1000x3x32x32x10"
_MOST_BYTES = 8 << 30


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001, ARG001
    count, channels, height, width, classes = _shape(name)
    patterns = _noise((classes, channels, height, width), "patterns")
    train = _split(patterns, count, "train")
    test = _split(patterns, max(1, count // 5), "test")
    pixels = Pixels(height, channels, (0.5,) * channels, (0.25,) * channels, "none")
    names = tuple(f"class {number}" for number in range(classes))
    return Splits(train, test, names, describe(f"synthetic {height} x {width}", train, test), pixels)


def _shape(name: str) -> list[int]:
    text = name.partition(":")[2] or _USUAL
    sizes = [typed_number(word) or 0 for word in text.split("x")]
    hints = (f"give samples x channels x height x width x classes, such as synthetic:{_USUAL}",)
    if len(sizes) != 5 or min(sizes) < 1 or sizes[1] not in (1, 3) or sizes[4] < 2:
        raise UserError(f'"{name}" is not a synthetic data set', "data.name", hints)
    if math.prod(sizes[:4]) > _MOST_BYTES:
        raise UserError(f'"{name}" exceeds the limit of {_MOST_BYTES >> 30} GiB', "data.name", hints)
    return sizes


def _split(patterns: Tensor, count: int, purpose: str) -> ImagesInMemory:
    labels = torch.arange(count) % len(patterns)
    images = _noise((count, *patterns.shape[1:]), purpose)
    for block, kind in zip(images.split(1024), labels.split(1024), strict=True):
        block.copy_((block.int() + patterns[kind].int()) // 2)
    return ImagesInMemory(images, labels)


def _noise(shape: tuple[int, ...], purpose: str) -> Tensor:
    generator = torch.Generator().manual_seed(derive(0, "synthetic", purpose))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

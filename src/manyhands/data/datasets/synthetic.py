"""Random pictures for speed measurements and tests.

"synthetic", or "synthetic:1000x3x32x32x10" (samples x channels x height x width x classes): pictures in memory. The
test split has a fifth as many samples. Each class has a pattern under the noise, so that a network can learn it.

"fake-imagenet": as many pictures as in ImageNet, generated on request. Labels are unrelated to pixels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.files import parse_count
from manyhands.core.seeds import derive_seed
from manyhands.data.options import DataOptions
from manyhands.data.splits import ImagesInMemory, Splits, UserSamples, describe
from manyhands.data.transforms import Pixels, mix_bits

NAMES = ("synthetic", "synthetic:", "fake-imagenet")
_USUAL = "1000x3x32x32x10"
_MOST_BYTES = 8 << 30
_IMAGENET_TRAIN, _IMAGENET_TEST, _IMAGENET_CLASSES = 1_281_167, 50_000, 1000


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    if name == "fake-imagenet":
        height, channels, classes, title = options.image_size or 224, 3, _IMAGENET_CLASSES, "generated pictures"
        train, test = _generate_split("train", _IMAGENET_TRAIN, height), _generate_split("test", _IMAGENET_TEST, height)
    else:
        count, channels, height, width, classes = _parse_shape(name)
        patterns, title = _noise((classes, channels, height, width), "patterns"), f"synthetic {height} x {width}"
        train, test = _make_split(patterns, count, "train"), _make_split(patterns, max(1, count // 5), "test")
    pixels = Pixels(height, channels, (0.5,) * channels, (0.25,) * channels, "none")
    names = tuple(f"class {number}" for number in range(classes))
    return Splits(train, test, names, describe(title, train, test), pixels)


def _parse_shape(name: str) -> list[int]:
    text = name.partition(":")[2] or _USUAL
    sizes = [parse_count(word) or 0 for word in text.split("x")]
    hints = (f"give samples x channels x height x width x classes, such as synthetic:{_USUAL}",)
    if len(sizes) != 5 or min(sizes) < 1 or sizes[1] not in (1, 3) or sizes[4] < 2:
        raise UserError(f'"{name}" is not a synthetic data set', "data.name", hints)
    if math.prod(sizes[:4]) > _MOST_BYTES:
        raise UserError(f'"{name}" exceeds the limit of {_MOST_BYTES >> 30} GiB', "data.name", hints)
    return sizes


def _make_split(patterns: Tensor, count: int, purpose: str) -> ImagesInMemory:
    labels = torch.arange(count) % len(patterns)
    images = _noise((count, *patterns.shape[1:]), purpose)
    for block, kind in zip(images.split(1024), labels.split(1024), strict=True):
        block.copy_((block.int() + patterns[kind].int()) // 2)
    return ImagesInMemory(images, labels)


def _noise(shape: tuple[int, ...], *purpose: str | int, name: str = "synthetic") -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(0, name, *purpose))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@dataclass(frozen=True)
class _Generated:
    """A data set of generated pictures, uint8 [3, size, size]. The same index always gives the same picture."""

    purpose: str  # "train" or "test"
    targets: Tensor  # int64 [N]
    size: int  # rows and columns

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        picture = _noise((3, self.size, self.size), self.purpose, sample, name="fake-imagenet")
        return picture, int(self.targets[sample])


def _generate_split(purpose: str, count: int, size: int) -> UserSamples:
    drawn = mix_bits(torch.arange(count) + derive_seed(0, "fake-imagenet", purpose) % 2**31)
    labels = drawn.remainder(_IMAGENET_CLASSES)
    return UserSamples(_Generated(purpose, labels, size), labels)

"""As many pictures as ImageNet has, each made by chance when it is asked for: "fake-imagenet", for measuring speed.

There is nothing to learn in them: labels and pixels have nothing to do with each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.seeds import derive
from manyhands.data.options import DataOptions
from manyhands.data.random import mix_tensor
from manyhands.data.splits import Splits, UserSamples, describe
from manyhands.data.transforms import Pixels

NAMES = ("fake-imagenet",)
_TRAIN, _TEST, _CLASSES, _SIZE = 1_281_167, 50_000, 1000, 224


@dataclass(frozen=True)
class _Noise:
    """Pictures uint8 [3, size, size], the same one for the same index each time."""

    purpose: str  # "train" or "test"
    targets: Tensor  # int64 [N]
    size: int  # rows and columns

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(derive(0, "fake-imagenet", self.purpose, sample))
        picture = torch.randint(0, 256, (3, self.size, self.size), dtype=torch.uint8, generator=generator)
        return picture, int(self.targets[sample])


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001, ARG001
    size = options.image_size or _SIZE
    train, test = (_samples(purpose, count, size) for purpose, count in (("train", _TRAIN), ("test", _TEST)))
    classes = tuple(f"class {number}" for number in range(_CLASSES))
    pixels = Pixels(size, 3, (0.5,) * 3, (0.25,) * 3, "none")
    return Splits(train, test, classes, describe("generated pictures", train, test), pixels)


def _samples(purpose: str, count: int, size: int) -> UserSamples:
    drawn = mix_tensor(torch.arange(count) + derive(0, "fake-imagenet", purpose) % 2**31)
    labels = drawn.remainder(_CLASSES)
    return UserSamples(_Noise(purpose, labels, size), labels)

"""Preprocessing of batches of uint8 pictures on any device, and its random numbers.

Random numbers are a pure function of (seed, epoch, sample, draw), for one sample (`SampleRng`) or a batch.
Shapes: n pictures, C channels, H rows, W columns, S the requested size.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.core.seeds import derive_seed, mix

_CONSTANTS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)  # of `core.seeds.mix`
_FIRST, _SECOND, _GOLDEN = (number - (1 << 64) for number in _CONSTANTS)
DRAW_DOWN, DRAW_RIGHT, DRAW_MIRROR = 0, 1, 2
_PART = 1 << 17  # values per block: a core's caches hold the block and its results
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's "L"

_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))


def _logical_shift(values: Tensor, places: int) -> Tensor:
    return (values >> places) & ((1 << (64 - places)) - 1)


def mix_bits(values: Tensor) -> Tensor:
    """Applies `core.seeds.mix` to each value of int64 [n]. In both functions, products wrap at 64 bits."""
    values = values + _GOLDEN
    values = (values ^ _logical_shift(values, 30)) * _FIRST
    values = (values ^ _logical_shift(values, 27)) * _SECOND
    return values ^ _logical_shift(values, 31)


def bits(states: Tensor, draw: int) -> Tensor:
    """Returns random number `draw` of each sample: 63 bits, int64 [n]. `states`: `mix_bits(samples ^ epoch key)`."""
    return _logical_shift(mix_bits(states ^ draw), 1)


def scaled(random_bits: Tensor, limit: int) -> Tensor:
    """Scales 63-bit random numbers to integers from 0 to `limit` - 1. `limit` must be below 2**31."""
    return ((random_bits >> 31) * limit) >> 32


def mirrored(seed: int, epoch: int, samples: Tensor) -> Tensor:
    """Returns True for the samples to mirror in this epoch, bool [n]. Each is mirrored in every second epoch."""
    first = scaled(bits(mix_bits(samples ^ derive_seed(seed, "alternate")), 0), 2)
    return (first + epoch) % 2 == 1


@dataclass(frozen=True)
class SampleRng:
    """The random numbers of one sample in one epoch, without torch."""

    key: int  # of the epoch
    sample: int  # index in the data set
    mirrored: bool = False  # True if `mirrored` mirrors the sample in this epoch

    def bits(self, draw: int) -> int:
        return mix(mix(self.key ^ self.sample) ^ draw) >> 1

    def below(self, draw: int, limit: int) -> int:
        return ((self.bits(draw) >> 31) * limit) >> 32

    def uniform(self, draw: int) -> float:
        return (self.bits(draw) >> 10) * 2.0**-53


def sample_rng(seed: int, epoch: int, sample: int) -> SampleRng:
    first = SampleRng(derive_seed(seed, "alternate"), sample).below(0, 2)
    return SampleRng(derive_seed(seed, "augment", epoch), sample, (first + epoch) % 2 == 1)


def spread(count: int, length: int) -> Tensor:
    """Selects the first `count` of a fixed random order of indices below `length`. Returns them sorted, int64 [n]."""
    order = torch.argsort(mix_bits(torch.arange(length)), stable=True)
    return order[:count].sort().values


@dataclass(frozen=True)
class Pixels:
    """The settings of picture preprocessing."""

    size: int  # rows and columns
    channels: int  # 1 or 3
    mean: tuple[float, ...]  # per channel, of pixels in 0 to 1
    std: tuple[float, ...]  # per channel, of pixels in 0 to 1
    augment: str  # "none", "crop", "crop-flip" or "resized-crop-flip"; only training samples are changed
    resize: int = 0  # size before an evaluation picture's center is cropped; 0: depends on the augmentation
    shift: int = 0  # maximum shift by "crop", in rows and columns; 0: an eighth of the size
    reflects: bool = False  # a shift exposes the mirrored edge instead of black
    alternates: bool = False  # pictures are mirrored in every second epoch, not at random
    own: bool = False  # True if the user's data set returns numbers, which are used unchanged

    @property
    def resized_to(self) -> int:
        """The shorter side before evaluation's center crop, such as 256 for size 224 with random resized crops."""
        if self.resize:
            return self.resize
        return round(self.size * 256 / 224) if self.augment == "resized-crop-flip" else self.size

    @property
    def padding(self) -> int:
        """The maximum shift in pixels, by default an eighth of the size, as is usual for CIFAR (4 of 32)."""
        return self.shift or max(1, round(self.size / 8))

    @property
    def flips(self) -> bool:
        return self.augment.endswith("-flip")


def pad(images: Tensor, margin: int, *, reflects: bool) -> Tensor:
    """Pads [..., S, S] by `margin` pixels on each side: black, or the mirrored edge (without its last pixel)."""
    if not reflects:
        return functional.pad(images, (margin,) * 4)
    size = images.shape[-1]
    inner = torch.arange(-margin, size + margin, device=images.device).abs()
    taken = size - 1 - (size - 1 - inner).abs()
    return images.index_select(-2, taken).index_select(-1, taken)


@functools.cache
def _luma(device: torch.device) -> Tensor:
    """Returns the luma weights of red, green and blue, [1, 3, 1, 1]. Cached, because a copy to an accelerator waits."""
    return torch.tensor(_LUMA, device=device).view(1, 3, 1, 1)


def set_channels(images: Tensor, channels: int) -> Tensor:
    """Converts uint8 [n, C, H, W] to [n, channels, H, W]. Grey is repeated, and color is converted to luma."""
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    return (images * _luma(images.device)).sum(1, keepdim=True).round().to(torch.uint8)


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Resizes uint8 [n, C, H, W] to [n, C, height, width] with antialiased bilinear interpolation."""
    if images.shape[2:] == (height, width):
        return images
    resized = functional.interpolate(images.float(), (height, width), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def center_crop(images: Tensor, pixels: Pixels, resize: Callable[[Tensor, int, int], Tensor] = resize) -> Tensor:
    """Resizes the shorter side of uint8 [..., H, W] by `resize`, and crops the center to uint8 [..., S, S]."""
    height, width = (round(side * pixels.resized_to / min(images.shape[-2:])) for side in images.shape[-2:])
    top, left = (height - pixels.size) // 2, (width - pixels.size) // 2
    return resize(images, height, width)[..., top : top + pixels.size, left : left + pixels.size]


def augment(images: Tensor, pixels: Pixels, seed: int, epoch: int, samples: Tensor) -> Tensor:
    """Augments training pictures uint8 [n, C, S, S], each as a function of (seed, epoch, sample).

    For "resized-crop-flip", pictures may have any height and width. `samples`: sample indices, int64 [n] on the CPU.
    """
    if pixels.augment == "none":
        return images
    key, samples_there = derive_seed(seed, "augment", epoch), samples.to(images.device, non_blocking=True)
    states = mix_bits(samples_there ^ key)
    if pixels.augment == "resized-crop-flip":
        parts = []
        for image, sample in zip(images, samples.tolist(), strict=True):
            left, top, right, bottom = crop_box(image.shape[2], image.shape[1], SampleRng(key, sample))
            parts.append(resize(image[None, :, top:bottom, left:right], pixels.size, pixels.size))
        images = torch.cat(parts)
    else:
        size, margin = images.shape[-1], pixels.padding
        # a view, [n, C, 2 margin + 1, 2 margin + 1, S, S]
        windows = pad(images, margin, reflects=pixels.reflects).unfold(2, size, 1).unfold(3, size, 1)
        down, right = (scaled(bits(states, draw), 2 * margin + 1) for draw in (DRAW_DOWN, DRAW_RIGHT))
        images = windows[torch.arange(len(images), device=images.device), :, down, right]
    if not pixels.flips:
        return images
    turned = mirrored(seed, epoch, samples_there) if pixels.alternates else scaled(bits(states, DRAW_MIRROR), 2).bool()
    return torch.where(turned.view(-1, 1, 1, 1), images.flip(3), images)


@dataclass
class Batch:
    """The samples of one request, ready for the network."""

    images: Tensor  # normalized, [n, C, S, S] (or the user's shape [n, …]), on the device
    labels: Tensor  # int64 [n], on the device
    samples: Tensor  # requested indices, int64 [n], on the CPU


class SpareMemory:
    """Reuses the memory of released batches, because page faults in new memory take half of the normalization time."""

    def __init__(self) -> None:
        self._held = [numpy.empty(0, numpy.uint8)] * 2
        self._unread = self._reference_count(0) - 1

    def _reference_count(self, place: int) -> int:
        return sys.getrefcount(self._held[place])

    def allocate(self, shape: torch.Size, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
        """Returns an uninitialized tensor, whose memory isn't reused while the tensor or a view of it exists."""
        size_bytes = shape.numel() * dtype.itemsize
        for place in range(len(self._held)):
            if self._held[place].nbytes == size_bytes and self._reference_count(place) == self._unread:
                memory = self._held[place]
                break
        else:
            memory = numpy.empty(size_bytes, numpy.uint8)
            self._held = [self._held[1], memory]
        values = torch.from_numpy(memory).view(dtype)  # keeps a reference to `memory` as long as the tensor exists
        if layout == torch.channels_last:
            count, channels, height, width = shape
            return values.view(count, height, width, channels).permute(0, 3, 1, 2)
        return values.view(shape)


class Normalize:
    """Normalizes uint8 pictures on a device: (value / 255 - mean) / std, per channel."""

    def __init__(
        self,
        pixels: Pixels,
        device: torch.device,
        dtype: torch.dtype,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.device, self._dtype, self._layout = device, dtype, layout
        self._work = torch.float64 if dtype == torch.float64 else torch.float32
        self._as_scaled = self._dtype == self._work and layout == torch.contiguous_format
        mean, std = (torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1) for each in (pixels.mean, pixels.std))
        self._scale = (1 / (255 * std)).to(device, self._work)
        self._offset = (-mean / std).to(device, self._work)
        self._spare = SpareMemory()

    def __call__(self, images: Tensor) -> Tensor:
        """Normalizes uint8 [n, C, S, S]. Only converts other types to `dtype`.

        The product and the sum are rounded separately. A fused operation would apply only to the vectorized part of a
        loop, so that a picture's values would depend on its position in the batch.
        """
        if images.dtype != torch.uint8:
            images = images.to(self._dtype)
            return images.contiguous(memory_format=self._layout) if images.ndim == 4 else images
        if images.device.type != "cpu" or images.numel() <= 5 * _PART:
            return self._scaled(images).to(self._dtype).contiguous(memory_format=self._layout)
        # In blocks: a large batch would otherwise pass through memory four times.
        out = self._spare.allocate(images.shape, self._dtype, self._layout)
        step = max(1, _PART // images[0].numel())
        for part, own in zip(images.split(step), out.split(step), strict=True):
            if self._as_scaled:
                own.copy_(part).mul_(self._scale).add_(self._offset)
            else:
                own.copy_(self._scaled(part))
        return out

    def _scaled(self, images: Tensor) -> Tensor:
        # Takes half the time of `to` for a small batch.
        numbers = images.float() if self._work == torch.float32 else images.double()
        return numbers.mul_(self._scale).add_(self._offset)


def crop_box(width: int, height: int, rng: SampleRng) -> tuple[int, int, int, int]:
    """Draws a random crop (left, top, right, bottom) of 8 to 100 % of the area, with an aspect ratio of 3:4 to 4:3.

    After 10 failures, the crop is centered. Source: torchvision's RandomResizedCrop; Szegedy et al., arXiv:1409.4842.
    """
    for first in range(16, 56, 4):
        area = width * height * (0.08 + 0.92 * rng.uniform(first))
        ratio = math.exp(_LOG_RATIO[0] + (_LOG_RATIO[1] - _LOG_RATIO[0]) * rng.uniform(first + 1))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.below(first + 2, width - wide + 1), rng.below(first + 3, height - high + 1)
            return left, top, left + wide, top + high
    wide, high = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def measure_pixels(images: Tensor, augment: str) -> Pixels:
    """Measures mean and deviation of up to 10,000 of the pictures [N, C, S, S], equally on all machines."""
    count, channels, size, width = images.shape
    chosen, sums = spread(10_000, count), torch.zeros(2, channels, dtype=torch.int64)
    for block in chosen.split(1000):
        part = images[block].to(torch.int64)
        sums += torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]).cpu()
    means, squares = (each.tolist() for each in sums.double() / (len(chosen) * size * width))
    deviations = [math.sqrt(max(0.0, s - m * m)) or 1.0 for s, m in zip(squares, means, strict=True)]
    rounded = [tuple(round(value / 255, 4) or 1e-4 for value in numbers) for numbers in (means, deviations)]
    return Pixels(size, channels, rounded[0], rounded[1], augment)


def imagenet_pixels(size: int, channels: int, augment: str) -> Pixels:
    """Returns preprocessing with ImageNet's mean and deviation (averaged for grey), for unmeasured pictures."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if channels != 3:
        mean, std = ((sum(values) / 3,) * channels for values in (mean, std))
    return Pixels(size, channels, mean, std, augment)

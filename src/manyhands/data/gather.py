"""Serves pictures that are in memory: many requests are gathered, augmented and normalised at once.

A request of 32 small pictures costs a dozen tensor operations, more time than its pixels need. So the feed looks
ahead in the requests and hands out views of one larger result. That changes no number: augmentation is a pure
function of the sample, and normalisation is rounded for each pixel alone.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from manyhands.data.splits import ImagesInMemory
from manyhands.data.transforms import Batch, Normalise, Pixels, augment, middle, set_channels

_AHEAD_REQUESTS = 64
_AHEAD_BYTES = 512 << 10  # of normalised float32 pixels: leaves most of a core's cache to the network
_RESIZED_BYTES = 512 << 20  # a set that stays smaller than this is resized once, a larger one batch by batch
_BLOCK = 1024


class MemoryFeed:
    """Answers requests from pictures in memory."""

    def __init__(self, source: ImagesInMemory, pixels: Pixels, normalise: Normalise, *, train: bool, seed: int) -> None:
        self._pixels, self._normalise, self._train, self._seed = pixels, normalise, train, seed
        self._cuts = train and pixels.augment == "resized-crop-flip"
        images = _on_device(source.images, normalise.device)
        self._sized = not self._cuts and _fits(images, pixels)
        if self._sized:
            images = _resized(images, pixels)
        self._shape = images.shape[1:]
        self._flat = images.reshape(len(images), -1)  # rows of bytes: the fastest gather
        self._labels = source.labels.to(images.device)
        floats = pixels.channels * pixels.size**2
        self._ahead_samples = max(1, _AHEAD_BYTES // (4 * floats))

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch for each request int64 [n], in order; looks ahead by at most 64 requests."""
        for group in _grouped(iter(requests), self._ahead_samples):
            samples = group[0] if len(group) == 1 else torch.cat(group)
            sizes = [len(request) for request in group]
            images, labels = self._serve(samples, epoch)
            yield from map(Batch, images.split(sizes), labels.split(sizes), group)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _serve(self, samples: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Gathers samples int64 [n]: normalised [n, C, S, S] and int64 [n], on the device."""
        # Otherwise a card would first be waited for, until all that it was given is done.
        where = samples.to(self._flat.device, non_blocking=True)
        images = self._flat.index_select(0, where).view(-1, *self._shape)
        images = images.to(self._normalise.device, non_blocking=True)
        labels = self._labels.index_select(0, where).to(self._normalise.device, non_blocking=True)
        images = set_channels(images, self._pixels.channels)
        if not (self._cuts or self._sized):
            images = middle(images, self._pixels)
        if self._train:
            images = augment(images, self._pixels, self._seed, epoch, samples)
        return self._normalise(images), labels


def _grouped(requests: Iterable[Tensor], samples: int) -> Iterator[list[Tensor]]:
    """Collects requests as long as together they hold at most `samples` samples, and at most 64 of them."""
    group: list[Tensor] = []
    held = 0
    for request in requests:
        if group and (held + len(request) > samples or len(group) == _AHEAD_REQUESTS):
            yield group
            group, held = [], 0
        group.append(request)
        held += len(request)
    if group:
        yield group


def _fits(images: Tensor, pixels: Pixels) -> bool:
    """True where the pictures have their size already, or the whole set may be resized at once."""
    ready = images.shape[2:] == (pixels.size, pixels.size) and pixels.resized_to == pixels.size
    return ready or len(images) * images.shape[1] * pixels.size**2 <= _RESIZED_BYTES


def _resized(images: Tensor, pixels: Pixels) -> Tensor:
    """Brings uint8 [N, C, H, W] to uint8 [N, C, S, S], without a copy where it is so already."""
    if images.shape[2:] == (pixels.size, pixels.size) and pixels.resized_to == pixels.size:
        return images
    return torch.cat([middle(block, pixels) for block in images.split(_BLOCK)])


def _on_device(images: Tensor, device: torch.device) -> Tensor:
    """Moves the set to an accelerator where it takes at most half of the free memory there."""
    if device.type != "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images

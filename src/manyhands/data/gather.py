"""Serves pictures that are in memory: many requests are gathered, augmented and normalised at once.

A request of 32 small pictures costs a dozen tensor operations, more time than its pixels need. So the feed looks
ahead in the requests and hands out views of one larger result. That changes no number: augmentation is a pure
function of the sample, and normalisation is rounded for each pixel alone.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from manyhands.core.devices import is_accelerator, is_tested
from manyhands.data.ahead import CopiesAhead, copied_to
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
        ready = images.shape[2:] == (pixels.size, pixels.size) and pixels.resized_to == pixels.size
        resized_bytes = len(images) * images.shape[1] * pixels.size**2
        self._sized = not self._cuts and (ready or resized_bytes <= _RESIZED_BYTES)
        if self._sized and not ready:
            images = torch.cat([middle(block, pixels) for block in images.split(_BLOCK)])
        self._shape = images.shape[1:]
        self._flat = images.reshape(len(images), -1)  # rows of bytes: the fastest gather
        self._labels = source.labels.to(images.device)
        # A card is waited for by a copy that isn't pinned, until all that it was given before is done.
        self._pins = is_accelerator(normalise.device)
        self._copied = self._pins and images.device.type == "cpu"
        self._ahead = CopiesAhead(normalise.device if self._copied else torch.device("cpu"))
        floats = pixels.channels * pixels.size**2
        self._ahead_samples = max(1, _AHEAD_BYTES // (4 * floats))

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch for each request int64 [n], in order; looks ahead by at most 64 requests."""
        gathered = map(self._gathered, _grouped(iter(requests), self._ahead_samples))
        for images, labels, (group, samples) in self._ahead(gathered):
            sizes = [len(request) for request in group]
            served = self._serve(images, samples, epoch).split(sizes)
            yield from map(Batch, served, copied_to(self._normalise.device, labels).split(sizes), group)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _gathered(self, group: list[Tensor]) -> tuple[Tensor, Tensor, tuple[list[Tensor], Tensor]]:
        """The bytes [n, C H W] and labels int64 [n] of a group of requests, where the set is; the group, and as one."""
        samples = group[0] if len(group) == 1 else torch.cat(group)
        if self._pins:
            samples = samples.pin_memory()
        where = samples.to(self._flat.device, non_blocking=True)
        out = None
        if self._copied:
            out = torch.empty((len(samples), self._flat.shape[1]), dtype=self._flat.dtype, pin_memory=True)
        images = torch.index_select(self._flat, 0, where, out=out)
        return images, self._labels.index_select(0, where), (group, samples)

    def _serve(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """Makes of the bytes of samples int64 [n] what the network is given: [n, C, S, S], on the device."""
        images = copied_to(self._normalise.device, images).view(-1, *self._shape)
        images = set_channels(images, self._pixels.channels)
        if not (self._cuts or self._sized):
            images = middle(images, self._pixels)
        if self._train:
            images = augment(images, self._pixels, self._seed, epoch, samples)
        return self._normalise(images)


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


def _on_device(images: Tensor, device: torch.device) -> Tensor:
    """Moves the set to an accelerator where it takes at most half of the free memory there."""
    if not is_tested(device):
        return images
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images

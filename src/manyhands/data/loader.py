"""From indices to batches on the device. Knows nothing of ranks, steps or the order of samples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.data.gather import MemoryFeed
from manyhands.data.on_demand import FileSamples, OwnSamples
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source
from manyhands.data.transforms import Normalise, Pixels
from manyhands.data.workers import WorkerFeed


@dataclass
class Batch:
    """What one request became."""

    images: Tensor  # normalised, [n, C, S, S] (or the user's own shape [n, …]), on the device
    labels: Tensor  # int64 [n], on the device
    samples: Tensor  # int64 [n], the indices that were asked for, on the CPU


class Loader:
    """Serves one split of a data set."""

    def __init__(  # noqa: PLR0913 - what serving samples takes; all but two are named
        self,
        source: Source,
        pixels: Pixels,
        *,
        train: bool,
        seed: int,
        device: str = "cpu",
        workers: int = 0,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        classes: int = 0,
    ) -> None:
        """Prepares; reads and starts nothing yet.

        Sources that aren't in memory are decoded by so many worker processes (0: in this one; -1: by the cores).
        Pictures are normalised in float32 (float64 for float64), then of `dtype`; `channels_last` lays [n, C, S, S] out
        with channels innermost. Labels of a user's own sample may be 0 … classes - 1; 0: any.
        """
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        normalise = Normalise(pixels, torch.device(device), dtype)
        self._feed: MemoryFeed | WorkerFeed
        if isinstance(source, ImagesInMemory):
            self._feed = MemoryFeed(source, pixels, normalise, train=train, seed=seed)
        elif isinstance(source, ImageFiles):
            self._feed = WorkerFeed(FileSamples(source, pixels, train=train, seed=seed), normalise, workers)
        else:
            own = OwnSamples(source, pixels, train=train, seed=seed, classes=classes)
            self._feed = WorkerFeed(own, normalise, workers)

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch for each index tensor int64 [n] in `requests`, in order.

        `requests` is read ahead (at most 64 requests), never to its end first. The pixels of a sample depend on the
        seed, the epoch and the sample alone. A loader serves one such iterator at a time; leave it early by dropping
        it. Raises CorruptImageError: a picture can't be read.
        """
        for images, labels, samples in self._feed.batches(epoch, requests):
            if images.ndim == 4:
                images = images.contiguous(memory_format=self._layout)
            yield Batch(images, labels, samples)

    def close(self) -> None:
        self._feed.close()

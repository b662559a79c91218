"""From indices to batches on the device. Knows nothing of ranks, steps or the order of samples."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from manyhands.data.gather import MemoryFeed
from manyhands.data.on_demand import CustomSamples, FileSamples
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source
from manyhands.data.transforms import Batch, Normalise, Pixels
from manyhands.data.workers import WorkerFeed


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
        replaces: bool = False,
    ) -> None:
        """Prepares; reads and starts nothing yet.

        Sources that aren't in memory are decoded by so many worker processes (0: in this one; -1: by the cores).
        Pictures are normalised in float32 (float64 for float64), then of `dtype`; `channels_last` lays [n, C, S, S] out
        with channels innermost. With `replaces` another is given for a picture for training that can't be read. Labels
        of a user's own sample may be 0 … classes - 1; 0: any.
        """
        layout = torch.channels_last if channels_last else torch.contiguous_format
        normalise = Normalise(pixels, torch.device(device), dtype, layout)
        if isinstance(source, ImagesInMemory):
            feed = MemoryFeed(source, pixels, normalise, train=train, seed=seed)
        elif isinstance(source, ImageFiles):
            feed = WorkerFeed(
                FileSamples(source, pixels, train=train, seed=seed, replaces=replaces), normalise, workers
            )
        else:
            own = CustomSamples(source, pixels, train=train, seed=seed, classes=classes)
            feed = WorkerFeed(own, normalise, workers)
        # batches(epoch, requests): one batch for each index tensor int64 [n] in `requests`, in order. These are read
        # ahead (at most 64), never to their end first. The pixels of a sample depend on the seed, the epoch and the
        # sample alone. One such iterator at a time; leave it early by dropping it. CorruptImageError: a picture can't
        # be read.
        self.batches: Callable[[int, Iterable[Tensor]], Iterator[Batch]] = feed.batches
        # Ends the worker processes, if there are any.
        self.close: Callable[[], None] = feed.close
        # Pictures that others were given for; who tells of them empties it.
        self.replaced: list[str] = [] if isinstance(feed, MemoryFeed) else feed.replaced

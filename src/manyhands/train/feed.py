"""The samples of this process for each update, and the sums of its measurements."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.core.world import Share
from manyhands.data.loading import Loader
from manyhands.data.order import BatchSharing, Order, sharing
from manyhands.data.transforms import Batch
from manyhands.parallel.network import MicroBatch, MicroBatchShape

COUNTED_AT_ONCE = 1 << 16  # logits


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class LoadedMicroBatch:
    """The samples of one forward and backward pass of this process."""

    share: Share  # its part of the global batch; of no samples where there are fewer samples than processes
    batch: Batch  # the samples of the share, or a single stand-in of weight zero for an empty share
    # first sample of the whole micro-batch, over all processes, and the one after its last
    bounds: tuple[int, int] = (0, 0)
    group: int = 0  # samples in one of BatchNorm's groups; 0 where there are none

    def micro_batch(self, count: int, seed: int) -> MicroBatch:
        """Returns this micro-batch for a network; `count` is the number of samples of the update."""
        shape = MicroBatchShape(self.bounds[1] - self.bounds[0], count, sharing(count, self.group, self.bounds), seed)
        return MicroBatch(self.batch.images, self.batch.labels, self.share, shape)


@dataclass(slots=True)
class UpdateShare:
    """The micro-batches of this process for one update."""

    micro_batches: list[LoadedMicroBatch]  # at least one
    count: int  # samples in the global batch


class Feed:
    """Yields the micro-batches of each update, starting at any step of any epoch.

    Args:
        order: the samples of each update.
        batch_sharing: how an update is divided among processes.
        loader: loads the samples.
        rank: the index of this process among those that divide the samples.
        augment: how the loader varies training pictures.
    """

    def __init__(
        self, order: Order, batch_sharing: BatchSharing, loader: Loader, rank: int, augment: str = "none"
    ) -> None:
        self.order, self.sharing, self.loader, self._rank, self.augment = order, batch_sharing, loader, rank, augment

    def updates(self, epoch: int, first_step: int) -> Iterator[UpdateShare]:
        """Yields the updates of the epoch from `first_step` on."""
        batches = self.loader.batches(epoch, self._requests(epoch, first_step))
        for step in range(first_step, self.order.steps_per_epoch):
            count = min(self.order.batch, self.order.length - step * self.order.batch)
            yield UpdateShare(
                [self._micro_batch(shares, next(batches)) for shares in self.sharing.micro_batches(count)], count
            )

    def samples_of_each(self) -> list[int]:
        """Returns the number of samples of each process in a full update."""
        parts = self.sharing.micro_batches(min(self.order.batch, self.order.length))
        return [sum(share.count for share in shares) for shares in zip(*parts, strict=True)]

    def _micro_batch(self, shares: Sequence[Share], batch: Batch) -> LoadedMicroBatch:
        return LoadedMicroBatch(shares[self._rank], batch, (shares[0].start, shares[-1].stop), self.sharing.group)

    def _requests(self, epoch: int, first_step: int) -> Iterator[Tensor]:
        for samples in self.order.batches(epoch, first_step):
            for shares in self.sharing.micro_batches(len(samples)):
                share = shares[self._rank]
                start, stop = share.start, max(share.stop, share.start + 1)
                # A process with nothing to do takes part with a sample that counts for nothing.
                yield samples[start:stop] if start < len(samples) else samples[:1]


@dataclass
class StepSums:
    """Sums over this process's samples since the last `take`, as tensors on the device, to avoid synchronization."""

    loss: Tensor | float = 0.0  # sum of losses
    samples: int = 0  # samples that count
    # first step whose loss was not finite, infinite if there is none; kept for good
    first_bad: Tensor | float = math.inf
    first_spoilt: Tensor | float = math.inf  # the same of gradients, where the card itself left that update out
    _correct: float | Tensor = 0.0
    _guesses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # begun anew, not cleared: a mark holds it

    def guess(self, logits: Tensor, labels: Tensor) -> None:
        """Adds logits [n, C] and labels int64 [n]; small ones are counted together for several micro-batches."""
        self._guesses.append((logits, labels))
        if len(self._guesses) * logits.numel() >= COUNTED_AT_ONCE:
            self._count()

    def unguessed(self) -> None:
        """Records that the accuracy is undefined (NaN)."""
        self._correct = math.nan

    def take(self) -> tuple[float, float, int]:
        """Returns the loss sum, correct and counted samples, and resets them."""
        self._count()
        # All hear of a gradient by way of the loss.
        loss = float(self.loss) if float(self.first_spoilt) == math.inf else math.nan
        values = loss, float(self._correct), self.samples
        self.loss, self._correct, self.samples = 0.0, 0.0, 0
        return values

    def mark(self) -> tuple[Any, ...]:
        """Returns the current sums, for `back`."""
        return self.loss, self.samples, self._correct, self._guesses, len(self._guesses)

    def back(self, mark: tuple[Any, ...]) -> None:
        """Restores the sums of a mark."""
        self.loss, self.samples, self._correct, self._guesses, guesses = mark
        del self._guesses[guesses:]

    def _count(self) -> None:
        if self._guesses:
            logits, labels = (torch.cat(tensors) for tensors in zip(*self._guesses, strict=True))
            self._correct = self._correct + (logits.argmax(1) == labels).sum()
            self._guesses = []

"""What this process computes for each update, and the sums of what it measured."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.core.shares import Share
from manyhands.data.loading import Loader
from manyhands.data.order import BatchSharing, Order, sharing
from manyhands.data.transforms import Batch
from manyhands.parallel.network import MicroBatch, MicroBatchShape

COUNTED_AT_ONCE = 1 << 16  # logits


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class LoadedMicroBatch:
    """One forward and backward pass of this process, and what it is of."""

    share: Share  # its part of the global batch; of no samples where there are fewer samples than processes
    batch: Batch  # the samples of the share, or a single stand-in of weight zero for an empty share
    # first sample of the whole micro-batch, over all processes, and the one after its last
    bounds: tuple[int, int] = (0, 0)
    group: int = 0  # samples in one of BatchNorm's groups; 0 where there are none

    def micro_batch(self, count: int, seed: int) -> MicroBatch:
        """The same for a network; `count` is the samples of the whole update."""
        shape = MicroBatchShape(self.bounds[1] - self.bounds[0], count, sharing(count, self.group, self.bounds), seed)
        return MicroBatch(self.batch.images, self.batch.labels, self.share, shape)


@dataclass(slots=True)
class UpdateShare:
    """All micro-batches of this process for one update."""

    micro_batches: list[LoadedMicroBatch]  # at least one
    count: int  # samples in the global batch


class Feed:
    """Gives each update's micro-batches, from any step of any epoch on.

    Args:
        order: which samples make up each update.
        sharing: how an update is shared.
        loader: samples to pixels.
        rank: this process's place among those that samples are shared among.
    """

    def __init__(self, order: Order, batch_sharing: BatchSharing, loader: Loader, rank: int) -> None:
        self.order, self.sharing, self.loader, self._rank = order, batch_sharing, loader, rank

    def updates(self, epoch: int, first_step: int) -> Iterator[UpdateShare]:
        """The epoch's updates from `first_step` on."""
        batches = self.loader.batches(epoch, self._requests(epoch, first_step))
        for step in range(first_step, self.order.steps_per_epoch):
            count = min(self.order.batch, self.order.length - step * self.order.batch)
            yield UpdateShare(
                [self._micro_batch(shares, next(batches)) for shares in self.sharing.micro_batches(count)], count
            )

    def samples_of_each(self) -> list[int]:
        """What each of those that share takes of a whole update."""
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
    """Sums over this process's samples since the last `take`; tensors on the device, so that nothing waits for it."""

    loss: Tensor | float = 0.0  # sum of losses
    samples: int = 0  # samples that count
    # first step whose loss was not finite, infinite if there is none; kept for good
    first_bad: Tensor | float = math.inf
    first_spoilt: Tensor | float = math.inf  # the same of gradients, where the card itself left that update out
    _correct: float | Tensor = 0.0
    _guesses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # begun anew, not cleared: a mark holds it

    def guess(self, logits: Tensor, labels: Tensor) -> None:
        """Notes logits [n, C] and labels int64 [n]; small ones are counted many passes at once, which costs less."""
        self._guesses.append((logits, labels))
        if len(self._guesses) * logits.numel() >= COUNTED_AT_ONCE:
            self._count()

    def unguessed(self) -> None:
        """Notes that there is nothing that could be right or wrong: the share of right guesses isn't a number."""
        self._correct = math.nan

    def take(self) -> tuple[float, float, int]:
        """Loss sum, correct and counted samples; starts again from zero."""
        self._count()
        # All hear of a gradient by way of the loss.
        loss = float(self.loss) if float(self.first_spoilt) == math.inf else math.nan
        values = loss, float(self._correct), self.samples
        self.loss, self._correct, self.samples = 0.0, 0.0, 0
        return values

    def mark(self) -> tuple[Any, ...]:
        """What was measured so far, for `back`."""
        return self.loss, self.samples, self._correct, self._guesses, len(self._guesses)

    def back(self, mark: tuple[Any, ...]) -> None:
        """Forgets what was measured since a mark."""
        self.loss, self.samples, self._correct, self._guesses, guesses = mark
        del self._guesses[guesses:]

    def _count(self) -> None:
        if self._guesses:
            logits, labels = (torch.cat(tensors) for tensors in zip(*self._guesses, strict=True))
            self._correct = self._correct + (logits.argmax(1) == labels).sum()
            self._guesses = []

"""Brings order, cut and loader together: what this process computes for each update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.data.loader import Batch, Loader
from manyhands.data.order import Cut, Order, Share, shares_of_pass
from manyhands.parallel.network import PassShape


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of this process.

    Attributes:
        share: its part of the global batch; of no samples where there are fewer samples than processes.
        batch: the samples of the share, or a single stand-in of weight zero for an empty share.
        bounds: first sample of the whole pass, over all processes, and the one after its last.
        group: samples in one of BatchNorm's groups; 0 where there are none.
    """

    share: Share
    batch: Batch
    bounds: tuple[int, int] = (0, 0)
    group: int = 0

    def shape(self, count: int, seed: int) -> PassShape:
        """What a split network must know of it; `count` is the samples of the whole update."""

        def share(parts: int, index: int) -> Share:
            return shares_of_pass(count, self.group, self.bounds, parts)[index]

        return PassShape(self.bounds[1] - self.bounds[0], count, share, seed)


@dataclass(frozen=True)
class Update:
    """All passes of this process for one update.

    Attributes:
        passes: at least one.
        count: samples in the global batch.
    """

    passes: list[Pass]
    count: int


class Feed:
    """Gives each update's passes, from any step of any epoch on.

    Args:
        order: which samples make up each update.
        cut: how an update is shared.
        loader: samples to pixels.
        rank: this process's place among those that the cut shares samples among.
    """

    def __init__(self, order: Order, cut: Cut, loader: Loader, rank: int) -> None:
        self.order, self.cut, self.loader, self._rank = order, cut, loader, rank

    def updates(self, epoch: int, first_step: int) -> Iterator[Update]:
        """The epoch's updates from `first_step` on."""
        batches = self.loader.batches(epoch, self._requests(epoch, first_step))
        for step in range(first_step, self.order.steps_per_epoch):
            count = min(self.order.batch, self.order.length - step * self.order.batch)
            yield Update([self._pass(shares, next(batches)) for shares in self.cut.passes(count)], count)

    def _pass(self, shares: Sequence[Share], batch: Batch) -> Pass:
        return Pass(shares[self._rank], batch, (shares[0].start, shares[-1].stop), self.cut.group)

    def _requests(self, epoch: int, first_step: int) -> Iterator[Tensor]:
        for samples in self.order.batches(epoch, first_step):
            for shares in self.cut.passes(len(samples)):
                share = shares[self._rank]
                start, stop = share.start, max(share.stop, share.start + 1)
                # A process with nothing to do takes part with a sample that counts for nothing.
                yield samples[start:stop] if start < len(samples) else samples[:1]

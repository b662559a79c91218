"""Which samples make up each update: a pure function of seed, epoch and step, and how processes share them.

An epoch is one permutation of the training samples, cut into global batches. A global batch is cut into passes
(one, unless a process's share would exceed the micro-batch), and a pass into one contiguous share per process.
Nothing but the last cut knows how many processes there are, so 1, 2, 3 or 8 processes make the same updates.
"""

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.seeds import derive
from manyhands.core.world import Share, Span

# A process may get this much more than the fair share if that spares BatchNorm all communication.
ALIGNED_SHARE_LIMIT = 1.15


@dataclass(frozen=True)
class Order:
    """The order of training samples."""

    length: int  # samples in the training split
    batch: int  # samples in a global batch
    seed: int  # the job's seed
    drop_last: bool = False  # leave out the last batch of an epoch where it is smaller

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Updates in one epoch, at least one."""
        whole = self.length // self.batch
        return max(1, whole if self.drop_last else math.ceil(self.length / self.batch))

    def permutation(self, epoch: int) -> Tensor:
        """All samples of an epoch in their order, int64 [length]."""
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        return torch.randperm(self.length, generator=generator)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Tensor]:
        """The epoch's global batches from `first_step` on, each int64 [up to batch]."""
        samples = self.permutation(epoch)
        for step in range(first_step, self.steps_per_epoch):
            yield samples[step * self.batch : (step + 1) * self.batch]


@dataclass(frozen=True)
class BatchSharing:
    """How global batches are shared out, as micro-batches and each process's share of them."""

    processes: int  # how many share the work
    micro_batch: int = 0  # most samples a process takes in one micro-batch; 0 for no limit
    group: int = 0  # samples in a normalisation group; 0 where there are none
    # shares may be of whole groups; False: of equal size, so that a share's halves are the shares of twice as many
    # processes
    aligned: bool = True
    shares: tuple[int, ...] = ()  # what each process takes, in proportion; empty: all the same
    most: int = 0  # samples that a process has taken in one pass since the run began; 0 where that isn't known

    @functools.cached_property
    def edges(self) -> tuple[int, ...]:
        """Sums of the shares before each process, and of all."""
        return tuple(itertools.accumulate(self.shares or (1,) * self.processes, initial=0))

    @property
    def largest(self) -> int:
        """Most samples that fit into one micro-batch of all processes; 0 for no limit."""
        return self.micro_batch * self.edges[-1] // max(self.shares, default=1)

    def within(self, most: int, count: int) -> "BatchSharing":
        """The same with passes of at most `most` samples (0: any number) where that is less than they have.

        A group that needs more is kept whole. `count` are the samples of the largest update.
        """
        if self.micro_batch or not most:
            return replace(self, most=self.largest_share(count))
        widest = max(last - first for first, last in itertools.pairwise(group_edges(count, self.group)))
        needed = math.ceil(widest * max(self.shares, default=1) / self.edges[-1])
        fits = self.largest_share(count) <= most
        return replace(self, micro_batch=0 if fits else max(most, needed), most=most)

    def largest_share(self, count: int) -> int:
        """The most samples that a process takes in one pass, of updates of `count`."""
        return max(share.count for shares in self.micro_batches(count) for share in shares)

    def micro_batches(self, count: int) -> tuple[tuple[Share, ...], ...]:
        """For each micro-batch of `count` samples, each process's share. Raises UserError: a group doesn't fit in."""
        return _micro_batches(self, count)


@functools.lru_cache(maxsize=256)
def shares_of_micro_batch(count: int, group: int, bounds: tuple[int, int], processes: int) -> tuple[Share, ...]:
    """How processes share one micro-batch equally, in a network whose ops are split over processes of their own.

    The global batch has `count` samples, its normalisation groups `group` (0: there are none). The micro-batch is those
    from the first bound up to the second; groups don't lie across them.
    """
    return _shares(BatchSharing(processes, 0, group, aligned=False), group_edges(count, group), *bounds)


@functools.lru_cache(maxsize=64)
def _micro_batches(batch_sharing: BatchSharing, count: int) -> tuple[tuple[Share, ...], ...]:
    """Micro-batches of whole groups, each of at most `largest` samples, shared among the processes."""
    edges, limit = group_edges(count, batch_sharing.group), batch_sharing.largest or count
    bounds = [edges[0]]
    for first, last in itertools.pairwise(edges):
        if last - first > limit:
            raise UserError(
                f"BatchNorm needs {last - first} samples per micro-batch, but train.micro_batch = "
                f"{batch_sharing.micro_batch} on {batch_sharing.processes} process(es) gives only {limit}",
                "train.micro_batch",
                ("raise train.micro_batch", f"or lower the group size: --set train.norm_group={max(2, limit)}"),
            )
        if last - bounds[-1] > limit:
            bounds.append(first)
    return tuple(_shares(batch_sharing, edges, *each) for each in itertools.pairwise([*bounds, edges[-1]]))


def sharing(count: int, group: int, bounds: tuple[int, int]) -> Callable[[int, int], Share]:
    """What process number `index` of `parts` has of such a pass: a function of both."""
    return lambda parts, index: shares_of_micro_batch(count, group, bounds, parts)[index]


def group_edges(count: int, group: int) -> list[int]:
    """Where normalisation groups of a global batch begin and end; knows nothing of processes.

    Groups hold at most `group` samples and differ by one at most, so that the last batch of an epoch, too, has no
    group of a few samples whose statistics are noise. Without groups every sample stands alone.
    """
    groups = math.ceil(count / group) if group else count
    return [count * number // groups for number in range(groups + 1)]


def _shares(batch_sharing: BatchSharing, edges: list[int], start: int, stop: int) -> tuple[Share, ...]:
    inner = [edge for edge in edges if start <= edge <= stop]
    bounds = _boundaries(inner, batch_sharing)
    if not batch_sharing.group:
        return tuple(Share(first, last, (), ()) for first, last in bounds)
    cuts = {first for first, last in bounds if last > first} - set(inner)
    shared = sorted({bisect.bisect_right(inner, cut) - 1 for cut in cuts})
    sizes = tuple(inner[number + 1] - inner[number] for number in shared)
    return tuple(Share(first, last, _spans(first, last, inner, shared), sizes) for first, last in bounds)


def _boundaries(edges: list[int], batch_sharing: BatchSharing) -> list[tuple[int, int]]:
    """Contiguous shares of the wanted sizes, or of whole groups where that costs little and nobody goes without."""
    first, count, groups, cuts = edges[0], edges[-1] - edges[0], len(edges) - 1, batch_sharing.edges
    fair = list(itertools.pairwise(first + count * cut // cuts[-1] for cut in cuts))
    aligned = list(itertools.pairwise(edges[groups * cut // cuts[-1]] for cut in cuts))
    largest = max(stop - start for start, stop in aligned)
    idle = any(stop == start < end for (start, stop), (_, end) in zip(aligned, fair, strict=True))
    if not batch_sharing.aligned or idle or largest > (batch_sharing.micro_batch or count):
        return fair
    wanted = batch_sharing.shares or (1,) * batch_sharing.processes
    longest_fair, longest = (
        max((stop - start) / share for (start, stop), share in zip(bounds, wanted, strict=True))
        for bounds in (fair, aligned)
    )
    return aligned if longest <= ALIGNED_SHARE_LIMIT * longest_fair else fair


def _spans(first: int, last: int, edges: list[int], shared: list[int]) -> tuple[Span, ...]:
    spans: list[Span] = []
    row = first
    while row < last:
        number = bisect.bisect_right(edges, row) - 1
        start, stop = edges[number], edges[number + 1]
        place = shared.index(number) if number in shared else -1
        spans.append(Span(number, row - first, min(last, stop) - first, stop - start, place, first=row == start))
        row = min(last, stop)
    return tuple(spans)


def batch_noted(batch: int, length: int) -> str:
    """A sentence for who asks for a larger batch than there are training samples; else empty."""
    if batch <= length:
        return ""
    return f"each update uses all {length:,} training samples, fewer than the batch of {batch:,}"


def evaluation_blocks(length: int, block: int) -> list[range]:
    """The evaluation split as blocks of fixed size, the last one smaller; the same for any number of processes."""
    return [range(start, min(start + block, length)) for start in range(0, length, block)]


def dealt_blocks(count: int, shares: Sequence[int]) -> list[list[int]]:
    """Numbers of `count` blocks of one size for each process, in order: each to whoever would be done with it first.

    A process's speed is in proportion to its share; of several the first gets it, so equal shares deal in turns.
    """
    dealt: list[list[int]] = [[] for _ in shares]
    # A quotient is rounded alike everywhere, so all processes come to the same.
    waiting = [(1 / share, rank) for rank, share in enumerate(shares)]
    heapq.heapify(waiting)
    for number in range(count):
        rank = waiting[0][1]
        dealt[rank].append(number)
        heapq.heapreplace(waiting, ((len(dealt[rank]) + 1) / shares[rank], rank))
    return dealt

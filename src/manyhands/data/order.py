"""Selects the samples of each update from seed, epoch and step alone, and divides them among the processes.

An epoch is a permutation of the training samples, divided into global batches. A global batch is divided into
micro-batches, and a micro-batch into one contiguous share per process.
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
from manyhands.core.seeds import derive_seed
from manyhands.core.world import Share, Span

ALIGNED_SHARE_LIMIT = 1.15  # maximum ratio to the fair share if alignment with BatchNorm groups saves communication


@dataclass(frozen=True)
class Order:
    """The order of the training samples in each epoch."""

    length: int  # samples in the training split
    batch: int  # samples in a global batch
    seed: int  # the job's seed
    drop_last: bool = False  # omit a smaller last batch of an epoch

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return max(1, self.length // self.batch if self.drop_last else math.ceil(self.length / self.batch))

    def permutation(self, epoch: int) -> Tensor:
        """Returns the indices of all samples, int64 [length], in the order of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self.length, generator=generator)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Tensor]:
        """Yields each global batch of an epoch from `first_step` on, as sample indices int64 [n], n ≤ `batch`."""
        samples = self.permutation(epoch)
        for step in range(first_step, self.steps_per_epoch):
            yield samples[step * self.batch : (step + 1) * self.batch]


@dataclass(frozen=True)
class BatchSharing:
    """The division of global batches into micro-batches, and of each micro-batch into one share per process."""

    processes: int
    micro_batch: int = 0  # maximum samples of a process in one micro-batch; 0: no limit
    group: int = 0  # samples in a BatchNorm group; 0: no groups
    aligned: bool = True  # align shares with groups, if possible; False: equal shares
    shares: tuple[int, ...] = ()  # relative shares of the processes; empty: equal
    largest_since_start: int = 0  # maximum samples of a process in one pass since the run began; 0: unknown

    @functools.cached_property
    def share_boundaries(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.shares or (1,) * self.processes, initial=0))

    @property
    def largest_micro_batch(self) -> int:
        """The maximum number of samples in one micro-batch, of all processes together (0: no limit)."""
        return self.micro_batch * self.share_boundaries[-1] // max(self.shares, default=1)

    def limited(self, limit: int, count: int) -> "BatchSharing":
        """Returns a copy for updates of `count` samples: at most `limit` per rank and pass (0: any), or one group."""
        if self.micro_batch or not limit:
            return replace(self, largest_since_start=self.largest_share(count))
        widest = max(last - first for first, last in itertools.pairwise(group_boundaries(count, self.group)))
        needed = math.ceil(widest * max(self.shares, default=1) / self.share_boundaries[-1])
        fits = self.largest_share(count) <= limit
        return replace(self, micro_batch=0 if fits else max(limit, needed), largest_since_start=limit)

    def largest_share(self, count: int) -> int:
        """Returns the largest number of samples of a process in a micro-batch, for updates of `count` samples."""
        return max(share.count for shares in self.micro_batches(count) for share in shares)

    def micro_batches(self, count: int) -> tuple[tuple[Share, ...], ...]:
        """Divides `count` samples into micro-batches of a share per rank. Raises UserError for a too large group."""
        return _micro_batches(self, count)


@functools.lru_cache(maxsize=256)
def equal_shares(count: int, group: int, bounds: tuple[int, int], processes: int) -> tuple[Share, ...]:
    """Divides samples bounds[0] to bounds[1] of a batch of `count` equally. `group`: samples in a BatchNorm group."""
    return _divide_samples(BatchSharing(processes, 0, group, aligned=False), group_boundaries(count, group), *bounds)


@functools.lru_cache(maxsize=64)
def _micro_batches(batch_sharing: BatchSharing, count: int) -> tuple[tuple[Share, ...], ...]:
    edges, limit = group_boundaries(count, batch_sharing.group), batch_sharing.largest_micro_batch or count
    bounds = [edges[0]]
    for first, last in itertools.pairwise(edges):
        if last - first > limit:
            given = f"train.micro_batch = {batch_sharing.micro_batch} on {batch_sharing.processes} process(es)"
            what = f"BatchNorm needs {last - first} samples per micro-batch, but {given} gives only {limit}"
            hint = f"or lower the group size: --set train.norm_group={max(2, limit)}"
            raise UserError(what, "train.micro_batch", ("raise train.micro_batch", hint))
        if last - bounds[-1] > limit:
            bounds.append(first)
    return tuple(_divide_samples(batch_sharing, edges, *each) for each in itertools.pairwise([*bounds, edges[-1]]))


def equal_share_function(count: int, group: int, bounds: tuple[int, int] | None = None) -> Callable[[int, int], Share]:
    """Returns a function (number of shares, index) -> that share of `equal_shares`, by default of the entire batch."""
    return lambda parts, index: equal_shares(count, group, bounds or (0, count), parts)[index]


def group_boundaries(count: int, group_size: int) -> list[int]:
    """Returns boundaries of groups of at most `group_size` samples (0: of 1), whose sizes differ by at most 1."""
    groups = math.ceil(count / group_size) if group_size else count
    return [count * number // groups for number in range(groups + 1)]


def _divide_samples(batch_sharing: BatchSharing, edges: list[int], start: int, stop: int) -> tuple[Share, ...]:
    inner = [edge for edge in edges if start <= edge <= stop]
    bounds = _share_boundaries(inner, batch_sharing)
    if not batch_sharing.group:
        return tuple(Share(first, last, (), ()) for first, last in bounds)
    cuts = {first for first, last in bounds if last > first} - set(inner)
    shared = sorted({bisect.bisect_right(inner, cut) - 1 for cut in cuts})
    sizes = tuple(inner[number + 1] - inner[number] for number in shared)
    return tuple(Share(first, last, _group_spans(first, last, inner, shared), sizes) for first, last in bounds)


def _share_boundaries(edges: list[int], batch_sharing: BatchSharing) -> list[tuple[int, int]]:
    """Returns each rank's (start, stop), of entire BatchNorm groups if such shares are nearly fair and not empty."""
    first, count, groups, cuts = edges[0], edges[-1] - edges[0], len(edges) - 1, batch_sharing.share_boundaries
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


def _group_spans(first: int, last: int, edges: list[int], shared: list[int]) -> tuple[Span, ...]:
    spans, row = list[Span](), first
    while row < last:
        number = bisect.bisect_right(edges, row) - 1
        start, stop = edges[number], edges[number + 1]
        place = shared.index(number) if number in shared else -1
        spans.append(Span(number, row - first, min(last, stop) - first, stop - start, place, first=row == start))
        row = min(last, stop)
    return tuple(spans)


def large_batch_note(batch: int, length: int) -> str:
    """Returns a message if the batch is larger than the training split of `length` samples, else ""."""
    if batch <= length:
        return ""
    return f"each update uses all {length:,} training samples, fewer than the batch of {batch:,}"


def assign_blocks(count: int, shares: Sequence[int]) -> list[list[int]]:
    """Assigns each block to the rank that would finish it first. Returns block indices by rank. `shares`: speeds."""
    dealt: list[list[int]] = [[] for _ in shares]
    waiting = [(1 / share, rank) for rank, share in enumerate(shares)]
    heapq.heapify(waiting)
    for number in range(count):
        rank = waiting[0][1]
        dealt[rank].append(number)
        heapq.heapreplace(waiting, ((len(dealt[rank]) + 1) / shares[rank], rank))
    return dealt

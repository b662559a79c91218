"""Gradients of processes on several machines, added up in two levels: within each machine, then between the machines.

The processes of a machine add up through their memory, one of them, the leader, all-reduces that with the leaders of
the other machines, and the others read the result from its memory. DDP hands each of its buckets over as soon as the
backward pass has filled it; one thread of each process takes them one after the other, in DDP's own order, which is the
same everywhere. So nobody who computes waits, and every numbered sequence of sums belongs to one thread.
"""

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from manyhands.core.quantities import short_time
from manyhands.core.world import World
from manyhands.parallel.collectives import group_timeout
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.newcomers import closed_once_formed
from manyhands.parallel.shared_memory import SharedSums, share_within

Machines = list[list[int]]  # ranks of each machine's processes, by their first, which leads

# Of what is on its way between the leaders at once.
_PIECE_BYTES = 4 << 20
# A message is timed from the first size on, larger ones as long as all rounds of one are over soon.
_FIRST_BYTES, _MOST_BYTES, _LARGER = 4 << 10, 4 << 20, 8
_ROUNDS, _SOON_S = 7, 0.1
# A message alone hides nothing behind the next one, as an update's do: updates were quicker in two levels also where it
# took 1.1 times as long. And what is about equal must not be chosen by chance, since the bits depend on it.
_NEARLY = 1.2


@dataclass
class _Sum:
    """What is to be added up."""

    values: Tensor  # flat [n], replaced by their sum
    future: torch.futures.Future[Tensor]  # gets them
    last: bool  # nothing comes after it that could be added up while its last piece is on its way


class TwoLevels:
    """Adds up tensors over all processes, one after the other, in a thread of its own.

    While a piece is on its way between the leaders the next one is added up within the machines.

    Args:
        sums: of this process's machine; None where it is alone there.
        leaders: the group of the machines' leaders; None on a process that doesn't lead.
    """

    def __init__(self, sums: SharedSums | None, leaders: Any) -> None:
        self._sums, self._leaders = sums, leaders
        self._failed: Exception | None = None
        self._given: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self._taken: deque[_Sum] = deque()
        self._between: tuple[Tensor, Any, bool] | None = None  # a piece, its collective, whether a sum ends with it
        threading.Thread(target=self._go_on, name="manyhands two levels", daemon=True).start()

    def begin(self, values: Tensor, *, last: bool = True) -> torch.futures.Future[Tensor]:
        """Has flat values [n] replaced by their sum over all processes; a collective, in the same order everywhere.

        It is done when one that is `last` has begun too. Waiting for it raises RuntimeError where a process has ended,
        or was silent for too long; nothing can be added up any more then.
        """
        SharedSums.begun += 1
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        # What a callback raises is raised where DDP waits, which an exception that is set on the future itself isn't.
        checked = future.then(self._checked)
        self._given.put(_Sum(values, future, last))
        return checked

    def close(self) -> None:
        """Leaves; who waits for this process hears it."""
        if self._sums:
            self._sums.close()
        self._given.put(None)
        if self._leaders:
            dist.destroy_process_group(self._leaders)
            self._leaders = None

    def _checked(self, done: torch.futures.Future[Tensor]) -> Tensor:
        if self._failed:
            raise self._failed
        return done.value()

    def _go_on(self) -> None:
        while (given := self._given.get()) is not None:
            self._taken.append(given)
            if self._failed is None:
                try:
                    self._add_up(given)
                except Exception as error:  # noqa: BLE001 - raised where somebody waits
                    self._failed = error
                    if self._sums:  # out of step from now on, which neighbours are to hear
                        self._sums.close()
            while self._failed and self._taken:
                self._end_sum()

    def _add_up(self, given: _Sum) -> None:
        pieces = given.values.split(_PIECE_BYTES // given.values.element_size())
        for number, piece in enumerate(pieces, start=1):
            if self._sums:
                self._sums.add_up_for_first(piece)
            work = dist.all_reduce(piece, group=self._leaders, async_op=True) if self._leaders else None
            self._end_piece()
            self._between = piece, work, number == len(pieces)
        if given.last:
            self._end_piece()

    def _end_piece(self) -> None:
        """Waits for the piece that is between the leaders, and gives it to the neighbours."""
        if self._between is None:
            return
        (piece, work, ends), self._between = self._between, None
        if work:
            work.wait()
        if self._sums:
            self._sums.spread(piece)
        if ends:
            self._end_sum()

    def _end_sum(self) -> None:
        done = self._taken.popleft()
        done.future.set_result(done.values)


def add_bucket_up(levels: TwoLevels, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of DDP's, which leaves the sum of all processes' gradients: no mean."""
    return levels.begin(bucket.buffer(), last=bucket.is_last())


@dataclass
class LevelsNetwork(ParallelNetwork):
    """A replica whose gradients DDP has added up in two levels."""

    levels: TwoLevels | None = None

    @override
    def release(self) -> None:
        assert self.levels is not None
        self.levels.close()


def open_levels(machines: Machines, world: World) -> TwoLevels | str:
    """Sums in two levels of all processes, or why there are none; a collective of all."""
    sums = share_within(machines, world)
    if isinstance(sums, str):
        return sums
    leaders = [machine[0] for machine in machines]
    with closed_once_formed(world.backend):
        group = dist.new_group(leaders, timeout=group_timeout(world))
    return TwoLevels(sums, group if world.rank in leaders else None)


@dataclass(frozen=True)
class AveragingTimes:
    """Seconds that a sum of so many bytes takes in two levels, and by the backend alone; of the slowest process."""

    levels_s: float
    backend_s: float
    size_bytes: int

    @property
    def levels_win(self) -> bool:
        return self.levels_s <= _NEARLY * self.backend_s

    def __str__(self) -> str:
        both = f"{short_time(self.levels_s)} in two levels, {short_time(self.backend_s)} without"
        return f"{self.size_bytes:,} bytes take {both}"


def time_both(levels: TwoLevels, most_bytes: int) -> AveragingTimes:
    """Times both in turns, alike on all processes: with some KiB, and more where the link is fast. A collective."""
    ways: list[Callable[[Tensor], object]] = [lambda one: levels.begin(one).wait(), dist.all_reduce]
    size_bytes, most_bytes = _FIRST_BYTES, min(most_bytes, _MOST_BYTES)
    while True:
        size_bytes = min(size_bytes, most_bytes)
        values = torch.zeros(-(-size_bytes // 4))
        rounds = [[_taken(ways[which], values) for which in (0, 1)] for _ in range(_ROUNDS)]
        slowest = torch.tensor([statistics.median(each) for each in zip(*rounds, strict=True)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if size_bytes == most_bytes or _ROUNDS * float(slowest.sum()) > _SOON_S:
            return AveragingTimes(float(slowest[0]), float(slowest[1]), size_bytes)
        size_bytes *= _LARGER


def _taken(add_up: Callable[[Tensor], object], values: Tensor) -> float:
    began = time.perf_counter()
    add_up(values)
    return time.perf_counter() - began

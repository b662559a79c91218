"""Times something on this device so that the same figure comes again: the quickest of some repeats, and their spread.

Whatever else goes on can only make a repeat slower, so the least one says most. On a CPU that others keep busy even
that isn't enough, since threads wait for each other: one thread's processor time is taken then, shared out among as
many threads as there will be. So it is where a group of processes may use less of the processors than its threads
would (a quota): a short repeat between two pauses seems faster than work is that goes on.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from manyhands.core.devices import wait_for
from manyhands.core.machine import cores

# The machine is busy where others take more than this share of its processors.
BUSY = 0.15
# How much of each further thread's time is worth as much as the first one's, roughly.
_EFFICIENCY = 0.85
_STAT = Path("/proc/stat")
# The resolution of processor times is a hundredth of a second.
_WATCHED_S = 0.1


@dataclass(frozen=True)
class Timing:
    """How long something takes."""

    seconds: float  # of the quickest repeat, or the median of processor time
    # the share by which the quickest quarter of the repeats, two at least, differs; 0 of a single one
    spread: float = 0.0

    def times(self, factor: float) -> "Timing":
        """So many times as long."""
        return Timing(self.seconds * factor, self.spread)


def quickest(run: Callable[[], object], device: str, most: int, budget_s: float, *, busy: bool = False) -> Timing:
    """Times `run`, which has run before; once at least. `busy`: others keep this machine at work."""
    threads, clock = torch.get_num_threads(), time.perf_counter
    factor = 1.0
    if torch.device(device).type == "cpu":
        allowed = cores()
        if allowed < threads:
            clock, factor = time.process_time, 1 / allowed
        elif busy:
            clock, factor = time.process_time, 1 / (1 + (threads - 1) * _EFFICIENCY)
            torch.set_num_threads(1)
    try:
        taken = sorted(_repeated(run, device, clock, most, budget_s))
    finally:
        torch.set_num_threads(threads)
    near = taken[min(len(taken) - 1, max(1, len(taken) // 4))]
    # Waiting isn't in processor time, so what differs there is the work's own.
    usual = taken[0] if clock is time.perf_counter else statistics.median(taken)
    return Timing(usual * factor, near / taken[0] - 1 if taken[0] > 0 else 0.0)


def _repeated(
    run: Callable[[], object], device: str, clock: Callable[[], float], most: int, budget_s: float
) -> list[float]:
    taken: list[float] = []
    began = time.perf_counter()
    while not taken or (len(taken) < most and time.perf_counter() - began < budget_s):
        start = clock()
        run()
        wait_for(device)
        taken.append(clock() - start)
    return taken


class Others:
    """The processor time that other processes have used since the creation of the object; 0 if it is unknown."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float:
        """Returns the share of all processors' time, 0 to 1, over at least a tenth of a second."""
        time.sleep(max(0.0, self._began[1] + _WATCHED_S - time.perf_counter()))
        busy_s, wall_s, own_s = (now - before for now, before in zip(self._now(), self._began, strict=True))
        total_s = wall_s * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy_s - own_s) / total_s)) if total_s > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        return _busy_seconds(), time.perf_counter(), time.process_time()


def _busy_seconds() -> float:
    """Returns the time that all processors have worked since the machine started."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, *rest = map(int, words[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

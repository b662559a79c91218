"""Times something on this device so that the same figure comes again: the quickest of some repeats, and their spread.

Whatever else goes on can only make a repeat slower, so the least one says most. On a CPU that others keep busy even
that isn't enough, since threads wait for each other: one thread's processor time is taken then, shared out among as
many threads as there will be. So it is where a group of processes may use less of the processors than its threads
would (a quota): a short repeat between two pauses seems faster than work is that goes on.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from manyhands.core.devices import wait_for
from manyhands.core.machine import cores

# The machine is busy where others take more than this share of its processors.
BUSY = 0.15
# How much of each further thread's time is worth as much as the first one's, roughly.
_EFFICIENCY = 0.85


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

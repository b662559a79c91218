"""Times one machine's share of an update, without the others. It says what a step takes where links cost nothing."""

import statistics
import time
from dataclasses import replace

import torch

from manyhands.core.world import World
from manyhands.planner.trial import Case, Whole

_MOST_REPEATS = 7
# BatchNorm needs two samples for a variance.
_FEWEST_SAMPLES = 2


def share_seconds(case: Case, processes: int, threads: int = 0, micro_batch: int = 0, budget_s: float = 10.0) -> float:
    """Seconds of forward, backward and update of the largest share, the median of some repeats in this process.

    Args:
        case: the whole update.
        processes: that share it.
        threads: of the CPU that a process will have; 0 for as many as this one has.
        micro_batch: most samples in one pass, which is timed alone then; 0 for the whole share.
        budget_s: once it is used up there are no more repeats; one is always made.
    """
    share = max(_FEWEST_SAMPLES, -(-case.batch // processes))
    timed = min(share, max(_FEWEST_SAMPLES, micro_batch or share))
    device, before = str(case.picture.device), torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        runner = Whole(replace(case, batch=timed), World(device=device))
        began = time.perf_counter()
        _seconds(runner, device)
        taken: list[float] = []
        while not taken or (len(taken) < _MOST_REPEATS and time.perf_counter() - began < budget_s):
            taken.append(_seconds(runner, device))
        return statistics.median(taken) * share / timed
    finally:
        torch.set_num_threads(before)


def _seconds(runner: Whole, device: str) -> float:
    start = time.perf_counter()
    runner.update()
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start

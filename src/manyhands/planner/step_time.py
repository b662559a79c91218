"""Times one machine's share of an update, without the others. It says what a step takes where links cost nothing."""

from dataclasses import replace

import torch

from manyhands.core.world import World
from manyhands.planner.timing import BUSY, Others, Timing, quickest
from manyhands.planner.trial import PlanCase, Runner

_MOST_REPEATS = 7
# BatchNorm needs two samples for a variance.
_MIN_SAMPLES = 2


def share_timing(
    case: PlanCase, processes: int, threads: int = 0, micro_batch: int = 0, budget_s: float = 10.0
) -> Timing:
    """Forward, backward and update of the largest share, timed in this process.

    Processes share the update, each with so many threads of the CPU (0: as many as this one has). Of a micro-batch, if
    it isn't 0, that alone is timed. One repeat is always made, others within the budget.
    """
    share = max(_MIN_SAMPLES, -(-case.batch // processes))
    timed = min(share, max(_MIN_SAMPLES, micro_batch or share))
    device, before = str(case.picture.device), torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        runner, others = Runner(replace(case, batch=timed, micro_batch=0), None, World(device=device)), Others()
        runner.update()
        found = quickest(runner.update, device, _MOST_REPEATS, budget_s, busy=others.share() > BUSY)
        return found.times(share / timed)
    finally:
        torch.set_num_threads(before)

"""What a plan is priced by: a process's share of an update, and what sending keeps its cores from."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.config.job import Job
from manyhands.core.machine import cores
from manyhands.planner.fewer import fewer_counts, options_of
from manyhands.planner.find import Option, SearchResult
from manyhands.planner.step_time import share_timing
from manyhands.planner.talking import work_of_sums
from manyhands.planner.timing import Timing
from manyhands.sync.link_speeds import LinkSpeed
from manyhands.sync.measure import pass_seconds
from manyhands.worker.plan_trials import case_of

_SHARE_S, _FEWER_S = 10.0, 4.0


@dataclass
class Costs:
    """Times on this machine, each taken once.

    Args:
        job: on all its processes.
        network: channels, size, classes and batch.
        device: where ops run.
        between: the link where each process has a machine like this one; None where all share this one.
        measured: False to time nothing.
    """

    job: Job
    network: dict[str, Any]
    device: str
    between: LinkSpeed | None
    measured: bool

    def share(self, processes: int, budget_s: float = _SHARE_S) -> Timing | None:
        """One process's update where so many share it."""
        if not self.measured:
            return None

        together = 1 if self.between else processes
        threads = self.job.cluster.threads or (0 if self.between else max(1, torch.get_num_threads() // together))
        case = case_of(self.job, self.network, self.device)
        return share_timing(case, processes, threads, self.job.train.micro_batch, budget_s)

    def fewer(self, found: SearchResult) -> tuple[Option, ...]:
        """Data parallel on fewer processes; where nothing is timed, on machines of their own alone."""
        # Processes of one machine share its cores, of which estimates know nothing.
        apart = self.between is not None or self.device != "cpu"
        if found.fewer is None or found.request.pins or not (apart or self.measured):
            return ()
        counts = fewer_counts(found.request.world_size)
        timed = {count: self.share(count, _FEWER_S) for count in counts}
        return tuple(options_of(counts, found.fewer, {count: one for count, one in timed.items() if one}))

    def worked(self, link: LinkSpeed) -> LinkSpeed:
        """The link, with what its messages keep a process's cores from."""
        if self.device != "cpu" or not self.measured:
            return link
        if self._work is None:
            self._work = work_of_sums(cores() / (1 if self.between else self.job.cluster.processes))
        return link.with_work_of(self._work)

    _work: LinkSpeed | None = None

    def pass_s(self, model: nn.Module) -> float:
        """Seconds of a sum of two vectors of all parameters; 0 where nothing is timed."""
        count = sum(one.numel() for one in model.parameters() if one.requires_grad)
        return pass_seconds(count, self.device) if self.measured else 0.0

"""What memory the smallest number of processes takes that a run may go on with, as its plan prices data parallel."""

from typing import Any

from torch import nn

from manyhands.cluster.hosts.machines import machines_of
from manyhands.config.job import Job
from manyhands.data.order import BatchSharing
from manyhands.parallel.norm import GroupedNorm
from manyhands.planner.find import SearchResult
from manyhands.train.fewest import fewest_processes, passes_of_fewest
from manyhands.worker.plan_trials import norm_group

_GIB = 1 << 30
# What a process takes on a CPU before it has a network: Python, torch, and what gloo holds.
_PROCESS_GIB = 0.4


def memory_of_fewest(job: Job, found: SearchResult, network: dict[str, Any], model: nn.Module, *, apart: bool) -> str:
    """A sentence on what each process takes once a run is as small as `--elastic` lets it be; empty where it stays.

    Args:
        job: as the user wrote it.
        found: plans for all its processes.
        network: its figures.
        model: the network.
        apart: each process has a machine of its own.
    """
    count, batch = found.wish.world_size, network["batch"]
    most = job.cluster.machines_wanted.stop - 1 if ":" in job.cluster.elastic else 1
    machines = count if apart else min(count, len(machines_of(job.cluster)) or most)
    least = fewest_processes(job, count, machines)
    if least == count or found.fewer is None:
        return ""
    grouped = any(isinstance(module, GroupedNorm) for module in model.modules())
    cut = BatchSharing(count, job.train.micro_batch, norm_group(job, batch) if grouped else 0)
    samples, passes = passes_of_fewest(cut, least, batch)
    here, whole = found.options[0].prediction.memory_bytes, found.fewer(least).prediction.memory_bytes
    # Memory grows with the samples of a pass: between those of now, and all that so few processes have of an update.
    now, widest = cut.largest_share(batch), -(-batch // least)
    more = (whole - here) * max(0, samples - now) / max(1, widest - now)
    own = 0.0 if found.wish.accelerator else _PROCESS_GIB
    takes = f"{own + (here + more) / _GIB:.3g} GiB per process, instead of {own + here / _GIB:.3g} with all {count}"
    takes += f", including {own} without a network" if own else ""
    return f"data parallel on {least} of {count} processes (--elastic) takes {takes}; each process {passes}"

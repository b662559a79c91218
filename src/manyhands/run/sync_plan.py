"""What agreeing will cost a job: its step timed here or estimated, its link named or measured, its methods compared."""

from typing import TYPE_CHECKING, Any

from manyhands.config.job import Job
from manyhands.core.links import WITHIN_A_MACHINE, Link, named_link

if TYPE_CHECKING:
    from torch import nn

    from manyhands.run.planning import Planned, Wanted

# The share of a step in which gradients are ready to be sent: most of the backward pass.
_BACKWARD = 0.5


def plan_sync(planned: "Planned", model: "nn.Module", wanted: "Wanted", within: Link | None) -> dict[str, Any]:
    """The table of sync methods for the mode data, as JSON data.

    Args:
        planned: the job on all its processes, its network's figures, and what was found for it.
        model: the network.
        wanted: a link that it names, or else the job, leads from machine to machine, with a process on each.
        within: this machine's own link, if it was measured.

    Raises:
        UserError: the link's speed can't be read.
    """
    from manyhands.run.planning import device_of
    from manyhands.sync.choose import choose
    from manyhands.sync.costs import Case
    from manyhands.sync.explain import as_plain
    from manyhands.sync.measure import pass_seconds
    from manyhands.train.syncing import ruled_out

    job = planned.job
    link = link_between(job, wanted)
    trained = [one for one in model.parameters() if one.requires_grad]
    step_s = _timed_step(planned, alone=link is not None) if wanted.measure else _estimated_step(planned)
    case = Case(
        shapes=tuple(tuple(one.shape) for one in trained),
        item_bytes=max((one.element_size() for one in trained), default=4),
        buffers=sum(one.numel() for one in model.buffers()),
        machines=wanted.world_size,
        step_s=step_s,
        backward_s=_BACKWARD * step_s,
        link=link or within or WITHIN_A_MACHINE,
        steps=_steps(job, planned.network),
        pass_s=pass_seconds(sum(one.numel() for one in trained), device_of(job)) if wanted.measure else 0.0,
    )
    return as_plain(choose(case, job.sync, without=ruled_out(job)), case, job.sync.method)


def link_between(job: Job, wanted: "Wanted") -> Link | None:
    """The link between machines that a wish names, or else the job; None where all is on one machine.

    Raises:
        UserError: its speed can't be read.
    """
    if wanted.link:
        return named_link(wanted.link)
    return named_link(job.sync.link, "sync.link") if job.sync.link else None


def _timed_step(planned: "Planned", *, alone: bool) -> float:
    """Of one process's share; processes of one machine share its cores too."""
    import torch

    from manyhands.planner.step_time import share_seconds
    from manyhands.run.planning import device_of
    from manyhands.run.trials import case_of

    job = planned.job
    processes = job.cluster.processes
    threads = job.cluster.threads or (0 if alone else max(1, torch.get_num_threads() // processes))
    case = case_of(job, planned.network, device_of(job))
    return share_seconds(case, processes, threads, job.train.micro_batch)


def _estimated_step(planned: "Planned") -> float:
    """By the ops' times, data parallel being the first plan looked at."""
    return planned.found.options[0].prediction.compute_seconds


def _steps(job: Job, network: dict[str, Any]) -> int:
    """Updates of the whole run."""
    from manyhands.data.order import Order

    options = job.train
    order = Order(network["samples"], network["batch"], options.seed, options.drop_last)
    steps = (options.epochs - options.start_epoch) * order.steps_per_epoch
    return max(1, min(steps, options.max_steps) if options.max_steps else steps)

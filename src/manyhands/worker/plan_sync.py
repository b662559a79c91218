"""What ways of agreeing will cost a job, as its plan prices the step and the link."""

from typing import Any

from torch import nn

from manyhands.config.job import Job
from manyhands.parallel.options import USUAL_MODE
from manyhands.planner.collectives import STATISTICS
from manyhands.planner.find import LinksOf, Option
from manyhands.sync.choose import SyncChoice, choose, days_of
from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import LinkSpeed, named_link
from manyhands.sync.method import synchronizes_every_update
from manyhands.train.choose_sync import ruled_out
from manyhands.train.optimize import steps_to_make

_MB, _MBIT = 1e6, 8e-6


def plan_sync(
    job: Job, network: dict[str, Any], data: Option, links: LinksOf, *, model: nn.Module, link: LinkSpeed, pass_s: float
) -> dict[str, Any]:
    """What ways of agreeing cost in the mode data, as JSON data; allreduce as the plan of that mode is priced.

    Args:
        job: on all its processes.
        network: its figures.
        data: the plan of the mode data.
        links: of each mesh.
        model: the network.
        link: between two processes.
        pass_s: see `sync.costs.LinkCase`.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    own = links(data.mesh)
    moved_s = sum(one.seconds(own) for one in data.prediction.collectives if one.when == STATISTICS)
    case = LinkCase(
        shapes=tuple(tuple(one.shape) for one in trained),
        item_bytes=max((one.element_size() for one in trained), default=4),
        buffers=sum(one.numel() for one in model.buffers()),
        machines=job.cluster.processes,
        step_s=data.prediction.compute_seconds,
        backward_s=data.prediction.hiding_seconds,
        link=link,
        steps=steps_to_make(job.train, network["samples"]),
        pass_s=pass_s,
        layers_s=max(0.0, data.prediction.communication_seconds - moved_s),
    )
    return as_plain(choose(case, job.sync, without=ruled_out(job, USUAL_MODE)), case, job.sync.method)


def link_between(job: Job, wanted: str) -> LinkSpeed | None:
    """The link between machines that a wish names, or else the job; None where all is on one machine.

    Raises:
        UserError: its speed can't be read.
    """
    if wanted:
        return named_link(wanted)
    return named_link(job.sync.link, "sync.link") if job.sync.link else None


def as_plain(choice: SyncChoice, case: LinkCase, asked: str) -> dict[str, Any]:
    """A choice and all that it was made from, as JSON data; `asked` is the method that the job names."""
    return {
        "asked": asked,
        "machines": case.machines,
        "link_mbit_per_s": round(case.link.bytes_per_s * _MBIT, 3),
        "latency_ms": round(case.link.latency_s * 1e3, 3),
        "compute_s": case.step_s,
        "steps": case.steps,
        "reason": choice.reason,
        "methods": [
            {
                "method": cost.method,
                "codec": None if synchronizes_every_update(cost.method) else cost.codec,
                "every": cost.every,
                "delay": cost.delay,
                "step_s": cost.step_s,
                "sent_mb": cost.sent_bytes / _MB,
                "exchange_s": cost.exchange_s,
                "efficiency": case.step_s / cost.step_s,
                "days": days_of(cost, case),
                "chosen": cost == choice.chosen,
                "refused": cost.refused,
            }
            for cost in choice.costs
        ],
    }

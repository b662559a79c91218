"""The tasks of processes for plans: time updates, verify a plan, or measure the link between processes."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.core.world import World
from manyhands.parallel.plan import Plan, plan_from_plain
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.sync.measure import measure_link
from manyhands.train.data_setup import open_splits, pixels_for
from manyhands.train.loss import make_loss_fn
from manyhands.train.objects import Objects
from manyhands.train.optimize import make_optimizer
from manyhands.train.precision import make_network, sizes_of

if TYPE_CHECKING:
    from manyhands.parallel.split.graph import Graph
    from manyhands.planner.trial import PlanCase

LINKS, MEASURE, VERIFY = "links", "measure", "verify"
LINK_BUDGET_S = 5.0
_RATE = 1e-6


def network_of(job: Job, world: World | None = None, objects: Objects | None = None) -> dict[str, Any]:
    """Returns channels, size, classes, and samples in an update (batch) and in an epoch. Raises UserError: no data."""
    objects = objects or Objects()
    splits = open_splits(job, world or World(), objects)
    samples = len(splits.train)
    return {
        **sizes_of(job, splits, pixels_for(job, splits, objects)),
        "batch": min(job.train.batch, samples),
        "samples": samples,
    }


def picture(job: Job, network: dict[str, Any], device: str) -> Tensor:
    """Returns one sample with arbitrary values."""
    kind = torch.float64 if job.train.precision == "fp64" else torch.float32
    return torch.zeros(network["channels"], network["size"], network["size"], dtype=kind, device=device)


def graph_of(model: nn.Module, sample: Tensor, *, cross_entropy: bool = True) -> "Graph":
    """Returns the ops of a network in training mode with grouped BatchNorm layers."""
    from manyhands.parallel.split.tracing import describe_network

    group_batch_norms(model)
    graph = describe_network(model, sample)
    if not cross_entropy:
        graph.keep_classes()
    return graph


def norm_group(job: Job, batch: int) -> int:
    """Returns the size of BatchNorm groups; 0: all samples of a process."""
    group = job.train.norm_group
    return batch if group == "global" else group if isinstance(group, int) else 0


def case_of(job: Job, network: dict[str, Any], device: str, objects: Objects | None = None) -> "PlanCase":
    """Returns the updates of a job on random samples."""
    from manyhands.planner.trial import PlanCase

    own = objects or Objects()
    options = job.train.model_copy(update={"lr": _RATE})
    batch = network["batch"]
    return PlanCase(
        make=lambda: make_network(job, network, device),
        picture=picture(job, network, device),
        classes=network["classes"],
        batch=batch,
        loss_fn=make_loss_fn(job.train, own.loss),
        smoothing=job.train.label_smoothing,
        cross_entropy=own.loss is None and job.train.loss == "cross-entropy",
        norm_group=norm_group(job, batch),
        precision=job.train.precision,
        micro_batch=job.train.micro_batch,
        shared_memory=job.parallel.shared_memory,
        optimizer=lambda model: make_optimizer(model, options, sharded=False, own=own.optimizer),
    )


def try_out(job: Job, world: World, argument: dict[str, Any]) -> dict[str, Any]:
    """Runs `argument["action"]`; all processes must call it and return the same plain data."""
    from manyhands.planner.trial import measure, verify

    if argument["action"] == LINKS:
        return {"link": asdict(measure_link(None, world.device, LINK_BUDGET_S))}
    case = case_of(job, argument["network"], world.device)
    plans = plans_from(argument["plans"])
    if argument["action"] == VERIFY:
        proofs = {name: verify(case, plan, world).as_plain() for name, plan in plans.items() if plan is not None}
        return {"proofs": proofs}
    return {"seconds": measure(case, plans, world, argument["rounds"])}


def plans_from(plans: dict[str, Any]) -> dict[str, Plan | None]:
    """Reads plans by name from what `SearchResult.plans_of` returned; None for data parallel."""
    return {name: plan_from_plain(plan, f"plan of {name}") if plan else None for name, plan in plans.items()}

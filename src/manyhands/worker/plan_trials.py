"""The tasks of processes for plans: time updates, verify a plan, or measure the link between processes."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.models.build import build_model
from manyhands.parallel.plan import plan_from_plain
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.train.loss import make_loss_fn
from manyhands.train.objects import Objects
from manyhands.train.optimize import make_optimizer

if TYPE_CHECKING:
    from manyhands.parallel.split.graph import Graph
    from manyhands.planner.trial import PlanCase

LINKS, MEASURE, VERIFY = "links", "measure", "verify"
_BUDGET_S = 5.0
_RATE = 1e-6


def make_network(job: Job, network: dict[str, Any], device: str) -> nn.Module:
    """Creates a job's network in training mode, the same on every process.

    Args:
        job: the job.
        network: channels, size and classes of the data.
        device: the device of the network.
    """
    torch.manual_seed(derive(job.train.seed, "model"))
    options = job.model.model_copy(update={"pretrained": False, "weights": ""})
    model = build_model(options, channels=network["channels"], size=network["size"], num_classes=network["classes"])
    if job.train.precision == "fp64":
        model = model.double()
    layout = torch.channels_last if job.train.channels_last is True else torch.preserve_format
    return model.to(device, memory_format=layout).train()  # pyright: ignore[reportCallIssue] - missing in its types


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
    from manyhands.planner.links import measure_all_reduce
    from manyhands.planner.trial import measure, verify

    if argument["action"] == LINKS:
        return {"points": [list(point) for point in measure_all_reduce(world.device, budget_s=_BUDGET_S)]}
    case = case_of(job, argument["network"], world.device)
    plans = {
        name: plan_from_plain(content, f"plan of {name}") if content else None
        for name, content in argument["plans"].items()
    }
    if argument["action"] == VERIFY:
        proofs = {name: verify(case, plan, world).as_plain() for name, plan in plans.items() if plan is not None}
        return {"proofs": proofs}
    return {"seconds": measure(case, plans, world, argument["rounds"])}

"""Settles how the processes of a run agree: as the user says, as the checkpoint says, or as measurements say."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.journal import Journal
from manyhands.core.links import Link, named_link
from manyhands.core.world import World
from manyhands.parallel.network import How
from manyhands.parallel.plain import broadcast_plain
from manyhands.sync.choose import COMBINATIONS, EXACT, LOCAL, choose
from manyhands.sync.costs import Case, Cost
from manyhands.sync.measure import measure_link, pass_seconds
from manyhands.sync.options import CodecName, SyncOptions
from manyhands.train.agreeing import Agreeing, Places, hook_of, machines_of, make_agreeing, new_group, places_of

BY_MODE = Cost("allreduce", 0.0, 0.0)


@dataclass(frozen=True)
class Synced:
    """How processes agree.

    Attributes:
        cost: the method, its pace, and what was predicted of it.
        agreeing: what carries it out.
        how: what the parallel mode must know of it.
    """

    cost: Cost
    agreeing: Agreeing
    how: How


@dataclass(frozen=True)
class Wish:
    """What a decision is made from.

    Attributes:
        job: says what the user wants.
        mode: the parallel mode in force.
        steps: updates of the whole run.
        kept: what a checkpoint says was decided, or None.
        time_step: seconds of an update without agreement, and of the part in which gradients come; a collective.
    """

    job: Job
    mode: str
    steps: int
    kept: dict[str, Any] | None
    time_step: Callable[[], tuple[float, float]]


def settle(wish: Wish, model: nn.Module, unused: list[str], world: World, journal: Journal, how: How) -> Synced:
    """Decides, alike on all processes, and says so; a collective.

    Args:
        wish: what decides.
        model: equal on all processes.
        unused: its trainable parameters that never get a gradient.
        world: who takes part.
        journal: is told of the decision.
        how: what the mode must know besides.
    """
    options = wish.job.sync
    if world.alone or wish.mode != "data" or options.method == "allreduce":
        return Synced(BY_MODE, Agreeing(), how)
    if options.method == "auto" and not options.link and len(machines_of(world)) == 1:
        return Synced(BY_MODE, Agreeing(), how)  # processes of one machine talk through its memory
    _refuse(wish.job)
    places = places_of(world, wish.job)
    cost = (
        kept_cost(wish.kept, wish.job, world.size) or _said(options) or _measured(wish, model, world, places, journal)
    )
    agreeing = make_agreeing(cost, wish.job, model, unused, world, places)
    group = places.group if agreeing.alone and len(places.machine) > 1 else None
    # Where a machine has one process, or gradients are compressed by somebody else, DDP has nothing to do.
    reduces = cost.method in {"allreduce", "bf16"} or group is not None
    return Synced(cost, agreeing, replace(how, reduces=reduces, group=group, hook=hook_of(cost)))


def _refuse(job: Job) -> None:
    """Raises UserError for what doesn't go together."""
    out = ruled_out(job)
    if job.sync.method == "powersgd" and job.train.precision == "fp16":
        mend = ("--train.precision bf16", "or --sync local")
        raise UserError("powersgd doesn't go with fp16, whose gradients may overflow", "sync.method", mend)
    if job.train.norm_group == "global" and job.sync.method in out:
        mend = ("leave norm_group out", "or --sync allreduce")
        what = f"{job.sync.method} has no global batch to normalise over: each process takes its own samples"
        raise UserError(what, "train.norm_group", mend)
    if job.sync.delay > job.sync.every > 0:
        mend = (f"--set sync.delay={job.sync.every} or less",)
        what = f"an exchange every {job.sync.every} steps can't be applied {job.sync.delay} steps late"
        raise UserError(what, "sync.delay", mend)


def ruled_out(job: Job) -> dict[str, str]:
    """Methods that don't go with the rest of a job, and what of it rules them out."""
    out = dict.fromkeys(("powersgd", LOCAL), "not with a global norm_group") if job.train.norm_group == "global" else {}
    return out | ({"powersgd": "not with fp16"} if job.train.precision == "fp16" else {})


def _said(options: SyncOptions) -> Cost | None:
    """What the user has said whole, so that nothing needs to be measured."""
    if options.method in {"bf16", "powersgd"}:
        return Cost(options.method, 0.0, 0.0)
    if options.method == "local" and options.every and options.codec != "auto":
        delay = options.every if options.delay < 0 else options.delay
        return Cost("local", 0.0, 0.0, codec=options.codec, every=options.every, delay=delay)
    return None


def kept_cost(kept: Any, job: Job, processes: int) -> Cost | None:
    """What was decided before a run was stopped, unless the job or the number of processes says otherwise now.

    Args:
        kept: what the checkpoint says of it; anything, if somebody else made it.
        job: as it is now.
        processes: likewise.
    """
    if not isinstance(kept, dict) or kept.get("processes") != processes:
        return None
    try:
        cost = Cost(
            str(kept["method"]),
            float(kept["step_s"]),
            float(kept["sent_bytes"]),
            float(kept["exchange_s"]),
            _codec(kept["codec"]),
            int(kept["every"]),
            int(kept["delay"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # an older checkpoint says nothing of it
    return cost if _is_wanted(cost, job) else None


def _is_wanted(cost: Cost, job: Job) -> bool:
    options = job.sync
    if cost.method not in COMBINATIONS["data"] or cost.method in ruled_out(job):
        return False
    # allreduce that was never compared with anything says nothing of the machines that are there now.
    if options.method not in {"auto", cost.method} or (cost.method == EXACT and not cost.step_s):
        return False
    if not (cost.every >= 1 and 0 <= cost.delay <= cost.every):
        return False
    wanted = options.codec in {"auto", cost.codec} and options.every in {0, cost.every}
    late = options.delay < 0 or min(options.delay, cost.every) == cost.delay
    return cost.method != LOCAL or (wanted and late)


def _codec(word: Any) -> CodecName:
    for known in get_args(CodecName):
        if word == known:
            return known
    raise ValueError(word)


def _measured(wish: Wish, model: nn.Module, world: World, places: Places, journal: Journal) -> Cost:
    options = wish.job.sync
    step_s, backward_s = wish.time_step()
    machines = len(places.speakers)
    link = named_link(options.link, "sync.link") if options.link else _link(wish.job, world, places)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    case = Case(
        tuple(tuple(parameter.shape) for parameter in parameters),
        max((parameter.element_size() for parameter in parameters), default=4),
        sum(buffer.numel() for buffer in model.buffers()),
        machines,
        step_s,
        backward_s,
        link,
        wish.steps,
        pass_seconds(sum(parameter.numel() for parameter in parameters), world.device),
    )
    only = "" if options.method == "auto" else options.method
    choice = choose(case, options, only, ruled_out(wish.job))
    # One machine's processes have no link, and JSON no infinity.
    speed = link.bytes_per_s if math.isfinite(link.bytes_per_s) else None
    figures = {"bytes_per_s": speed, "latency_s": link.latency_s, "step_s": step_s}
    taken = choice.chosen
    pace = {"method": taken.method, "codec": taken.codec, "every": taken.every, "delay": taken.delay}
    journal.event("sync", choice.reason, 0, **figures, **pace)
    # Numbers that are equal are not enough: one process decides.
    answer = broadcast_plain(asdict(choice.chosen), world)
    return Cost(**{**answer, "codec": _codec(answer["codec"])})


def _link(job: Job, world: World, places: Places) -> Link:
    """The link between machines, as one process of each measures it; equal on all processes."""
    group: Any = new_group(job, places.speakers) if len(places.speakers) < world.size else None
    found = torch.zeros(2, dtype=torch.float32 if world.device == "mps" else torch.float64, device=world.device)
    if world.rank in places.speakers:
        link = measure_link(group, world.device)
        found[0], found[1] = link.bytes_per_s, link.latency_s
    dist.broadcast(found, src=0)
    return Link(*found.tolist())

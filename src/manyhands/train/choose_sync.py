"""Selects the gradient synchronization method: from the job, from the checkpoint, or by measurement."""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import nn

from manyhands.config.job import Job
from manyhands.core.choices import module_names
from manyhands.core.errors import UserError
from manyhands.core.needs import FINITE_GRADIENTS, OWN_STATISTICS, Need
from manyhands.core.seeds import derive_seed
from manyhands.core.world import World
from manyhands.parallel.apply import met_sync_needs
from manyhands.parallel.group.listeners import block_listeners_on_exit
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.network import ModeRequest
from manyhands.parallel.options import MODES, USUAL_MODE
from manyhands.sync.choose import BY_MODE, EXACT, check_method, choose_method
from manyhands.sync.costs import Cost, LinkCase
from manyhands.sync.link_speeds import LinkSpeed, parse_link
from manyhands.sync.options import methods, missing_need, synchronizes_every_update
from manyhands.sync.synchronizer import MachineRanks, SyncContext, Synchronizer
from manyhands.train.journal import RunContext
from manyhands.train.status import CommunicationMonitor, SpeedMonitor


def ranks_by_machine(world: World) -> list[tuple[int, ...]]:
    """Returns a list with one tuple of ranks for each machine, ordered by first rank. A collective.

    Machines may share a host name: two ranks with the same host name and local rank are on different machines.
    """
    values_by_rank = gather_plain([platform.node(), world.local_size, world.local_rank], world)
    machines: dict[tuple[Any, ...], list[int]] = {}
    for rank, (name, size, local_rank) in enumerate(values_by_rank):
        same_before = values_by_rank[:rank].count([name, size, local_rank])
        machines.setdefault((name, size, same_before), []).append(rank)
    return [tuple(machine) for machine in machines.values()]


def new_group(job: Job, ranks: Sequence[int], backend: str | None = None) -> Any:
    """Creates a process group of `ranks` with the job's timeout."""
    with block_listeners_on_exit(backend or str(dist.get_backend())):
        return dist.new_group(list(ranks), timedelta(seconds=job.cluster.peer_timeout_s), backend)


def sync_groups(world: World, job: Job) -> MachineRanks:
    """Returns the group in which this process averages every update, and each group's first rank. A collective."""
    machines, within = ranks_by_machine(world), job.sync.within
    single = within == "process" or (within == "auto" and len(machines) == 1)
    if single or len(machines) == world.size:
        return MachineRanks(tuple(range(world.size)), (world.rank,))
    groups = [new_group(job, machine) for machine in machines]  # all processes create all groups in the same order
    place = next(place for place, machine in enumerate(machines) if world.rank in machine)
    return MachineRanks(tuple(machine[0] for machine in machines), machines[place], groups[place])


def make_synchronizer(
    cost: Cost, job: Job, model: nn.Module, unused: list[str], world: World, ranks: MachineRanks, steps: int = 0
) -> Synchronizer:
    """Creates the synchronizer of `cost.method`. `model` must be equal on all processes. A collective."""
    if world.alone:
        return Synchronizer()
    # Background exchanges use gloo instead of a second NCCL communicator: threads start them in a different order on
    # each process, and NCCL deadlocks if the kernels of two communicators start in different orders.
    beside = "gloo" if "nccl" in world.backend and dist.is_gloo_available() else None
    context = SyncContext(
        world,
        ranks,
        new_group=lambda ranks: new_group(job, ranks, beside),
        from_rank_0=lambda number: broadcast_plain(number, world),
        seed=derive_seed(job.train.seed, "sync"),
        unused=unused,
        steps=steps,
    )
    return methods()[cost.method].make(model, context, job.sync, cost)


def values_by_rank(synchronizer: Synchronizer, value: Any, world: World) -> dict[int, Any]:
    """Returns `value` of each process, by rank. A collective of the processes that have the same gradients."""
    if not synchronizer.alone:
        return dict(enumerate(gather_plain(value, world)))
    if (group := synchronizer.group) is None:
        return {world.rank: value}
    return dict(zip(dist.get_process_group_ranks(group), gather_plain(value, world, group), strict=True))


@dataclass
class ChosenSync:
    """The result of `select_sync`: the selected sync method and its synchronizer."""

    cost: Cost  # the method, its pace, and its predicted cost
    synchronizer: Synchronizer  # carries out the method
    mode_request: ModeRequest  # the parallel mode's settings, including those of the method
    monitor: SpeedMonitor | CommunicationMonitor | None = None  # None if the mode itself averages on one machine


@dataclass(frozen=True)
class SyncRequest:
    """The inputs of `select_sync`."""

    run: RunContext
    model: nn.Module  # the network, equal on all processes
    unused: list[str]  # names of trainable parameters that never get a gradient
    steps: int  # updates of the entire run
    previous: Any  # the sync record in the checkpoint, or None
    time_step: Callable[[], tuple[float, float]]  # see `trial_step.time_step`

    def link_case(self, taken_s: tuple[float, float], ranks: MachineRanks) -> LinkCase:
        """Measures the link. Returns the inputs of the cost model. `taken_s`: result of `time_step`. A collective."""
        from manyhands.sync.measure import pass_seconds

        job, world = self.run.job, self.run.world
        link = parse_link(job.sync.link, "sync.link") if job.sync.link else _measure_link(job, world, ranks)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return LinkCase(
            tuple(tuple(parameter.shape) for parameter in parameters),
            max((parameter.element_size() for parameter in parameters), default=4),
            sum(buffer.numel() for buffer in self.model.buffers()),
            len(ranks.leaders),
            *taken_s,
            link,
            self.steps,
            pass_seconds(sum(parameter.numel() for parameter in parameters), world.device),
        )


def select_sync(sync_request: SyncRequest, request: ModeRequest) -> ChosenSync:
    """Selects the sync method of a run, and adds it to `request`, the settings of the mode. A collective."""
    run = sync_request.run
    job, mode, world = run.job, run.mode, run.world
    by_mode, exact = ChosenSync(BY_MODE, Synchronizer(), request), job.sync.method == EXACT
    if world.alone or not has_sync_choice(mode):
        return by_mode
    if (exact or job.sync.is_auto) and not job.sync.link and len(ranks_by_machine(world)) == 1:
        return by_mode  # processes of one machine communicate through its memory
    if exact:
        without, compute_s = ruled_out(job, mode), 0.0 if world.device == "cpu" else sync_request.time_step()[0]
        by_mode.monitor = CommunicationMonitor(
            lambda step_s: sync_request.link_case((step_s, 0.0), sync_groups(world, job)), run, without, compute_s
        )
        return by_mode
    named = _requested_sync(job, mode)
    ranks = sync_groups(world, job)
    cost = previous_cost(sync_request.previous, job, world.size, mode) or named or _fastest_sync(sync_request, ranks)
    made = make_synchronizer(cost, job, sync_request.model, sync_request.unused, world, ranks, sync_request.steps)
    return ChosenSync(cost, made, replace(request, reduces=made.reduces, group=made.group, hook=made.hook))


def check_sync_and_mode(method: str, mode: str) -> None:
    """Raises UserError if the sync method doesn't exist or can't be combined with the parallel mode."""
    check_method(method)
    need = missing_need(method, _needs_met(None, mode)) if method in methods() else None
    if need:
        taking = [name for name in (USUAL_MODE, *module_names(MODES)) if need in met_sync_needs(name)]
        what = f"the parallel mode {mode} can't be combined with --sync {method}, which {need.reason}"
        hints = (f"set --parallel {taking[0]}", f"or set --sync {EXACT}") if taking else (f"set --sync {EXACT}",)
        raise UserError(what, "sync.method", hints)


def _needs_met(job: Job | None, mode: str) -> set[Need]:
    """Returns those requirements of sync methods that the parallel mode and the job's options both meet."""
    lacking = {OWN_STATISTICS} if job and job.train.norm_group == "global" else set[Need]()
    lacking |= {FINITE_GRADIENTS} if job and job.train.precision == "fp16" else set[Need]()
    return ({*met_sync_needs(mode)} | {OWN_STATISTICS, FINITE_GRADIENTS}) - lacking


def has_sync_choice(mode: str) -> bool:
    """Returns True for modes with more than one possible sync method."""
    return any(not missing_need(name, _needs_met(None, mode)) for name in methods() if name != EXACT)


def _requested_sync(job: Job, mode: str) -> Cost | None:
    """Returns the sync method that the job names, None for auto. Raises UserError if other options contradict it."""
    method = job.sync.method
    if method not in methods():
        for name in methods():
            if not synchronizes_every_update(name):
                methods()[name].requested_cost(job.sync)
        return None
    need = missing_need(method, _needs_met(job, mode))
    if need:
        raise UserError(f"--sync {method} {need.reason}", need.option, (*need.hints, f"or choose --sync {EXACT}"))
    return Cost(method, 0.0, 0.0) if synchronizes_every_update(method) else methods()[method].requested_cost(job.sync)


def ruled_out(job: Job, mode: str) -> dict[str, str]:
    """Returns a dict from each sync method that can't be used with this job and mode to the reason."""
    offers = _needs_met(job, mode)
    return {name: need.short or need.reason for name in methods() if (need := missing_need(name, offers))}


def previous_cost(record: Any, job: Job, processes: int, mode: str = USUAL_MODE) -> Cost | None:
    """Parses a checkpoint's `record` of the sync method. Returns None if the record doesn't fit this run."""
    names = {one.name for one in fields(Cost)}
    if not isinstance(record, dict) or record.get("processes") != processes or not names <= record.keys():
        return None  # older checkpoints have incomplete records
    try:
        cost = TypeAdapter(Cost).validate_python({name: record[name] for name in names})
    except ValidationError:
        return None
    options, possible = job.sync, cost.method in methods() and not missing_need(cost.method, _needs_met(job, mode))
    # A recorded allreduce without a predicted time was never compared with other methods.
    asked = (options.is_auto or options.method == cost.method) and (cost.method != EXACT or cost.step_s)
    if not (possible and asked and cost.every >= 1 and 0 <= cost.delay <= cost.every):
        return None
    return cost if synchronizes_every_update(cost.method) or methods()[cost.method].allows_cost(cost, options) else None


def _fastest_sync(sync_request: SyncRequest, ranks: MachineRanks) -> Cost:
    """Selects the fastest sync method from measurements of the link and the model. A collective."""
    options, world = sync_request.run.job.sync, sync_request.run.world
    case = sync_request.link_case(sync_request.time_step(), ranks)
    without = ruled_out(sync_request.run.job, sync_request.run.mode)
    choice = choose_method(case, options, "" if options.is_auto else options.method, without)
    # The speed within one machine is infinite, which JSON can't express.
    speed = case.link.bytes_per_s if math.isfinite(case.link.bytes_per_s) else None
    taken, figures = asdict(choice.chosen), {"latency_s": case.link.latency_s, "step_s": case.step_s}
    figures |= {name: taken[name] for name in ("method", "codec", "every", "delay")}
    sync_request.run.journal.event("sync", choice.reason, 0, bytes_per_s=speed, **figures)
    # Rank 0 decides, because the costs may differ in the last bits between processes.
    return Cost(**broadcast_plain(taken, world))


def _measure_link(job: Job, world: World, ranks: MachineRanks) -> LinkSpeed:
    """Measures the speed of the link between machines, with one process per machine. A collective."""
    group: Any = new_group(job, ranks.leaders) if len(ranks.leaders) < world.size else None
    link = LinkSpeed(0.0, 0.0)
    if world.rank in ranks.leaders:
        from manyhands.sync.measure import measure_link

        link = measure_link(group, world.device)
    return LinkSpeed(*broadcast_plain([link.bytes_per_s, link.latency_s], world))

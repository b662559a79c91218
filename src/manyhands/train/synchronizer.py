"""Who agrees with whom in a run, and what carries the sync method out."""

import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from manyhands.config.job import Job
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.parallel.close_listeners import closed_once_formed
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.sync.costs import Cost
from manyhands.sync.method import methods
from manyhands.sync.synchronizer import Places, SyncContext, Synchronizer


def machines_of(world: World) -> list[tuple[int, ...]]:
    """Ranks of each machine's processes, by their first; a collective.

    Launchers may deal ranks to machines in turns, and machines may share one name (raspberrypi). Each has one process
    of each local rank, so the second of a name with the same local rank is on the second machine of that name.
    """
    values_by_rank = gather_plain([platform.node(), world.local_size, world.local_rank], world)
    machines: dict[tuple[Any, ...], list[int]] = {}
    for rank, (name, size, local_rank) in enumerate(values_by_rank):
        before = values_by_rank[:rank].count([name, size, local_rank])
        machines.setdefault((name, size, before), []).append(rank)
    return [tuple(machine) for machine in machines.values()]


def new_group(job: Job, ranks: Sequence[int], backend: str | None = None) -> Any:
    """Some processes' group; torch would let it wait for a silent peer longer than the job says."""
    with closed_once_formed(backend or str(dist.get_backend())):
        return dist.new_group(list(ranks), timedelta(seconds=job.cluster.peer_timeout_s), backend)


def _beside(world: World) -> str | None:
    """What exchanges beside training go through: never a second communicator of NCCL.

    A thread begins them at another moment on each process, and NCCL's own wait for each other for ever where two
    communicators' kernels don't begin in one order on all cards.
    """
    return "gloo" if "nccl" in world.backend and dist.is_gloo_available() else None


def places_of(world: World, job: Job) -> Places:
    """Finds who averages in every update and who leads them; a collective.

    Args:
        world: who takes part.
        job: of sync.within: auto takes machines together if there are several and one has several processes.
    """
    machines, within = machines_of(world), job.sync.within
    single = within == "process" or (within == "auto" and len(machines) == 1)
    if single or len(machines) == world.size:
        return Places(tuple(range(world.size)), (world.rank,))
    # Every process makes all groups, in one order, as torch asks.
    groups = [new_group(job, machine) for machine in machines]
    place = next(place for place, machine in enumerate(machines) if world.rank in machine)
    return Places(tuple(machine[0] for machine in machines), machines[place], groups[place])


def make_synchronizer(
    cost: Cost, job: Job, model: nn.Module, unused: list[str], world: World, places: Places, steps: int = 0
) -> Synchronizer:
    """What carries out a method for a network that is equal on all processes; a collective.

    Args:
        cost: the method, with its pace and codec where it has them.
        job: says the rest.
        model: the network.
        unused: names of trainable parameters that got no gradient when the network was tried.
        world: who takes part.
        places: who belongs together.
        steps: updates of the whole run.
    """
    if world.alone:
        return Synchronizer()
    context = SyncContext(
        world,
        places,
        new_group=lambda ranks: new_group(job, ranks, _beside(world)),
        from_rank_0=lambda number: broadcast_plain(number, world),
        seed=derive(job.train.seed, "sync"),
        unused=unused,
        steps=steps,
    )
    return methods()[cost.method].make(model, context, job.sync, cost)


def values_by_rank(synchronizer: Synchronizer, value: Any, world: World) -> dict[int, Any]:
    """By rank, what each process says that updates with the same gradients as this one; a collective of these."""
    if not synchronizer.alone:
        return dict(enumerate(gather_plain(value, world)))
    group = synchronizer.group
    if group is None:
        return {world.rank: value}
    return dict(zip(dist.get_process_group_ranks(group), gather_plain(value, world, group), strict=True))

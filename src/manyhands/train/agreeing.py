"""How the processes of a run agree: by the parallel mode itself, on compressed gradients, or now and then (local)."""

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.parallel.plain import gather_plain
from manyhands.sync.buffers import Buffers, Machine
from manyhands.sync.compress import compressor_named, compute_alike
from manyhands.sync.costs import Cost
from manyhands.sync.local import LocalSteps, Pace
from manyhands.sync.options import SyncOptions
from manyhands.sync.powersgd import PowerSgd
from manyhands.sync.talk import Peers
from manyhands.sync.vector import dtype_of

# Of what is kept with factors: counted up when its names, its batches or their order change, so that what another
# version of this program has kept is left and said.
FACTORS_FORMAT = 3


class Agreeing:
    """What a training step and the loop ask of a sync method; here for methods that the mode carries out by itself.

    Attributes:
        alone: True when processes train apart from each other between agreements.
        own_statistics: True when each process's BatchNorm normalises its own samples and keeps its own statistics.
        timed: tells how long this process has waited for others; None where the mode waits.
        own: where each process has something that only it has, which `state` gives: what that goes with (method,
            codec, who speaks …), as JSON data; else empty.
    """

    alone = False
    own_statistics = False
    timed: LocalSteps | PowerSgd | None = None
    own: Mapping[str, Any] = MappingProxyType({})

    def before_update(self, step: int) -> None:
        """`step` updates have been made, and everything that follows the last one has been done."""

    def before_last_pass(self) -> None:
        """The backward pass that comes next is the update's last one."""

    def on_gradients(self) -> None:
        """An update's gradients are there."""

    def after_update(self, step: int) -> None:
        """`step` updates have been made."""

    def finish(self, step: int) -> None:
        """Leaves all processes with one network, at the end of training; a collective."""

    def agree_on_buffers(self, step: int) -> None:
        """Makes ready for `agreed`, once `step` updates have been made; a collective."""

    def agreed(self) -> AbstractContextManager[None]:
        """Has the network be the one that all processes have agreed on."""
        return contextlib.nullcontext()

    def told(self, value: Any, world: World) -> dict[int, Any]:
        """By rank, what each process says that updates with the same gradients as this one; a collective of these."""
        return dict(enumerate(gather_plain(value, world)))

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        """What must be equal on all processes."""
        return dict(model.state_dict())

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """What this process alone has, which the next updates depend on; None where there is no such thing."""
        return None

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Takes back what `state` gave, once the network is the agreed one."""

    def close(self) -> None:
        """Gives back what is under way."""

    def begin(self) -> None:
        """Takes the network, which is equal everywhere, as agreed."""


class OnLowRankGradients(Agreeing):
    """Gradients of low rank, in every update."""

    own_statistics = True

    def __init__(self, power: PowerSgd, buffers: Buffers, own: Mapping[str, Any]) -> None:
        self._power, self._buffers, self.own = power, buffers, own
        self.timed = power

    def before_last_pass(self) -> None:
        """Gradients leave as they come."""
        self._power.expect()

    def on_gradients(self) -> None:
        """Replaces them by the agreed mean."""
        self._power.agree()

    def finish(self, step: int) -> None:
        """The mean of BatchNorm's statistics."""
        self._buffers.agree(step)
        self._buffers.write(self._buffers.agreed)

    def agree_on_buffers(self, step: int) -> None:
        """Likewise."""
        self._buffers.agree(step)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """The agreed statistics in place of this process's own."""
        own = self._buffers.own()
        self._buffers.write(self._buffers.agreed)
        try:
            yield
        finally:
            self._buffers.write(own)

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        """All parameters."""
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What is held back, and this process's own statistics."""
        return {**self._power.state(), "buffers": self._buffers.own()}, {}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:  # noqa: ARG002 - none here
        """Takes them back."""
        mine = dict(tensors)
        self._buffers.write(mine.pop("buffers"))
        self._power.load(mine)

    def close(self) -> None:
        """Ends the thread that sends."""
        self._power.close()

    def begin(self) -> None:
        """Starts from the network as it is."""
        self._buffers.begin()


class NowAndThen(Agreeing):
    """Local steps."""

    alone = True
    own_statistics = True

    def __init__(self, steps: LocalSteps, own: Mapping[str, Any]) -> None:
        self.steps, self.own = steps, own
        self.timed = steps

    def before_update(self, step: int) -> None:
        """Begins an exchange."""
        self.steps.before_update(step)

    def after_update(self, step: int) -> None:
        """Applies one."""
        self.steps.after_update(step)

    def finish(self, step: int) -> None:
        """A last exchange that all wait for."""
        self.steps.finish(step)

    def agree_on_buffers(self, step: int) -> None:
        """The mean of BatchNorm's statistics."""
        self.steps.agree_on_buffers(step)

    def agreed(self) -> AbstractContextManager[None]:
        """The agreed point in place of this process's own."""
        return self.steps.agreed()

    def told(self, value: Any, world: World) -> dict[int, Any]:
        """Of this process's machine, since the others know nothing of its gradients."""
        machine = self.steps.machine
        if machine is None:
            return {world.rank: value}
        return dict(
            zip(dist.get_process_group_ranks(machine.group), gather_plain(value, world, machine.group), strict=True)
        )

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        """The agreed point, and what isn't trained."""
        frozen = {name: one.detach() for name, one in model.named_parameters() if not one.requires_grad}
        return {"the agreed parameters": self.steps.anchor, **frozen}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """This process's own point, what is held back, and an exchange under way."""
        return self.steps.state()

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Takes them back; an exchange under way begins again."""
        self.steps.load(tensors, numbers)

    def close(self) -> None:
        """Waits for an exchange under way and drops it."""
        self.steps.close()

    def begin(self) -> None:
        """Starts from the network as it is."""
        self.steps.begin()


@dataclass(frozen=True)
class Places:
    """Which processes belong together.

    Attributes:
        speakers: ranks of the process of each machine that speaks for it.
        machine: ranks of this process's machine.
        group: of this process's machine, where it has several processes.
    """

    speakers: tuple[int, ...]
    machine: tuple[int, ...]
    group: Any = None


def machines_of(world: World) -> list[tuple[int, ...]]:
    """Ranks of each machine's processes, by their first; a collective.

    Launchers may deal ranks to machines in turns, and machines may share one name (raspberrypi). Each has one process
    of each local rank, so the second of a name with the same local rank is on the second machine of that name.
    """
    told = gather_plain([platform.node(), world.local_size, world.local_rank], world)
    machines: dict[tuple[Any, ...], list[int]] = {}
    for rank, (name, size, local_rank) in enumerate(told):
        before = told[:rank].count([name, size, local_rank])
        machines.setdefault((name, size, before), []).append(rank)
    return [tuple(machine) for machine in machines.values()]


def new_group(job: Job, ranks: Sequence[int]) -> Any:
    """Some processes' group; torch would let it wait for a silent peer longer than the job says."""
    return dist.new_group(list(ranks), timeout=timedelta(seconds=job.cluster.collective_timeout_s))


def places_of(world: World, job: Job) -> Places:
    """Finds who agrees in every step and who speaks for them; a collective.

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


def make_agreeing(cost: Cost, job: Job, model: nn.Module, unused: list[str], world: World, places: Places) -> Agreeing:
    """What carries out a method for a network that is equal on all processes; a collective.

    Args:
        cost: the method, and for `local` its pace and codec.
        job: says the rest.
        model: the network.
        unused: names of trainable parameters that got no gradient when the network was tried.
        world: who takes part.
        places: who belongs together.
    """
    if cost.method not in {"powersgd", "local"} or world.alone:
        return Agreeing()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    speakers = places.speakers
    # A group of its own, so that an exchange under way never mixes with other collectives.
    group = new_group(job, speakers)
    place = speakers.index(world.rank) if world.rank in speakers else 0
    peers, seed, options = Peers(place, len(speakers), group), derive(job.train.seed, "sync"), job.sync
    rank = options.rank if cost.method == "powersgd" or cost.codec == "lowrank" else 0
    own = {
        "method": cost.method,
        "codec": cost.codec,
        "rank": rank,
        "speakers": list(speakers),
        "values": sum(one.numel() for one in trained),
        **({"format of factors": FACTORS_FORMAT} if rank else {}),
    }
    machine = None
    if places.group is not None:  # of one process too, where another machine has several
        machine = Machine(places.group, places.machine[0], len(places.machine), world.rank == places.machine[0])
    shared = Buffers(list(model.buffers()), peers, machine, world.device)
    if cost.method == "powersgd":
        rare = [named[name] for name in unused]
        power = PowerSgd(trained, peers, options.rank, seed, rare, machine=machine, processes=world.size)
        return OnLowRankGradients(power, shared, own)
    shapes = [tuple(parameter.shape) for parameter in trained]
    kind = dtype_of(trained)
    compressor = compressor_named(cost.codec, shapes, rank=options.rank, seed=seed, device=world.device, dtype=kind)
    if world.rank in speakers:
        compute_alike([compressor], peers, torch.zeros(0, dtype=kind, device=world.device))
    weight = len(places.machine) * len(speakers) / world.size
    steps = LocalSteps(trained, shared, peers, compressor, pace_of(cost, options), weight, machine)
    return NowAndThen(steps, own)


def pace_of(cost: Cost, options: SyncOptions) -> Pace:
    """How often, and by which outer step."""
    return Pace(cost.every, cost.delay, options.outer_lr, options.outer_momentum)


def hook_of(cost: Cost) -> Any:
    """What DDP does with its gradients instead of a plain mean; None for that."""
    if cost.method != "bf16":
        return None
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook

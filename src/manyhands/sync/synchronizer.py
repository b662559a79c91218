"""What carries a sync method out around each update, and who takes part in it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.needs import HasGradients
from manyhands.core.world import World
from manyhands.sync.buffers import Buffers, LocalGroup, dtype_of
from manyhands.sync.costs import Cost
from manyhands.sync.talk import SyncGroup

# Of what is kept with factors: counted up when its names, its batches or their order change, so that what another
# version of this program has kept is left and said.
FACTORS_FORMAT = 3


@dataclass(frozen=True)
class Places:
    """Which processes belong together."""

    leaders: tuple[int, ...]  # ranks of each machine's leader, the process that exchanges for it
    machine: tuple[int, ...]  # ranks of this process's machine
    group: Any = None  # of this process's machine, where it has several processes


@dataclass(frozen=True)
class SyncContext:
    """Who takes part, as a method's `make` must know it."""

    world: World  # all processes
    places: Places  # which of them belong together
    new_group: Callable[[Sequence[int]], Any]  # for exchanges between some ranks beside training; a collective
    from_rank_0: Callable[[float], float]  # rank 0's number, on all processes; a collective
    seed: int  # equal everywhere
    unused: Sequence[str] = ()  # names of trainable parameters that got no gradient when the network was tried
    steps: int = 0  # updates of the whole run

    @property
    def is_leader(self) -> bool:
        """True on the processes that speak for a machine."""
        return self.world.rank in self.places.leaders

    def peers(self) -> SyncGroup:
        """Those who agree, in a group of their own, so that an exchange never mixes with other collectives."""
        leaders = self.places.leaders
        group = self.new_group(leaders)
        return SyncGroup(leaders.index(self.world.rank) if self.is_leader else 0, len(leaders), group)

    def machine(self) -> LocalGroup | None:
        """This process's machine, where some machine has several processes that go together."""
        places = self.places
        if places.group is None:
            return None
        return LocalGroup(places.group, places.machine[0], len(places.machine), self.world.rank == places.machine[0])

    def own(self, cost: Cost, trained: Sequence[Tensor], rank: int = 0) -> dict[str, Any]:
        """What the things go with that only one process has: a run takes them back where all of this is the same."""
        return {
            "method": cost.method,
            "codec": cost.codec,
            "rank": rank,
            "speakers": list(self.places.leaders),
            "values": sum(one.numel() for one in trained),
            **({"format of factors": FACTORS_FORMAT} if rank else {}),
        }


def trained_of(network: HasGradients) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


class Timed(Protocol):
    """What is waited for."""

    waited_s: float  # time that training stood still for others
    exchange_s: float  # how long the last exchange beside training took; 0 where there is none


class Synchronizer:
    """What a training step and the loop ask of a sync method; here for methods that the mode carries out by itself."""

    reduces = True  # True when the mode averages gradients
    group: Any = None  # the processes that it averages them over; None: all
    hook: Any = None  # what the mode does with gradients instead of a plain mean; None for that
    alone = False  # True when processes train apart from each other between agreements
    local_statistics = (
        False  # True when each process's BatchNorm normalises its own samples and keeps its own statistics
    )
    timed: Timed | None = None  # tells how long this process has waited for others; None where the mode waits
    # where each process has something that only it has, which `state` gives: what that goes with (method, codec, who
    # leads …), as JSON data; else empty
    own: Mapping[str, Any] = MappingProxyType({})

    def before_update(self, step: int) -> None:
        """`step` updates have been made, and everything that follows the last one has been done."""

    def before_last_micro_batch(self) -> None:
        """The backward pass that comes next is the update's last one."""

    def on_gradients(self) -> None: ...

    def after_update(self, step: int) -> None:
        """`step` updates have been made."""

    def forget(self) -> str:
        """Gives up what came of an update's gradients that aren't finite; what that costs besides, for the user."""
        return ""

    def adapt_pace(self, speeds_s: Sequence[float], exchanges_s: Sequence[float]) -> Cost | None:
        """Suits the pace to all processes' seconds of a step, and of an exchange (0: none); the new one, if any."""

    def finish(self, step: int) -> None:
        """Leaves all processes with one network, at the end of training; a collective."""

    def average_buffers(self, step: int) -> None:
        """Makes ready for `averaged`, once `step` updates have been made; a collective."""

    def averaged(self) -> AbstractContextManager[None]:
        """Has the network be the one that all processes have agreed on."""
        return contextlib.nullcontext()

    def added_up(self, value: Tensor, world: World) -> Tensor:
        """The sum [] of what processes with the same gradients give, as if all had: a collective of these."""
        if world.alone:
            return value
        if not self.alone:
            dist.all_reduce(value)
            return value
        if self.group is None:
            return value * world.size
        dist.all_reduce(value, group=self.group)
        return value * (world.size / dist.get_world_size(self.group))

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        """What must be equal on all processes."""
        return {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """What this process alone has, which the next updates depend on; None where there is no such thing."""
        return None

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None: ...

    def close(self) -> None:
        """Gives back what is under way."""

    def begin(self) -> None:
        """Takes the network, which is equal everywhere, as agreed."""


def buffers_of(network: HasGradients, peers: SyncGroup, machine: LocalGroup | None, device: str) -> Buffers:
    """The network's buffers, of which each process has its own."""
    return Buffers(list(network.buffers()), peers, machine, device)


def nothing_like(tensors: Sequence[Tensor], device: str) -> Tensor:
    """No values [0], of the type and device of what is sent."""
    return torch.zeros(0, dtype=dtype_of(tensors), device=device)

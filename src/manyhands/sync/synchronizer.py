"""The interface of a sync method in training, the processes that take part, and the averaging of buffers."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.needs import HasGradients
from manyhands.core.world import World

if TYPE_CHECKING:
    from manyhands.sync.costs import Cost
    from manyhands.sync.exchange import SyncGroup

# The version of a state with factors: counted up when its names, its batches or their order change.
FACTORS_FORMAT = 3


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of tensors as one vector: double precision if one of them is, else single."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def as_vector(tensors: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """All values in the order of the tensors' indices, whatever their memory format, [n]; a copy, in `out` if given."""
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors], out=out)


def write_vector(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, piece in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def add_vector(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, piece in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.add_(piece.view(tensor.shape).to(tensor.dtype))


@dataclass(frozen=True)
class LocalGroup:
    """Processes that are equal in every step by other means, of which one leads."""

    group: Any  # their process group
    leader: int  # the rank, among all processes of the run, of the one that leads
    size: int  # how many they are
    is_leader: bool  # True on that process


class Buffers:
    """The buffers of a network, in an order that is equal everywhere, and their mean over all processes.

    Peers are one process of each machine. `averaged` is the mean [n] of the last agreement.
    """

    def __init__(
        self, buffers: Sequence[Tensor], peers: "SyncGroup", machine: LocalGroup | None = None, device: str = "cpu"
    ) -> None:
        floating = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._buffers = floating or [torch.zeros(0, device=device)]
        self._peers, self._machine, self._dtype = peers, machine, dtype_of(self._buffers)
        self.begin()

    def begin(self) -> None:
        """Takes the buffers, which are equal everywhere, as agreed."""
        self.averaged, self._step = self.own(), -1

    def own(self) -> Tensor:
        return as_vector(self._buffers, self._dtype)

    def write(self, values: Tensor) -> None:
        write_vector(values, self._buffers)

    def average(self, step: int) -> None:
        """Averages once in each step; a collective."""
        if step == self._step:
            return
        mean, machine = self.own(), self._machine
        if machine:
            dist.all_reduce(mean, group=machine.group)
            mean /= machine.size
        if machine is None or machine.is_leader:
            from manyhands.sync.codecs import Plain
            from manyhands.sync.exchange import drive, mean_of

            mean, _ = drive(mean_of(mean, Plain(self._dtype), self._peers))
        if machine:
            dist.broadcast(mean, machine.leader, group=machine.group)
        self.averaged, self._step = mean, step


@dataclass(frozen=True)
class Places:
    """The processes of each machine."""

    leaders: tuple[int, ...]  # ranks of each machine's leader, the process that exchanges for it
    machine: tuple[int, ...]  # ranks of this process's machine
    group: Any = None  # of this process's machine, where it has several processes


@dataclass(frozen=True)
class SyncContext:
    """The processes of a run and their setting, for a method's `make`."""

    world: World  # all processes
    places: Places  # which of them belong together
    new_group: Callable[[Sequence[int]], Any]  # for exchanges between some ranks beside training; a collective
    from_rank_0: Callable[[float], float]  # rank 0's number, on all processes; a collective
    seed: int  # equal everywhere
    unused: Sequence[str] = ()  # names of trainable parameters that got no gradient when the network was tried
    steps: int = 0  # updates of the whole run

    @property
    def is_leader(self) -> bool:
        return self.world.rank in self.places.leaders

    def peers(self) -> "SyncGroup":
        """The leaders, in a group of their own, so that an exchange never mixes with other collectives."""
        from manyhands.sync.exchange import SyncGroup

        leaders = self.places.leaders
        group = self.new_group(leaders)
        return SyncGroup(leaders.index(self.world.rank) if self.is_leader else 0, len(leaders), group)

    def machine(self) -> LocalGroup | None:
        """This process's machine, if a machine has several processes that go together."""
        places = self.places
        if places.group is None:
            return None
        return LocalGroup(places.group, places.machine[0], len(places.machine), self.world.rank == places.machine[0])

    def own(self, cost: "Cost", trained: Sequence[Tensor], rank: int = 0) -> dict[str, Any]:
        """What a process's own state depends on; a run restores it if all of this is the same."""
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
    """An exchange whose waiting time is recorded."""

    waited_s: float  # time that training stood still for others
    exchange_s: float  # how long the last exchange beside training took; 0 where there is none


class Synchronizer:
    """The sync method as a training step and the loop use it; here for methods that the mode carries out itself."""

    reduces = True  # True when the mode averages gradients
    group: Any = None  # the processes that it averages them over; None: all
    hook: Any = None  # what the mode does with gradients instead of a plain mean; None for that
    alone = False  # True when processes train apart from each other between agreements
    local_statistics = False  # True if each process's BatchNorm uses its own samples and keeps its own statistics
    timed: Timed | None = None  # tells how long this process has waited for others; None where the mode waits
    # if each process has a `state` of its own: what it depends on (method, codec, leaders …), as JSON data; else empty
    own: Mapping[str, Any] = MappingProxyType({})

    def before_update(self, step: int) -> None:
        """`step` updates have been made, and everything that follows the last one has been done."""

    def before_last_micro_batch(self) -> None:
        """The next backward pass is the update's last one."""

    def on_gradients(self) -> None: ...

    def after_update(self, step: int) -> None:
        """`step` updates have been made."""

    def forget(self) -> str:
        """Drops the effects of gradients that aren't finite; returns what that costs, for the user."""
        return ""

    def adapt_pace(self, speeds_s: Sequence[float], exchanges_s: Sequence[float]) -> "Cost | None":
        """Adapts the pace to all processes' seconds of a step and of an exchange (0: none); returns a new one."""

    def finish(self, step: int) -> None:
        """Leaves all processes with one network, at the end of training; a collective."""

    def average_buffers(self, step: int) -> None:
        """Prepares `averaged`, once `step` updates have been made; a collective."""

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the network is the one that all processes have agreed on."""
        return contextlib.nullcontext()

    def added_up(self, value: Tensor, world: World) -> Tensor:
        """The sum [] of the values of processes with the same gradients, as if all had them; a collective."""
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
        """The tensors that must be equal on all processes."""
        return {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """The state of this process alone on which the next updates depend; None if there is none."""
        return None

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None: ...

    def close(self) -> None:
        """Ends what is in progress."""

    def begin(self) -> None:
        """Takes the network, which is equal everywhere, as agreed."""

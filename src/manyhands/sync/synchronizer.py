"""The interface of sync methods in training, their processes, and the averaging of buffers."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.needs import HasGradients
from manyhands.core.world import World

if TYPE_CHECKING:
    from manyhands.sync.costs import Cost
    from manyhands.sync.exchange import SyncGroup

# Version of a saved state with factors: increased when its names, its batches or their order change.
FACTORS_FORMAT = 3


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """Returns float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def as_vector(tensors: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Copies all values to a vector [n] (`out` if given), in the order of indices, whatever the memory format."""
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
    """The processes of one machine, which average in every step. Their leader exchanges with other machines."""

    group: Any  # their process group
    leader: int  # the leader's rank in the run
    size: int  # number of processes
    is_leader: bool  # True on the leader


class Buffers:
    """A network's floating-point buffers, in the same order on all processes. `averaged`: their last mean [n]."""

    def __init__(
        self, buffers: Sequence[Tensor], peers: "SyncGroup", machine: LocalGroup | None = None, device: str = "cpu"
    ) -> None:
        floating = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._buffers = floating or [torch.zeros(0, device=device)]
        self._peers, self._machine, self._dtype = peers, machine, dtype_of(self._buffers)
        self.begin()

    def begin(self) -> None:
        """Sets `averaged` to the current buffers, which must be equal on all processes."""
        self.averaged, self._step = self.local_values(), -1

    def local_values(self) -> Tensor:
        return as_vector(self._buffers, self._dtype)

    def write(self, values: Tensor) -> None:
        write_vector(values, self._buffers)

    def average(self, step: int) -> None:
        """Sets `averaged` to the mean of all processes' buffers, at most once per step. A collective."""
        if step == self._step:
            return
        mean, machine = self.local_values(), self._machine
        if machine:
            dist.all_reduce(mean, group=machine.group)
            mean /= machine.size
        if machine is None or machine.is_leader:
            from manyhands.sync.exchange import FloatCodec, average_vector, run_exchange

            mean, _ = run_exchange(average_vector(mean, FloatCodec(self._dtype), self._peers))
        if machine:
            dist.broadcast(mean, machine.leader, group=machine.group)
        self.averaged, self._step = mean, step


@dataclass(frozen=True)
class MachineRanks:
    """The ranks on this machine, and the ranks that exchange with each other (leaders)."""

    leaders: tuple[int, ...]  # one rank per machine, or with sync.within = process all ranks
    machine: tuple[int, ...]  # ranks on this machine
    group: Any = None  # process group of this machine; None for one process


@dataclass(frozen=True)
class SyncContext:
    """The input of a sync method's `make`: processes of the run, functions that communicate, and the seed."""

    world: World  # all processes
    machine_ranks: MachineRanks  # the processes by machine
    new_group: Callable[[Sequence[int]], Any]  # creates a group for exchanges during training; a collective
    from_rank_0: Callable[[float], float]  # broadcasts rank 0's number; a collective
    seed: int  # equal on all processes
    unused: Sequence[str] = ()  # names of trainable parameters without a gradient in the trial step
    steps: int = 0  # updates of the entire run

    @property
    def is_leader(self) -> bool:
        return self.world.rank in self.machine_ranks.leaders

    def peers(self) -> "SyncGroup":
        """Creates a process group of the leaders (see `MachineRanks`). All processes must call this."""
        from manyhands.sync.exchange import SyncGroup

        leaders = self.machine_ranks.leaders
        group = self.new_group(leaders)
        return SyncGroup(leaders.index(self.world.rank) if self.is_leader else 0, len(leaders), group)

    def machine(self) -> LocalGroup | None:
        """Returns the group of processes on this machine, or None if they have no process group."""
        places = self.machine_ranks
        if places.group is None:
            return None
        return LocalGroup(places.group, places.machine[0], len(places.machine), self.world.rank == places.machine[0])

    def settings(self, cost: "Cost", trained: Sequence[Tensor], rank: int = 0) -> dict[str, Any]:
        """Returns the settings on which sync state depends. Saved state is loaded only if its settings are equal."""
        return {
            "method": cost.method,
            "codec": cost.codec,
            "rank": rank,
            "speakers": list(self.machine_ranks.leaders),
            "values": sum(one.numel() for one in trained),
            **({"format of factors": FACTORS_FORMAT} if rank else {}),
        }


def trainable_parameters(network: HasGradients) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


class Synchronizer:
    """The interface of a sync method in the training loop. This base class lets the parallel mode average gradients."""

    reduces = True  # True if the mode averages gradients
    group: Any = None  # the processes over which the mode averages gradients; None: all
    hook: Any = None  # the communication hook of DDP that replaces the mean; None: mean
    alone = False  # True if processes train separately between exchanges
    local_statistics = False  # True if each process's BatchNorm uses its own samples and keeps its own statistics
    times_waits = False  # True if `waited_s` is measured; False if the mode waits
    waited_s, exchange_s = 0.0, 0.0  # training's waits for other processes; the last exchange during training, if any
    # settings on which the `state` of each process depends (method, codec, leaders …), as JSON data; empty: no state
    settings: Mapping[str, Any] = MappingProxyType({})

    def before_update(self, step: int) -> None:
        """Called before an update, when `step` updates and their `after_update` calls are complete."""

    def before_last_micro_batch(self) -> None:
        """Called before the backward pass of an update's last micro-batch."""

    def on_gradients(self) -> None: ...

    def after_update(self, step: int) -> None:
        """Called after an update; `step` counts the updates made so far."""

    def clear_residuals(self) -> str:
        """Removes infinite and NaN values of the last gradients from the state.

        Returns a message for the user if this loses other values too, or "" if not.
        """
        return ""

    def adapt_pace(self, speeds_s: Sequence[float], exchanges_s: Sequence[float]) -> "Cost | None":
        """Adapts the interval to all ranks' seconds per step and exchange (0: none). Returns a Cost if it changes."""

    def finish(self, step: int) -> None:
        """Makes the networks of all processes equal at the end of training. A collective."""

    def average_buffers(self, step: int) -> None:
        """Averages the buffers over processes after `step` updates, for use in `averaged`. A collective."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the network has the averaged parameters and buffers."""
        return contextlib.nullcontext()

    def replica_sum(self, value: Tensor, world: World) -> Tensor:
        """Sums a scalar over all processes, or estimates this sum if processes train separately. A collective."""
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
        """Returns the tensors that must be equal on all processes."""
        return {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """Returns this process's own state on which later updates depend, (tensors, numbers); None if it has none."""
        return None

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None: ...

    def close(self) -> None:
        """Ends the exchange in progress and background threads."""

    def begin(self) -> None:
        """Resets the state to that of a start with the current network, which must be equal on all processes."""

"""Local steps: machines train separately, and average their parameter changes every few steps.

Every `every` steps, each machine sends the compressed changes of its parameters since the last average, while training
continues. `delay` steps later, the averaged changes are applied. Compression errors are sent with the next changes.
Sources: Stich 2018 (arXiv:1805.09767); Douillard et al. 2023, 2025 ("DiLoCo", arXiv:2311.08105; "Streaming DiLoCo",
arXiv:2501.18512) for the outer momentum and the overlap.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.sync.compress import Compressor
from manyhands.sync.costs import Cost
from manyhands.sync.exchange import AsyncExchange, SyncGroup
from manyhands.sync.synchronizer import Buffers, LocalGroup, Synchronizer, add_vector, as_vector, dtype_of, write_vector


@dataclass
class PendingExchange:
    """An exchange of parameter changes that is in progress."""

    since: int  # the step at which the exchange began
    moved: Tensor  # this process's changes from the anchor at that step [n]
    residual: Tensor  # residual of the exchange before, which is sent along [n]
    compressor: dict[str, Tensor]  # the compressor's state at the start
    exchange: AsyncExchange[tuple[Tensor, Tensor]] | None  # the exchange, on its machine's leader; None elsewhere


@dataclass(frozen=True)
class Pace:
    """The interval and delay of exchanges, and the settings of the outer optimizer."""

    every: int  # steps from one exchange to the next
    delay: int = 0  # steps of training during an exchange, at most `every`; 0: wait for the exchange
    lr: float = 1.0  # outer learning rate: factor of the averaged changes
    momentum: float = 0.0  # outer Nesterov momentum of the averaged changes


@dataclass
class LocalSteps(Synchronizer):
    """Averages the changes, since the last average (the anchor), of machines or processes that train separately."""

    alone = local_statistics = times_waits = True

    parameters: Sequence[Tensor]  # the trainable ones, in the same order on all processes
    buffers: Buffers  # of the network; averaged only while no exchange is in progress
    peers: SyncGroup  # one process of each machine
    compressor: Compressor  # compresses the changes
    pace: Pace  # interval and outer step
    weight: float = 1.0  # factor of this machine's changes in the mean; the mean of all factors is 1
    machine: LocalGroup | None = None  # the processes of this machine, if several train together
    settings: Mapping[str, Any] = field(default_factory=dict)  # see `Synchronizer`
    # see `Synchronizer.adapt_pace`; None if the pace is fixed
    adapt: Callable[[Sequence[float], Sequence[float]], Cost | None] | None = None
    rounds: int = field(default=0, init=False)  # exchanges that have been applied

    def __post_init__(self) -> None:
        self._dtype = dtype_of(self.parameters)
        self.group = self.machine.group if self.machine and self.machine.size > 1 else None
        self.reduces = self.group is not None
        self.begin()

    def begin(self) -> None:
        """Makes the current parameters and buffers (equal on all processes) the new anchor, and drops residuals."""
        self.anchor = as_vector(self.parameters, self._dtype)
        self.buffers.begin()
        self._residual = torch.zeros_like(self.anchor)
        self._speed = torch.zeros_like(self.anchor if self.pace.momentum else self.anchor[:0])
        # Reused memory: allocating pages costs more than the sums.
        self._moved, self._spare = torch.empty_like(self.anchor), torch.empty_like(self.anchor)
        self._flight: PendingExchange | None = None

    @property
    def idle(self) -> bool:
        return self._flight is None

    def before_update(self, step: int) -> None:
        if self.pace.delay and step and step % self.pace.every == 0 and self._flight is None:
            self._start_exchange(step)

    def after_update(self, step: int) -> None:
        if not self.pace.delay:
            if step % self.pace.every == 0:
                self._average_now(step)
        elif self._flight and step >= self._flight.since + self.pace.delay:
            self._apply_exchange()

    def adapt_pace(self, speeds_s: Sequence[float], exchanges_s: Sequence[float]) -> Cost | None:
        return self.adapt(speeds_s, exchanges_s) if self.adapt else None

    def finish(self, step: int) -> None:
        """Averages a last time, and sets the networks of all processes to the anchor. A collective."""
        if self._flight:
            self._apply_exchange()
        self._average_now(step)
        self.average_buffers(step)
        self._write_network(self.anchor, self.buffers.averaged)

    def average_buffers(self, step: int) -> None:
        if self._flight and self._flight.exchange:
            self._flight.exchange.result()  # both use one group, whose messages must not mix
        self.buffers.average(step)

    def close(self) -> None:
        if self._flight and self._flight.exchange:
            self._flight.exchange.close()
        self._flight = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the network has the anchor's parameters and averaged buffers, to evaluate or save it."""
        own = as_vector(self.parameters, self._dtype), self.buffers.local_values()
        self._write_network(self.anchor, self.buffers.averaged)
        try:
            yield
        finally:
            self._write_network(*own)

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        frozen = {name: one.detach() for name, one in model.named_parameters() if not one.requires_grad}
        return {"the averaged parameters": self.anchor, **frozen}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        flight = self._flight
        tensors = {
            "parameters": as_vector(self.parameters, self._dtype),
            "buffers": self.buffers.local_values(),
            "held": flight.residual if flight else self._residual,
            "speed": self._speed,
        }
        compressor = flight.compressor if flight else self.compressor.state()
        tensors |= {f"compressor.{name}": tensor for name, tensor in compressor.items()}
        if flight:
            tensors["flight.moved"] = flight.moved
        return tensors, {"rounds": self.rounds, "since": flight.since if flight else -1}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Restores the result of `state`. Restarts an exchange in progress. The network must be at the anchor."""
        self.begin()
        moved = {name: tensor.to(self.anchor.device) for name, tensor in tensors.items()}
        self._write_network(moved["parameters"], moved["buffers"])
        self._residual, self.rounds = moved["held"], numbers["rounds"]
        if self.pace.momentum and moved["speed"].numel():
            self._speed = moved["speed"]
        prefix = "compressor."
        self.compressor.load({name[len(prefix) :]: one for name, one in moved.items() if name.startswith(prefix)})
        if numbers["since"] >= 0:
            self._start_exchange(numbers["since"], moved["flight.moved"])

    def _average_now(self, step: int) -> None:
        self._start_exchange(step, in_thread=False)
        self._apply_exchange(unchanged=True)

    def _start_exchange(self, step: int, moved: Tensor | None = None, *, in_thread: bool = True) -> None:
        if moved is None:
            moved = as_vector(self.parameters, self._dtype, self._moved).sub_(self.anchor)
        before, exchange = dict(self.compressor.state()), None
        if self.machine is None or self.machine.is_leader:
            values = torch.add(self._residual, moved, alpha=self.weight, out=self._spare)
            exchange = AsyncExchange(self.compressor.average(values, self.peers), in_thread=in_thread)
        self._flight = PendingExchange(step, moved, self._residual, before, exchange)

    def _apply_exchange(self, *, unchanged: bool = False) -> None:
        """Waits for the exchange and applies its mean. `unchanged`: the parameters are as at its beginning."""
        flight = self._flight
        if flight is None:
            return
        began_s, before = time.perf_counter(), CLOCK.start_phase(COMMUNICATION)
        if flight.exchange:
            mean, residual = flight.exchange.result()
        else:
            mean, residual = torch.empty_like(self.anchor), self._residual
        if self.machine:
            dist.broadcast(mean, self.machine.leader, group=self.machine.group)
        self.waited_s += time.perf_counter() - began_s
        CLOCK.start_phase(before)
        self.exchange_s = flight.exchange.seconds if flight.exchange else 0.0
        if self.pace.momentum:
            self._speed.mul_(self.pace.momentum).add_(mean)
            mean.add_(self._speed, alpha=self.pace.momentum)
        if self.pace.lr != 1:
            mean.mul_(self.pace.lr)
        self.anchor.add_(mean)
        self._residual, self._spare = residual, flight.residual
        if unchanged:
            write_vector(self.anchor, self.parameters)
        else:
            add_vector(mean.sub_(flight.moved), self.parameters)
        self._flight, self.rounds = None, self.rounds + 1

    def _write_network(self, parameters: Tensor, buffers: Tensor) -> None:
        write_vector(parameters, self.parameters)
        self.buffers.write(buffers)

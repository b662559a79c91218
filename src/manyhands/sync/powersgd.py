"""PowerSGD: averages low-rank factors of the gradients in every update."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.errors import RunError
from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.core.seeds import mix
from manyhands.sync.compress import LowRank, select_arithmetic
from manyhands.sync.costs import divide_into_batches
from manyhands.sync.exchange import CollectiveQueue, ExchangeSteps, SyncGroup
from manyhands.sync.synchronizer import Buffers, LocalGroup, Synchronizer, dtype_of

_LOOK_S = 1e-3  # between two polls
_CLOSING_S = 10.0  # longest wait for the thread at the end


# values sent by this process, their mean over all processes, and this process's rounding error
_SentBatch = tuple[Tensor, Tensor, Tensor]


class PowerSgd(Synchronizer):
    """Averages gradients during the backward pass. Compression errors are sent with the next gradients.

    The last backward pass of an update sends each batch of gradients once it is complete. The mean replaces the batch
    before the optimizer's step. DDP's hook isn't used, because with several buckets, ranks would start collectives in
    different orders. Sources: Vogels et al. 2019, arXiv:1905.13727; Zhang et al. 2023, arXiv:2306.08881.

    `parameters` must have the same order on all processes, ideally forward order. `rare` are parameters that may get no
    gradient on any process. The processes of `machine` sum factors before the exchange. Construction is a collective.
    """

    reduces = False
    local_statistics = times_waits = True

    def __init__(  # noqa: PLR0913 - most are named
        self,
        parameters: Sequence[nn.Parameter],
        peers: SyncGroup,
        rank: int,
        seed: int,
        rare: Sequence[nn.Parameter] = (),
        *,
        machine: LocalGroup | None = None,
        processes: int = 0,
        buffers: Buffers | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.settings, self._buffers = settings, buffers or Buffers([], peers, machine)
        self._peers, self._rare, self._machine = peers, list(rare), machine
        self._weight = peers.size / (processes or peers.size)
        dtype, device = dtype_of(parameters), str(parameters[0].device)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        self._batches: list[_Batch] = []
        for number, places in enumerate(divide_into_batches(shapes, rank)):
            sent, turn = [shapes[place] for place in places], number % 2
            compressor = LowRank(sent, rank, mix(seed + number), device, dtype, turn=turn)
            self._batches.append(_Batch([parameters[place] for place in places], compressor, dtype))
        self._first = [batch.compressor.state() for batch in self._batches]
        # Not only peers: all processes multiply the averaged factors.
        everybody = SyncGroup(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else SyncGroup()
        select_arithmetic([batch.compressor for batch in self._batches], everybody, self._batches[0].residual)
        self._expecting, self._offered = False, 0
        self._begun: SimpleQueue[bool] = SimpleQueue()  # False: closed
        self._complete: SimpleQueue[_Batch | None] = SimpleQueue()
        self._ended: SimpleQueue[Exception | None] = SimpleQueue()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, batch))
            for batch in self._batches
            for parameter in batch.parameters
        ]
        self._thread = threading.Thread(target=self._run_thread, name="manyhands gradients", daemon=True)
        self._thread.start()

    def before_last_micro_batch(self) -> None:
        self._expecting, self._offered = True, 0
        for batch in self._batches:
            batch.expect()
        self._begun.put(True)

    def on_gradients(self) -> None:
        """Waits until the gradients are averaged. A collective. Raises RuntimeError if the averaging failed."""
        if not self._expecting:
            self.before_last_micro_batch()
        self._queue_batches(also_incomplete=True)
        self._expecting = False
        began_s, before = time.perf_counter(), CLOCK.start_phase(COMMUNICATION)
        error = self._ended.get()
        self.waited_s += time.perf_counter() - began_s
        CLOCK.start_phase(before)
        if error:
            raise error
        for parameter in self._rare:
            # The optimizer skips parameters without gradients: the same on all processes, because the mean is equal.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        state = {"buffers": self._buffers.local_values()}
        for number, batch in enumerate(self._batches):
            state[f"{number}.held"] = batch.residual
            state |= {f"{number}.{name}": tensor for name, tensor in batch.compressor.state().items()}
        return state, {}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:  # noqa: ARG002 - none here
        self._buffers.write(tensors["buffers"])
        for number, batch in enumerate(self._batches):
            prefix = f"{number}."
            own = {name[len(prefix) :]: one for name, one in tensors.items() if name.startswith(prefix)}
            batch.residual.copy_(own.pop("held"))
            batch.compressor.load({name: one.to(batch.residual.device) for name, one in own.items()})

    def clear_residuals(self) -> str:
        """Sets residuals to zero and factors to their initial values. Returns a message for the user.

        Called between two updates, after gradients with infinite or NaN values.
        """
        for batch, first in zip(self._batches, self._first, strict=True):
            batch.residual.zero_()
            batch.compressor.load(first)
        return "the residual of earlier gradients is dropped too"

    def begin(self) -> None:
        self._buffers.begin()

    def finish(self, step: int) -> None:
        self._buffers.average(step)
        self._buffers.write(self._buffers.averaged)

    def average_buffers(self, step: int) -> None:
        self._buffers.average(step)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        own = self._buffers.local_values()
        self._buffers.write(self._buffers.averaged)
        try:
            yield
        finally:
            self._buffers.write(own)

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._begun.put(False)
        self._complete.put(None)
        self._thread.join(_CLOSING_S)

    def _on_gradient(self, batch: "_Batch", parameter: Tensor) -> None:
        if not self._expecting:
            return  # not the update's last backward pass
        if id(parameter) not in batch.missing:
            what = "a parameter got a gradient twice in one backward pass"
            raise RunError(what, "sync.method", ("use --sync allreduce", "or pass use_reentrant=False to checkpoint()"))
        batch.missing.remove(id(parameter))
        self._queue_batches()

    def _queue_batches(self, *, also_incomplete: bool = False) -> None:
        """Queues batches, in order, up to the first incomplete one; with `also_incomplete`, all batches."""
        while self._offered < len(self._batches):
            batch = self._batches[self._offered]
            if batch.missing and not also_incomplete:
                return
            self._complete.put(batch)
            self._offered += 1

    @torch.no_grad()
    def _run_thread(self) -> None:
        try:
            while True:
                self._exchange_update()
                self._ended.put(None)
        except _ClosedError:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the gradients are wanted
            self._ended.put(error)

    def _exchange_update(self) -> None:
        """Sends the batches of one update as they are completed, and replaces their gradients by the means."""
        if not self._begun.get():
            raise _ClosedError
        for batch in self._batches:  # during the forward pass
            batch.compressor.prepare()
        queue = CollectiveQueue[_SentBatch](len(self._batches), 2 if self._machine is None else 4)
        for number, batch in enumerate(self._batches):
            while number not in queue.results:
                if queue.in_progress:  # not get(timeout=…), which may wait forever on a busy machine (CPython 3.11)
                    time.sleep(_LOOK_S)
                self._send_next_batch(queue, wait=not queue.in_progress)
            # Batches that are completed meanwhile are sent first.
            batch.end_exchange(*queue.results[number], lambda: self._send_next_batch(queue))

    def _send_next_batch(self, queue: CollectiveQueue[_SentBatch], *, wait: bool = False) -> None:
        """Starts to send the next complete batch, for which it may `wait`, and advances those in progress."""
        with contextlib.suppress(Empty):
            batch = self._complete.get(block=wait)
            if batch is None:
                raise _ClosedError
            queue.add(self._average_batch(batch))
        queue.advance()

    def _average_batch(self, batch: "_Batch") -> ExchangeSteps[_SentBatch]:
        sent, machine = batch.begin_exchange(), self._machine
        if machine is None:
            mean, residual = yield from batch.compressor.send(sent, self._peers)
            return sent, mean, residual.combined(self._peers)
        mean, lost = sent * self._weight, torch.zeros_like(sent)
        yield dist.all_reduce(mean, group=machine.group, async_op=True)
        if machine.is_leader and self._peers.size > 1:
            mean, residual = yield from batch.compressor.send(mean, self._peers)
            lost = residual.combined(self._peers) / self._weight  # the leader keeps it for its machine
        else:
            yield from (None, None)  # as many steps as the leader, on whose number the queue's order depends
        yield dist.broadcast(mean, machine.leader, group=machine.group, async_op=True)
        return sent, mean, lost


class _ClosedError(Exception):
    """Raised in the background thread after `close`, to end it."""


class _Batch:
    """Parameters whose gradients are sent together, in this order, and the residual of these gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], compressor: LowRank, dtype: torch.dtype) -> None:
        self.parameters, self.compressor = list(parameters), compressor
        sizes = [parameter.numel() for parameter in parameters]
        # the residual of earlier gradients, with the gradients added while they are sent [n]
        self.residual = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        self._slots = [
            piece.view(parameter.shape) for piece, parameter in zip(self.residual.split(sizes), parameters, strict=True)
        ]
        # If backward accumulates gradients in the residual, averaged gradients need separate memory.
        self._averaged = [
            torch.empty_like(slot) if parameter.is_contiguous() and parameter.dtype == dtype else None
            for parameter, slot in zip(parameters, self._slots, strict=True)
        ]
        self.missing: set[int] = set()  # ids of parameters that have no gradient of this update yet

    def expect(self) -> None:
        """Prepares backward, which adds gradients directly to the residual if layout and dtype allow it."""
        self.missing = {id(parameter) for parameter in self.parameters}
        for parameter, slot, averaged in zip(self.parameters, self._slots, self._averaged, strict=True):
            if averaged is not None:
                if parameter.grad is not None:
                    slot.add_(parameter.grad)  # of earlier micro-batches
                parameter.grad = slot

    def begin_exchange(self) -> Tensor:
        """Adds the gradients to the residual, and returns the values to send."""
        for parameter, slot, averaged in zip(self.parameters, self._slots, self._averaged, strict=True):
            if averaged is None and parameter.grad is not None:
                slot.add_(parameter.grad)
            elif parameter.grad is not None and parameter.grad is not slot:
                slot.copy_(parameter.grad)  # a user's hook has replaced the gradient
        return self.compressor.begin(self.residual)

    def end_exchange(self, sent: Tensor, mean: Tensor, lost: Tensor, between: Callable[[], object]) -> None:
        """Replaces the gradients by their means, and updates the residual. Arguments are as in `LowRank.end`."""
        for parameter, averaged in zip(self.parameters, self._averaged, strict=True):
            if averaged is not None:
                parameter.grad = averaged
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.compressor.end(self.residual, sent, (mean, lost), gradients, between)

"""Data parallel mode: every process holds the full network and a share of each batch.

Gradients are averaged by DDP or, on CPUs, through shared memory within a machine and by gloo between machines.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from manyhands.core import needs, phases
from manyhands.core.world import World
from manyhands.parallel.group import collectives, listeners
from manyhands.parallel.network import ModeRequest, NetworkTraits, ParallelNetwork
from manyhands.parallel.replicas.shared_memory import ALONE, ON_SEVERAL, SharedSums, ranks_by_machine, share_memory

NORM_GROUPS = True
OFFERS = frozenset({needs.WHOLE_GRADIENTS, needs.OWN_AVERAGE, needs.AVERAGE_HOOK})
NOTHING_ALONE = True

# torch 2.15 renamed the flag and warns of the old name.
_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers": False
}


class Replica(DistributedDataParallel):
    """DDP without the profiler range in forward, which takes 5 % of a small network's step."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return self.module.state_dict(*arguments, **named)

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        return self.module.load_state_dict(*arguments, **named)


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:
    """Wraps the network so that its gradients are averaged over processes, by DDP or through shared memory.

    DDP broadcasts nothing: parameters are already equal, and `replicas/batch_norm.py` synchronizes buffers.
    """
    if world.alone or not any(parameter.requires_grad for parameter in model.parameters()):
        return ParallelNetwork(model, world=world)
    if not request.reduces:
        return ParallelNetwork(model, world=world, traits=NetworkTraits(float(world.size)))
    machines = _shared_memory_obstacle(model, world, request) or ranks_by_machine(world, request.group)
    if isinstance(machines, str):
        return _wrap_in_ddp(model, world, request, machines)
    between = len(machines) > 1
    if between and (len(machines) == world.size or request.group is not None or world.backend != "gloo"):
        sums = ON_SEVERAL
    else:
        sums = "some parameters get no gradient" if request.unused else share_memory(machines, world, request.group)
    if isinstance(sums, str):
        return _wrap_in_ddp(model, world, request, sums)
    if between:
        ranks = [machine[0] for machine in machines]
        with listeners.block_listeners_on_exit(world.backend):
            group = dist.new_group(ranks, timeout=collectives.group_timeout(world))
        averages = "gradients are averaged in two levels: shared memory within machines, gloo between their first ranks"
        leaders = group if world.rank in ranks else None
        return TwoLevelNetwork(model, world, NetworkTraits(averaging=averages), sums, leaders)
    assert sums is not None
    averages = f"gradients are averaged through shared memory: {sums.size} processes compute on the CPU of one machine"
    return SharedMemoryNetwork(model, world, NetworkTraits(world.size / sums.size, averaging=averages), sums)


def _wrap_in_ddp(model: nn.Module, world: World, request: ModeRequest, reason: str) -> ParallelNetwork:
    wrapped = Replica(
        model,
        device_ids=None if world.device == "cpu" else [world.device],
        process_group=request.group,
        **_NO_BUFFER_SYNC,
        init_sync=False,
        find_unused_parameters=request.unused,
        gradient_as_bucket_view=True,
    )
    if world.device == "cpu":  # accelerators compute asynchronously
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(phases.CLOCK.record_gradient)
    if request.hook:
        wrapped.register_comm_hook(None, request.hook)
    averages = f"gradients are averaged by {world.backend}: {reason}"
    traits = NetworkTraits(float(world.size), wrapped.no_sync, orders_sums=True, averaging=averages)
    if not request.unused:  # else DDP itself finds parameters without gradients
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        traits.connect_loss = functools.partial(_connect_loss, trained)  # costs less than find_unused_parameters
    return ParallelNetwork(model, wrapped, world, traits)


def _shared_memory_obstacle(model: nn.Module, world: World, request: ModeRequest) -> str:
    reasons = {
        "the gradients are on an accelerator": world.device != "cpu",
        "parallel.shared_memory is false": not request.shared_memory,
        ALONE: dist.get_world_size(request.group) == 1,
        "the sync method transforms the gradients": request.hook is not None,
        "some gradients are sparse": any(getattr(module, "sparse", False) for module in model.modules()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class _ReachParameters(torch.autograd.Function):
    """Identity of the loss. Its backward also reaches unused parameters, for whose gradients DDP would wait."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *([None] * ctx.count)


def _connect_loss(parameters: list[nn.Parameter], loss: Tensor) -> Tensor:
    reached: Any = _ReachParameters.apply(loss, *parameters)
    return reached


_FEW = 16  # the most tensors that two processes add in place


class FlatGradients:
    """Sums the gradients of the parameters of one dtype. `values` [n] has the sums; it is empty if only `.grad` has."""

    def __init__(self, parameters: Sequence[nn.Parameter], sums: SharedSums) -> None:
        self._parameters, self._sums = parameters, sums
        self.values = torch.zeros(sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
        self._views = _views_like(parameters, self.values)
        self._fits = self.values.nbytes <= sums.slot_bytes  # gradients that fit into a slot are copied there at once
        slots = sums.process_slots(sums.place, self.values) if self._fits else [self.values] * 2
        self._into = [_views_like(parameters, slot) for slot in slots]
        self._other: list[list[Tensor]] = []
        if self._fits and sums.size == 2 and len(parameters) <= _FEW:
            self._other = [_views_like(parameters, slot) for slot in sums.process_slots(1 - sums.place, self.values)]
            self.values, self._views = self.values[:0], []

    def all_reduce(self) -> None:
        """Replaces each parameter's gradient (None counts as zeros) by its sum over all processes. A collective."""
        turn = self._sums.turn
        into = self._into[turn]
        if self._other:
            # a + b and b + a have equal bits: each of two processes adds the other's values to its own cached values.
            for one in self._parameters:
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
            given: list[Any] = [one.grad for one in self._parameters]
            torch._foreach_copy_(into, given)
            self._sums.wait_for_slots()
            torch._foreach_add_(given, self._other[turn])
            return
        given = [
            view.zero_() if one.grad is None else one.grad for one, view in zip(self._parameters, into, strict=True)
        ]
        torch._foreach_copy_(into, given)
        (self._sums.sum_slots if self._fits else self._sums.all_reduce)(self.values)
        for one, view in zip(self._parameters, self._views, strict=True):
            one.grad = view


def _parameters_by_dtype(model: nn.Module) -> list[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for one in model.parameters():
        if one.requires_grad:
            kinds.setdefault(one.dtype, []).append(one)
    return list(kinds.values())


def _views_like(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """Returns views of `flat` [n], one per parameter in order, with the parameters' shapes and strides."""
    pieces = flat.split([one.numel() for one in parameters])
    likes = [torch.empty_like(one, device="meta") for one in parameters]
    return [piece.as_strided(one.size(), one.stride()) for piece, one in zip(pieces, likes, strict=True)]


class SharedMemoryNetwork(ParallelNetwork):
    """A replica whose gradients are summed in one machine's shared memory after an update's last backward pass."""

    def __init__(self, model: nn.Module, world: World, traits: NetworkTraits, sums: SharedSums) -> None:
        super().__init__(model, world=world, traits=traits)
        self.sums = sums
        if sums.covers_run:
            self.norms.shared_memory_sum = sums.all_reduce
        self.flats = [FlatGradients(parameters, sums) for parameters in _parameters_by_dtype(model)]

    @override
    def finish_gradients(self) -> list[Tensor]:
        with torch.no_grad():
            for flat in self.flats:
                flat.all_reduce()
        flat = [one.values for one in self.flats]
        return flat if all(one.numel() for one in flat) else []

    @override
    def close(self) -> None:
        self.norms.shared_memory_sum = None
        self.sums.close()


class TwoLevelNetwork(ParallelNetwork):
    """A replica on one of several machines. Gradients are summed after an update's last backward pass.

    Each machine sums in shared memory (`sums`; None if it has one process). The first ranks of the machines all-reduce
    the sums (`leaders`: their process group; None on other ranks), and shared memory distributes the result.
    """

    def __init__(
        self, model: nn.Module, world: World, traits: NetworkTraits, sums: SharedSums | None, leaders: Any
    ) -> None:
        super().__init__(model, world=world, traits=traits)
        self.sums, self.leaders = sums, leaders
        self._flats: list[tuple[list[nn.Parameter], Tensor, list[Tensor]]] = []
        for parameters in _parameters_by_dtype(model):
            values = torch.zeros(sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
            self._flats.append((parameters, values, _views_like(parameters, values)))

    @override
    def finish_gradients(self) -> list[Tensor]:
        with torch.no_grad():
            for parameters, values, views in self._flats:
                for one, view in zip(parameters, views, strict=True):
                    one.grad = view.zero_() if one.grad is None else view.copy_(one.grad)
                self._all_reduce(values)
        return [values for _, values, _ in self._flats]

    def _all_reduce(self, values: Tensor) -> None:
        SharedSums.begun += 1
        try:
            if self.sums:
                self.sums.reduce_to_first(values)
            if self.leaders:
                dist.all_reduce(values, group=self.leaders)
            if self.sums:
                self.sums.broadcast(values)
        except BaseException:
            if self.sums:  # so that the other processes of this machine fail at once
                self.sums.close()
            raise

    @override
    def close(self) -> None:
        if self.sums:
            self.sums.close()
        if self.leaders:
            dist.destroy_process_group(self.leaders)
            self.leaders = None

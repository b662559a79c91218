"""Gradients of replicas that compute on processors, added up in flat buffers of which the gradients are views."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.shared_memory import SharedSums

# So many tensors of two processes are added in place; of more, one pass over the flat ones costs less.
_FEW = 16


class FlatGradients:
    """Of parameters of one dtype.

    Attributes:
        values: the sum, whose views are the gradients; empty where it is in the gradients that backward made.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sums: SharedSums) -> None:
        self._parameters, self._sums = parameters, sums
        self.values = torch.zeros(sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
        self._views = _views(parameters, self.values)
        # What fits into a slot goes there at once.
        self._fits = self.values.nbytes <= sums.slot_bytes
        slots = sums.own_slots(self.values) if self._fits else [self.values] * 2
        self._into = [_views(parameters, slot) for slot in slots]
        self._other: list[list[Tensor]] = []
        if self._fits and sums.size == 2 and len(parameters) <= _FEW:
            self._other = [_views(parameters, slot) for slot in sums.slots_of(1 - sums.place, self.values)]
            self.values, self._views = self.values[:0], []

    def add_up(self) -> None:
        """Gives each parameter the sum of all processes' gradients; zeros count where one has none. A collective."""
        turn = self._sums.turn
        into = self._into[turn]
        if self._other:
            # a + b is b + a, to the bit: each of two adds the other's to its own, which is still in its cache.
            for one in self._parameters:
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
            given: list[Any] = [one.grad for one in self._parameters]
            torch._foreach_copy_(into, given)
            self._sums.meet()
            torch._foreach_add_(given, self._other[turn])
            return
        given = [
            view.zero_() if one.grad is None else one.grad for one, view in zip(self._parameters, into, strict=True)
        ]
        torch._foreach_copy_(into, given)
        if self._fits:
            self._sums.add_slots_up(self.values)
        else:
            self._sums.add_up(self.values)
        for one, view in zip(self._parameters, self._views, strict=True):
            one.grad = view


def _by_dtype(model: nn.Module) -> list[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for one in model.parameters():
        if one.requires_grad:
            kinds.setdefault(one.dtype, []).append(one)
    return list(kinds.values())


def _views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """Consecutive pieces of the flat [n], each with its parameter's shape and order in memory."""
    pieces = flat.split([one.numel() for one in parameters])
    likes = [torch.empty_like(one, device="meta") for one in parameters]
    return [piece.as_strided(one.size(), one.stride()) for piece, one in zip(pieces, likes, strict=True)]


@dataclass
class FlatNetwork(ParallelNetwork):
    """A replica whose gradients are added up when an update's last backward is over."""

    sums: SharedSums | None = None
    flats: list[FlatGradients] = field(init=False)
    _no_grad: torch.no_grad = field(default_factory=torch.no_grad)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.sums is not None
        if self.sums.of_all:
            self.norms.through_memory = self.sums.add_up
        self.flats = [FlatGradients(parameters, self.sums) for parameters in _by_dtype(self.inner)]

    @override
    def finish_gradients(self) -> None:
        with self._no_grad:
            for flat in self.flats:
                flat.add_up()

    @override
    def flat_gradients(self) -> list[Tensor]:
        flat = [one.values for one in self.flats]
        return flat if all(one.numel() for one in flat) else []

    @override
    def release(self) -> None:
        assert self.sums is not None
        self.norms.through_memory = None
        self.sums.close()


@dataclass
class TwoLevelNetwork(ParallelNetwork):
    """A replica on one of several machines, whose gradients are added up after an update's last backward pass.

    Each machine adds up in shared memory, the machines' first ranks all-reduce these sums, and the result goes back
    through shared memory.
    """

    sums: SharedSums | None = None  # of this machine's processes; None where it has one process
    leaders: Any = None  # the process group of the machines' first ranks; None on all other ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = [
            (kind, torch.zeros(sum(one.numel() for one in kind), dtype=kind[0].dtype)) for kind in _by_dtype(self.inner)
        ]
        self._flats = [(kind, values, _views(kind, values)) for kind, values in kinds]

    @override
    def finish_gradients(self) -> None:
        with torch.no_grad():
            for parameters, values, views in self._flats:
                for one, view in zip(parameters, views, strict=True):
                    one.grad = view.zero_() if one.grad is None else view.copy_(one.grad)
                self._add_up(values)

    def _add_up(self, values: Tensor) -> None:
        SharedSums.begun += 1
        try:
            if self.sums:
                self.sums.add_up_for_first(values)
            if self.leaders:
                dist.all_reduce(values, group=self.leaders)
            if self.sums:
                self.sums.spread(values)
        except BaseException:
            if self.sums:  # the other processes of this machine notice it at once
                self.sums.close()
            raise

    @override
    def flat_gradients(self) -> list[Tensor]:
        return [values for _, values, _ in self._flats]

    @override
    def release(self) -> None:
        if self.sums:
            self.sums.close()
        if self.leaders:
            dist.destroy_process_group(self.leaders)
            self.leaders = None

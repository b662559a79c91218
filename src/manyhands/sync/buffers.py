"""Network buffers, and tensors as one vector: both are averaged over processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.sync.codecs import Plain
from manyhands.sync.talk import SyncGroup, drive, mean_of


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type in which they are put together: double precision if one of them is, else single."""
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
    """Processes that agree in every step by other means, of which one leads."""

    group: Any  # their process group
    leader: int  # the rank, among all processes of the run, of the one that leads
    size: int  # how many they are
    is_leader: bool  # True on that process


class Buffers:
    """What is agreed on of them, which come in an order that is equal everywhere, and are equal everywhere.

    Peers are one process of each machine. `averaged` is the mean [n], as of the last agreement; it lies on `device`
    where there are no buffers.
    """

    def __init__(
        self, buffers: Sequence[Tensor], peers: SyncGroup, machine: LocalGroup | None = None, device: str = "cpu"
    ) -> None:
        floating = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._buffers = floating or [torch.zeros(0, device=device)]
        self._peers, self._machine, self._dtype = peers, machine, dtype_of(self._buffers)
        self.begin()

    def begin(self) -> None:
        """Takes them, which are equal everywhere, as agreed."""
        self.averaged, self._step = self.own(), -1

    def own(self) -> Tensor:
        """A copy [n]."""
        return as_vector(self._buffers, self._dtype)

    def write(self, values: Tensor) -> None:
        write_vector(values, self._buffers)

    def average(self, step: int) -> None:
        """Takes the mean of all, once in each step; a collective."""
        if step == self._step:
            return
        mean, machine = self.own(), self._machine
        if machine:
            dist.all_reduce(mean, group=machine.group)
            mean /= machine.size
        if machine is None or machine.is_leader:
            mean, _ = drive(mean_of(mean, Plain(self._dtype), self._peers))
        if machine:
            dist.broadcast(mean, machine.leader, group=machine.group)
        self.averaged, self._step = mean, step

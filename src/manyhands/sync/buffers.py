"""A network's buffers (BatchNorm's statistics) where each process has its own: the mean, when somebody looks at them.

A process trains on with its own. Since they are running means, the mean of all is what it would be if they had been
averaged all along. Whole numbers (how many batches there were) have no mean; each process keeps its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.sync.codecs import Plain
from manyhands.sync.talk import SyncGroup, drive, mean_of
from manyhands.sync.vector import as_vector, dtype_of, write_vector


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

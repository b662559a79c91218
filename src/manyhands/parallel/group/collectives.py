"""Subgroups of processes. Their collectives also work in a group of one process."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.core.world import World
from manyhands.parallel.group.listeners import block_listeners_on_exit

Operation = Literal["sum", "mean", "max", "min", "product"]
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _reduce_op(operation: str, caller: str) -> Any:
    if operation not in _OPERATIONS:
        raise UserError(f'there is no operation "{operation}"', caller, (f"choose one of {', '.join(_OPERATIONS)}",))
    return _OPERATIONS[operation]


class Subgroup:
    """A group of processes with collectives. All processes of the run must create the same groups in the same order.

    Attributes:
        ranks: the members' ranks in the run, in order.
        rank: this process's index in `ranks`, or -1 if this process is not a member.
    """

    def __init__(self, ranks: Sequence[int], rank: int, handle: Any) -> None:
        self.ranks, self.rank, self._handle = tuple(ranks), rank, handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    @CLOCK.in_phase(COMMUNICATION)
    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        """Reduces the members' tensors by `operation`. Returns the result on all members."""
        result, reduce_op = self._contiguous_copy(tensor), _reduce_op(operation, "all_reduce")
        if self.size > 1:
            dist.all_reduce(result, reduce_op, group=self._handle)
        return result / self.size if operation == "mean" else result

    @CLOCK.in_phase(COMMUNICATION)
    def reduce(self, tensor: Tensor, target: int = 0, operation: Operation = "sum") -> Tensor | None:
        """Reduces the members' tensors by `operation`. Returns the result on member `target`, None on others."""
        receiver, result = self._rank_of(target, "reduce"), self._contiguous_copy(tensor)
        reduce_op = _reduce_op(operation, "reduce")
        if self.size > 1:
            dist.reduce(result, receiver, reduce_op, group=self._handle)
        if self.rank != target:
            return None
        return result / self.size if operation == "mean" else result

    @CLOCK.in_phase(COMMUNICATION)
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Returns the tensor of member `source` on all members. All must pass tensors of the same shape and dtype."""
        sender, result = self._rank_of(source, "broadcast"), self._contiguous_copy(tensor)
        if self.size > 1:
            dist.broadcast(result, src=sender, group=self._handle)
        return result

    @CLOCK.in_phase(COMMUNICATION)
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all members, stacked in the order of `ranks`, as [size, …]."""
        mine = self._contiguous_copy(tensor)
        if self.size == 1:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(parts, mine, group=self._handle)
        return torch.stack(parts)

    @CLOCK.in_phase(COMMUNICATION)
    def gather(self, tensor: Tensor, target: int = 0) -> Tensor | None:
        """Returns the tensors of all members, stacked as [size, …], on member `target`, and None on the others."""
        receiver, mine = self._rank_of(target, "gather"), self._contiguous_copy(tensor)
        if self.size == 1:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in self.ranks] if self.rank == target else None
        dist.gather(mine, parts, dst=receiver, group=self._handle)
        return torch.stack(parts) if parts else None

    @CLOCK.in_phase(COMMUNICATION)
    def all_to_all(self, tensors: Tensor) -> Tensor:
        """Sends row i of `tensors` [size, …] to member i. Returns the rows received; row i is from member i."""
        self._require_rows(tensors, "all_to_all")
        mine = self._contiguous_copy(tensors)
        if self.size == 1:
            return mine
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=self._handle)
        return received

    @CLOCK.in_phase(COMMUNICATION)
    def send(self, tensor: Tensor, target: int) -> None:
        """Sends `tensor` to member `target`, which must call `receive`. Blocks until the tensor is sent."""
        dist.send(self._contiguous_copy(tensor), dst=self._rank_of_other(target, "send"), group=self._handle)

    @CLOCK.in_phase(COMMUNICATION)
    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Returns the tensor that member `source` sends. It must have the shape and dtype of `tensor`."""
        result = torch.empty_like(self._contiguous_copy(tensor))
        dist.recv(result, src=self._rank_of_other(source, "receive"), group=self._handle)
        return result

    def scatter(self, tensors: Tensor, source: int = 0) -> Tensor:
        """Returns row `rank` of the tensor [size, …] of member `source`. All pass tensors of equal shape and dtype."""
        self._require_rows(tensors, "scatter")
        return self.broadcast(tensors, source)[self.rank].clone()

    def reduce_scatter(self, tensors: Tensor, operation: Operation = "sum") -> Tensor:
        """Reduces the members' `tensors` [size, …] by `operation`. Returns row `rank` of the result."""
        self._require_rows(tensors, "reduce_scatter")
        return self.all_reduce(tensors, operation)[self.rank].clone()

    @CLOCK.in_phase(COMMUNICATION)
    def barrier(self) -> None:
        self._require_member()
        if self.size > 1:
            dist.barrier(group=self._handle)

    def _contiguous_copy(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy, because some backends ignore strides. Raises UserError outside the group."""
        self._require_member()
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def _require_member(self) -> None:
        if self.rank < 0:
            raise UserError(f"this process is not one of ranks {', '.join(map(str, self.ranks))}", "subgroup")

    def _require_rows(self, tensors: Tensor, caller: str) -> None:
        self._require_member()
        rows = tensors.shape[0] if tensors.ndim else 0
        if rows != self.size:
            raise UserError(f"{caller} needs {self.size} rows, one for each process, but got {rows}", caller)

    def _rank_of(self, member: int, caller: str) -> int:
        self._require_member()
        if not 0 <= member < self.size:
            hints = (f"give an index from 0 to {self.size - 1} into the ranks {', '.join(map(str, self.ranks))}",)
            raise UserError(f"there is no member {member} in a group of {self.size}", caller, hints)
        return self.ranks[member]

    def _rank_of_other(self, member: int, caller: str) -> int:
        if member == self.rank:
            raise UserError(f"member {member} is this process itself", caller, ("name another member of the group",))
        return self._rank_of(member, caller)


def group_timeout(world: World) -> timedelta | None:
    """Returns the timeout of collectives that the job sets, or None for torch's default (half an hour)."""
    return timedelta(seconds=world.collective_timeout_s) if world.collective_timeout_s else None


def new_group(world: World, ranks: Sequence[int]) -> Subgroup:
    """Creates a subgroup. All processes of the run must call this. Raises UserError if `ranks` are invalid."""
    members = sorted(ranks)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= world.size:
        raise UserError(f"{list(ranks)} are not distinct ranks from 0 to {world.size - 1}", "new_group")
    if world.alone:
        return Subgroup(members, members.index(world.rank), None)
    with block_listeners_on_exit(world.backend):
        handle = dist.new_group(members, timeout=group_timeout(world))
    return Subgroup(members, members.index(world.rank) if world.rank in members else -1, handle)

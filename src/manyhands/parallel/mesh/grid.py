"""Tensor parallelism that a network does itself: mesh axes with differentiable collectives.

A network is constructed with a mesh, shards its parameters along an axis, and calls the axis's collectives in forward:

    class Net(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            self.tp = mesh.axis("tp")
            self.weight = self.tp.shard(torch.randn(512, 128), dim=1)

        def forward(self, x):
            part = self.tp.enter(x) @ self.weight
            return self.tp.all_reduce(part.sum(-1))

Values and gradients have separate placements (placement.py). The backward of each collective is another collective.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.devices import accelerator
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, make_mesh, parse_mesh, shard_boundaries
from manyhands.core.world import World
from manyhands.parallel.group.collectives import group_timeout
from manyhands.parallel.mesh.marks import BUFFERS, Parameter, ShardMark, axis_indices

if TYPE_CHECKING:
    from manyhands.parallel.mesh.placement import Placement

Module = TypeVar("Module", bound=nn.Module)


class Grid:
    """A mesh with its process groups. All processes must create the same meshes in the same order.

    Attributes:
        mesh: names and sizes of the axes.
        world: rank, size, device and backend of this process.
        coordinates: this process's index on each axis.
        batch: the number of samples in the current micro-batch over all processes; set by the training loop.
        seed: the seed of the random numbers that ops draw in the current micro-batch.
    """

    def __init__(self, mesh: Mesh, world: World) -> None:
        self.mesh, self.world = mesh, world
        self.coordinates = mesh.coordinates(world.rank)
        self.batch, self.seed = 1, 0
        self._groups: dict[tuple[int, ...], Any] = {}
        axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
        for count in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                self._groups[chosen] = None
                if len(chosen) < len(axes):
                    peers = sorted({tuple(mesh.peers(chosen, rank)) for rank in range(mesh.size)})
                    groups = [list(ranks) for ranks in peers]
                    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=group_timeout(world))
                    self._groups[chosen] = own

    def group(self, axes: Sequence[int]) -> Any:
        """Returns the process group of this process along the axes (indices). None is torch's default group."""
        return self._groups[tuple(axis for axis in axes if self.mesh.sizes[axis] > 1)]

    def parts(self, axes: Sequence[int]) -> int:
        return self.mesh.shard_count(axes)

    def place(self, axes: Sequence[int]) -> int:
        """Returns the index of this process in its group along the axes (indices)."""
        return self.mesh.shard_of(axes, self.world.rank)

    def first(self, axes: Sequence[int]) -> bool:
        """Returns True if this process is the first one in its group along the axes (indices)."""
        return all(self.coordinates[axis] == 0 for axis in axes)

    def axis(self, *names: str) -> "Axis":
        """Returns the axis with a name, or several axes combined into one. Raises UserError for an unknown name."""
        return Axis(self, names)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grid":
        return self

    def release(self) -> None:
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()


def open_mesh(sizes: str | Mapping[str, int] | Mesh, world: World | None = None) -> Grid:
    """Arranges all processes in a mesh. All processes must call this.

    Args:
        sizes: the axes: "dp=2,tp=2" or {"dp": 2, "tp": 2}. The last axis varies fastest.
        world: the processes; None: those of torch's default group, or this process alone if there is no group.

    Raises:
        UserError: `sizes` is not a mesh, or its size is not the number of processes.
    """
    mesh = (
        sizes if isinstance(sizes, Mesh) else parse_mesh(sizes, "mesh") if isinstance(sizes, str) else make_mesh(sizes)
    )
    world = world or _default_world()
    if mesh.size != world.size:
        hints = ("set sizes whose product is the number of processes, such as -n 4 --mesh dp=2,tp=2",)
        raise UserError(f"the mesh {mesh} is for {mesh.size} processes, but {world.size} are running", "mesh", hints)
    return Grid(mesh, world)


def _default_world() -> World:
    if not dist.is_initialized():
        return World()
    backend = str(dist.get_backend())
    kind = "cpu" if "gloo" in backend or "mpi" in backend else accelerator()
    device = kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"
    return World(dist.get_rank(), dist.get_world_size(), device=device, backend=backend)


class Axis:
    """An axis of a mesh, or several axes combined into one. All processes along it must call the same methods in order.

    With one process along the axis, collectives return their input.
    """

    def __init__(self, grid: Grid, names: Sequence[str]) -> None:
        self._grid, self._axes = grid, axis_indices(names, grid.mesh, "axis")
        if not self._axes:
            raise UserError("no mesh axis is given", "axis", (f"give an axis of the mesh {grid.mesh}",))

    @property
    def mesh(self) -> Grid:
        return self._grid

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the combined axes. The index on the last one varies fastest."""
        return tuple(self._grid.mesh.names[axis] for axis in self._axes)

    @property
    def size(self) -> int:
        return self._grid.parts(self._axes)

    @property
    def rank(self) -> int:
        """The index of this process along the axis, from 0."""
        return self._grid.place(self._axes)

    def __repr__(self) -> str:
        return f"Axis({','.join(self.names)}, {self.rank} of {self.size})"

    def shard(self, tensor: Tensor, dim: int = 0) -> Parameter:
        """Returns this process's shard of a tensor as a Parameter.

        All processes must pass the same full tensor (use the same seed). A parameter that is sharded over another axis
        can be sharded again in another dimension. Raises UserError if the tensor can't be sharded in dimension `dim`.
        """
        piece, mark = self._shard_and_mark(tensor, dim, getattr(tensor, "mark", None))
        made = Parameter(piece, tensor.requires_grad or not isinstance(tensor, nn.Parameter))
        made.mark = mark
        return made

    def shard_module(self, module: Module, **dims: int) -> Module:
        """Shards parameters and buffers of a layer in place: `tp.shard_module(nn.Linear(8, 6), weight=0, bias=0)`.

        The layer must hold the same full tensors on all processes. `dims` names tensors and the dimension to shard.
        Returns the layer. Raises UserError if the layer lacks a named tensor, or the dimension can't be sharded.
        """
        for name, dim in dims.items():
            tensor = getattr(module, name, None)
            if isinstance(tensor, nn.Parameter):
                setattr(module, name, self.shard(tensor, dim))
            elif name in module._buffers and tensor is not None:
                piece, mark = self._shard_and_mark(tensor, dim, None)
                setattr(module, name, piece)
                module.__dict__.setdefault(BUFFERS, {})[name] = mark
            else:
                hint = " or ".join(module.state_dict()) or "a layer with parameters"
                raise UserError(f"{type(module).__name__} has no {name} to shard", "shard_module", (f"use {hint}",))
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.num_features = len(module.running_mean)  # pyright: ignore - BatchNorm's
        return module

    def _shard_and_mark(self, tensor: Tensor, dim: int, before: ShardMark | None) -> tuple[Tensor, ShardMark]:
        dim = self._dim(tensor, dim, "shard")
        shape, cuts = tuple(tensor.shape), ()
        if before is not None:
            shape, cuts = before.shape or (), before.cuts
            if not shape or any(dim == other or set(names) & set(self.names) for other, names in cuts):
                raise UserError(f"dimension {dim} or axis {','.join(self.names)} is already sharded: {before}", "shard")
        length = tensor.shape[dim]
        if length < self.size:
            what = f"dimension {dim} has length {length}, too short for {self.size} processes along {self.names}"
            raise UserError(what, "shard", (f"shard another dimension of the shape {tuple(tensor.shape)}",))
        edges = shard_boundaries(length, self.size)
        piece = tensor.detach().narrow(dim, edges[self.rank], edges[self.rank + 1] - edges[self.rank])
        return piece.clone(memory_format=torch.contiguous_format), ShardMark((*cuts, (dim, self.names)), shape)

    def enter(self, x: Tensor) -> Tensor:
        """Returns x as the input of a sharded computation: identity in forward, all-reduce in backward.

        Each process computes one term of x's gradient, and the all-reduce sums these terms.
        """
        return self._convert(x, ("R", "R"), ("R", "P"), x.shape)

    def all_reduce(self, y: Tensor) -> Tensor:
        """Sums y over the axis: all-reduce in forward, identity in backward.

        Each process already has the gradient of the sum, which equals the gradient of its term; an all-reduce in
        backward would multiply it by `size`.
        """
        return self._convert(y, ("P", "R"), ("R", "R"), y.shape)

    def gather(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Concatenates the shards of all processes in dimension `dim`: all-gather in forward, slice in backward.

        All processes along the axis must apply the same computation to the result; before a sharded computation, use
        `tp.enter(tp.gather(x, dim))`. The lengths of the shards must be those that `scatter` returns. `length` is the
        length of the result in `dim`; None: the processes exchange the lengths of their shards.
        """
        dim = self._dim(x, dim, "gather")
        shape = list(x.shape)
        shape[dim] = self._full_length(x, dim, length)
        return self._convert(x, (dim, "R"), (dim, "R"), shape)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Returns this process's shard of x, equal on all processes: slice in forward, all-gather in backward."""
        dim = self._dim(x, dim, "scatter")
        return self._convert(x, ("R", dim), ("R", dim), x.shape)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sums x over the axis and returns this process's shard: reduce-scatter in forward, all-gather in backward.

        Equal to `all_reduce` followed by `scatter`, with half the traffic.
        """
        dim = self._dim(x, dim, "reduce_scatter")
        return self._convert(x, ("P", dim), ("R", dim), x.shape)

    def all_to_all(self, x: Tensor, cut: int, joined: int, length: int | None = None) -> Tensor:
        """Gathers x in dimension `joined` and shards it in dimension `cut`: all-to-all in forward and backward.

        Equal to `gather` along `joined` followed by `scatter` along `cut`, with a fraction of the traffic. `length` is
        the length of the result in `joined`; None: the processes exchange the lengths of their shards.
        """
        cut, joined = self._dim(x, cut, "all_to_all"), self._dim(x, joined, "all_to_all")
        if cut == joined:
            hints = ("give two different dimensions",)
            raise UserError(f"dimension {cut} can't be both split and concatenated", "all_to_all", hints)
        shape = list(x.shape)
        shape[joined] = self._full_length(x, joined, length)
        return self._convert(x, (joined, cut), (joined, cut), shape)

    def _convert(
        self,
        tensor: Tensor,
        values: "tuple[Placement, Placement]",
        gradients: "tuple[Placement, Placement]",
        whole: Sequence[int],
    ) -> Tensor:
        from manyhands.parallel.mesh.placement import Extent, convert_with_grad  # not loaded in data-parallel training

        def along(placement: "Placement") -> "tuple[Placement, ...]":
            return tuple(placement if axis in self._axes else "R" for axis in range(len(self._grid.mesh.axes)))

        before, after = (along(value) for value in values)
        leaving, coming = (along(gradient) for gradient in gradients)
        return convert_with_grad(tensor, (before, after), (leaving, coming), Extent(tuple(whole)), self._grid)

    def _dim(self, tensor: Tensor, dim: int, where: str) -> int:
        if not -tensor.dim() <= dim < tensor.dim():
            raise UserError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}", where)
        return dim % tensor.dim()

    def _full_length(self, piece: Tensor, dim: int, length: int | None) -> int:
        """Returns the length of all shards together in `dim`. Raises UserError if `scatter` returns other lengths."""
        here = piece.shape[dim]
        if self.size == 1:
            lengths = [here]
        elif length is None:
            mine = torch.tensor([here], device=piece.device)
            everybody = mine.new_empty(self.size)
            dist.all_gather_into_tensor(everybody, mine, group=self._grid.group(self._axes))
            lengths = everybody.tolist()
        else:
            lengths = _shard_lengths(length, self.size)
            lengths[self.rank] = here
        total = sum(lengths) if length is None else length
        if lengths != _shard_lengths(total, self.size):
            what = f"shards have lengths {lengths} in dimension {dim}, expected {_shard_lengths(total, self.size)}"
            raise UserError(what, f"gather over {','.join(self.names)}", ("use shard, scatter or reduce_scatter",))
        return total


def _shard_lengths(total: int, parts: int) -> list[int]:
    edges = shard_boundaries(total, parts)
    return [edges[number + 1] - edges[number] for number in range(parts)]

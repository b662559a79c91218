"""Splitting a network by hand: a handle on a mesh axis, with collectives whose gradients are right.

A network is constructed with a mesh, takes an axis of it, holds pieces of parameters and says itself where values are
put together:

    class Net(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            self.tp = mesh.axis("tp")
            self.weight = self.tp.shard(torch.randn(512, 128), dim=1)

        def forward(self, x):
            part = self.tp.enter(x) @ self.weight
            return self.tp.all_reduce(part.sum(-1))

Values and gradients are laid out separately (placement.py), so each collective has another one for its backward. Which
one follows from the chain rule alone: it is the adjoint of the forward one.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.devices import accelerator
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, bounds, make_mesh, parse_mesh
from manyhands.core.world import World
from manyhands.parallel.collectives import group_timeout
from manyhands.parallel.convert import convert_both
from manyhands.parallel.marks import Mark, Parameter, axis_numbers, mark_buffer
from manyhands.parallel.placement import Extent, Placement

Module = TypeVar("Module", bound=nn.Module)


class Grid:
    """This process's place in a mesh, and its groups. Made by all processes alike, in the same order.

    Attributes:
        mesh: the axes.
        world: who takes part; as many as the mesh has places.
        coordinates: this process's place on each axis.
        batch: samples of the pass at hand, over all processes; the executor sets it.
    """

    def __init__(self, mesh: Mesh, world: World) -> None:
        self.mesh, self.world = mesh, world
        self.coordinates = mesh.coordinates(world.rank)
        self.batch = 1
        self._groups: dict[tuple[int, ...], Any] = {}
        axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
        for count in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                self._groups[chosen] = None if len(chosen) == len(axes) else self._make(chosen)

    def _make(self, axes: tuple[int, ...]) -> Any:
        groups = sorted({tuple(self.mesh.peers(axes, rank)) for rank in range(self.mesh.size)})
        patience = group_timeout(self.world)
        return dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout=patience)[0]

    def group(self, axes: Sequence[int]) -> Any:
        """The process group along some axes that this process is in; None is torch's word for all processes."""
        return self._groups[tuple(axis for axis in axes if self.mesh.sizes[axis] > 1)]

    def parts(self, axes: Sequence[int]) -> int:
        return self.mesh.parts(axes)

    def place(self, axes: Sequence[int]) -> int:
        """This process's place among them."""
        return self.mesh.place(axes, self.world.rank)

    def first(self, axes: Sequence[int]) -> bool:
        """True on the first process along some axes."""
        return all(self.coordinates[axis] == 0 for axis in axes)

    def axis(self, *names: str) -> "Axis":
        """A handle on an axis, or several as if they were one: `mesh.axis("tp")`. Raises UserError: there is none."""
        return Axis(self, names)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grid":
        """Itself: a network may be copied, the processes that run it can't."""
        return self

    def release(self) -> None:
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()


def open_mesh(sizes: str | Mapping[str, int] | Mesh, world: World | None = None) -> Grid:
    """The processes of this run as a mesh, "dp=2,tp=2" or {"dp": 2, "tp": 2}, major to minor; all call it alike.

    They are those of `world`, or else of torch.distributed's group, or this one alone. Raises UserError: it is no mesh,
    or not of as many processes as there are.
    """
    mesh = (
        sizes if isinstance(sizes, Mesh) else parse_mesh(sizes, "mesh") if isinstance(sizes, str) else make_mesh(sizes)
    )
    world = world or _present_world()
    if mesh.size != world.size:
        hints = ("make the product of the sizes equal the processes, such as -n 4 --mesh dp=2,tp=2",)
        raise UserError(f"the mesh {mesh} is for {mesh.size} processes, but {world.size} are running", "mesh", hints)
    return Grid(mesh, world)


def _present_world() -> World:
    if not dist.is_initialized():
        return World()
    backend = str(dist.get_backend())
    kind = "cpu" if "gloo" in backend or "mpi" in backend else accelerator()
    device = kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"
    return World(dist.get_rank(), dist.get_world_size(), device=device, backend=backend)


class Axis:
    """One axis of a mesh, or several as if they were one. On one process every method returns its input.

    Every process along the axis must call the same methods in the same order.
    """

    def __init__(self, grid: Grid, names: Sequence[str]) -> None:
        self._grid, self._axes = grid, axis_numbers(names, grid.mesh, "axis")
        if not self._axes:
            raise UserError("no axis is named", "axis", (f"name an axis of the mesh {grid.mesh}",))

    @property
    def mesh(self) -> Grid:
        return self._grid

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the mesh's axes, major to minor."""
        return tuple(self._grid.mesh.names[axis] for axis in self._axes)

    @property
    def size(self) -> int:
        return self._grid.parts(self._axes)

    @property
    def rank(self) -> int:
        """This process's place among them, from 0."""
        return self._grid.place(self._axes)

    def __repr__(self) -> str:
        return f"Axis({','.join(self.names)}, {self.rank} of {self.size})"

    def shard(self, tensor: Tensor, dim: int = 0) -> Parameter:
        """This process's piece of a whole tensor, as a parameter that is marked as cut.

        Every process must make the same whole tensor; with the same seed it does. So the network starts as it would on
        one process. A parameter that is cut along another axis already is cut once more, in another dimension. Raises
        UserError: there is no such dimension, it is cut already, or shorter than the axis has processes.
        """
        piece, mark = self._piece(tensor, dim, getattr(tensor, "mark", None))
        made = Parameter(piece, tensor.requires_grad or not isinstance(tensor, nn.Parameter))
        made.mark = mark
        return made

    def shard_module(self, module: Module, **dims: int) -> Module:
        """Cuts parameters and buffers of a whole layer: `tp.shard_module(nn.Linear(8, 6), weight=0, bias=0)`.

        The layer, equal on all processes, is changed and returned; of each parameter or buffer that is cut, give the
        dimension.
        """
        for name, dim in dims.items():
            tensor = getattr(module, name, None)
            if isinstance(tensor, nn.Parameter):
                setattr(module, name, self.shard(tensor, dim))
            elif name in module._buffers and tensor is not None:
                piece, mark = self._piece(tensor, dim, None)
                setattr(module, name, piece)
                mark_buffer(module, name, mark)
            else:
                known = ", ".join(word for word, _ in [*module.named_parameters(), *module.named_buffers()])
                raise UserError(f"{type(module).__name__} has no {name} to shard", "shard_module", (f"found: {known}",))
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.num_features = len(module.running_mean)  # pyright: ignore - BatchNorm's
        return module

    def _piece(self, tensor: Tensor, dim: int, before: Mark | None) -> tuple[Tensor, Mark]:
        dim = self._dim(tensor, dim, "shard")
        shape, cuts = tuple(tensor.shape), ()
        if before is not None:
            shape, cuts = before.shape or (), before.cuts
            if not shape or any(dim == other or set(names) & set(self.names) for other, names in cuts):
                raise UserError(f"dimension {dim} or the axis {self.names} is already sharded: {before}", "shard")
        length = tensor.shape[dim]
        if length < self.size:
            what = f"dimension {dim} has length {length}, too short for {self.size} processes along {self.names}"
            raise UserError(what, "shard", (f"the tensor's shape is {tuple(tensor.shape)}", "shard another dimension"))
        edges = bounds(length, self.size)
        piece = tensor.detach().narrow(dim, edges[self.rank], edges[self.rank + 1] - edges[self.rank])
        return piece.clone(memory_format=torch.contiguous_format), Mark((*cuts, (dim, self.names)), shape)

    def enter(self, x: Tensor) -> Tensor:
        """Marks x as the input of work that is split over the axis: identity in forward, all-reduce in backward.

        Each process computes only a part of x's gradient; the all-reduce sums the parts. Conjugate of `all_reduce`.
        """
        return self._turn(x, ("R", "R"), ("R", "P"), x.shape)

    def all_reduce(self, y: Tensor) -> Tensor:
        """Where split work comes together: forward a sum over the axis, backward nothing.

        Each process's y is a term of the sum. The derivative of a sum by each of its terms is one, so each term's
        gradient is the sum's, which every process has. (Adding those up would count them `size` times.) Conjugate of
        `enter`.
        """
        return self._turn(y, ("P", "R"), ("R", "R"), y.shape)

    def gather(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Pieces become the whole: forward an all-gather, backward a slice.

        What follows must do the same work on every process along the axis, so that each has the whole's gradient; a
        piece's gradient is its slice of that. Where what follows is split again, write `tp.enter(tp.gather(x, dim))`.
        Conjugate of `scatter`.

        Pieces are as `scatter` gives them: lengths differ by one at most. Without the whole's length in `dim` the
        processes tell each other, in a small message.
        """
        dim = self._dim(x, dim, "gather")
        shape = list(x.shape)
        shape[dim] = self._length(x, dim, length)
        return self._turn(x, (dim, "R"), (dim, "R"), shape)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """The whole becomes pieces: forward a slice, backward an all-gather.

        x is whole and equal on every process; each keeps its piece. What comes back is the gradient of the piece, and
        the whole's gradient is made of all pieces'. Conjugate of `gather`.
        """
        dim = self._dim(x, dim, "scatter")
        return self._turn(x, ("R", dim), ("R", dim), x.shape)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """A sum of which each process keeps a piece: forward a reduce-scatter, backward an all-gather.

        The same as `all_reduce` and then `scatter`, with half the traffic: each process's x is a term, whose gradient
        is the whole's, and that is made of all pieces' gradients. Conjugate of `enter(gather(x))`.
        """
        dim = self._dim(x, dim, "reduce_scatter")
        return self._turn(x, ("P", dim), ("R", dim), x.shape)

    def all_to_all(self, x: Tensor, cut: int, joined: int, length: int | None = None) -> Tensor:
        """Pieces in one dimension become pieces in another: forward an all-to-all, backward one the other way.

        The same as `gather` in one dimension and then `scatter` in the other, with a fraction of the traffic. Its own
        conjugate, with the dimensions exchanged. `cut` is whole and is cut, `joined` is put together; without the
        whole's length in it the processes tell each other, in a small message.
        """
        cut, joined = self._dim(x, cut, "all_to_all"), self._dim(x, joined, "all_to_all")
        if cut == joined:
            hints = ("give two different dimensions",)
            raise UserError(f"dimension {cut} can't be both split and concatenated", "all_to_all", hints)
        shape = list(x.shape)
        shape[joined] = self._length(x, joined, length)
        return self._turn(x, (joined, cut), (joined, cut), shape)

    def _turn(
        self,
        tensor: Tensor,
        values: tuple[Placement, Placement],
        gradients: tuple[Placement, Placement],
        whole: Sequence[int],
    ) -> Tensor:
        def along(placement: Placement) -> tuple[Placement, ...]:
            return tuple(placement if axis in self._axes else "R" for axis in range(len(self._grid.mesh.axes)))

        before, after = (along(value) for value in values)
        leaving, coming = (along(gradient) for gradient in gradients)
        return convert_both(tensor, (before, after), (leaving, coming), Extent(tuple(whole)), self._grid)

    def _dim(self, tensor: Tensor, dim: int, where: str) -> int:
        if not -tensor.dim() <= dim < tensor.dim():
            raise UserError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}", where)
        return dim % tensor.dim()

    def _length(self, piece: Tensor, dim: int, length: int | None) -> int:
        """The whole's length; refused by all processes alike where the pieces' lengths are not those of a cut."""
        here = piece.shape[dim]
        if self.size == 1:
            lengths = [here]
        elif length is None:
            mine = torch.tensor([here], device=piece.device)
            everybody = mine.new_empty(self.size)
            dist.all_gather_into_tensor(everybody, mine, group=self._grid.group(self._axes))
            lengths = everybody.tolist()
        else:
            lengths = _lengths(length, self.size)
            lengths = (
                lengths if lengths[self.rank] == here else [*lengths[: self.rank], here, *lengths[self.rank + 1 :]]
            )
        total = sum(lengths) if length is None else length
        if lengths != _lengths(total, self.size):
            what = f"pieces of lengths {lengths} in dimension {dim} don't match {_lengths(total, self.size)}"
            raise UserError(what, f"gather over {','.join(self.names)}", ("use shard, scatter or reduce_scatter",))
        return total


def _lengths(total: int, parts: int) -> list[int]:
    edges = bounds(total, parts)
    return [edges[number + 1] - edges[number] for number in range(parts)]

"""Placements of tensors along mesh axes, and the collectives that convert one layout into another.

Along each axis a tensor is replicated ("R"), partial ("P": each process holds one term of a sum) or sharded (the index
of the sharded dimension). A layout has a placement for each mesh axis, major to minor.

A value and its gradient have separate placements. A `Side` names such a pair: a dimension (both sharded), WHOLE
(both replicated), SPREAD (value replicated, gradient partial: the op uses the full input for a part of its work) and
SUM (value partial, gradient replicated).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.mesh import Mesh, TensorLayout, shard_boundaries
from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.core.world import World

Placement = int | Literal["R", "P"]
Layout = tuple[Placement, ...]
Side = int | Literal["R", "B", "P"]

WHOLE: Side = "R"
SPREAD: Side = "B"
SUM: Side = "P"


def value_layout(sides: Sequence[Side]) -> Layout:
    return tuple("R" if side == "B" else side for side in sides)


def gradient_layout(sides: Sequence[Side]) -> Layout:
    return tuple("P" if side == "B" else "R" if side == "P" else side for side in sides)


@dataclass(frozen=True)
class Extent:
    """The shape of an unsharded tensor. Its dimension 0 may grow with the number of samples in the batch."""

    dims: tuple[int, ...]  # lengths; if `rows` is set, the batch determines dimension 0
    rows: int = 0  # rows of dimension 0 per sample; 0 if dimension 0 doesn't grow with the batch

    def edges(self, dim: int, parts: int, batch: int) -> list[int]:
        """Returns the `parts` + 1 boundaries of the shards of dimension `dim`, for a batch of `batch` samples."""
        if dim == 0 and self.rows:
            return [edge * self.rows for edge in shard_boundaries(batch, parts)]
        return shard_boundaries(self.dims[dim], parts)

    def values(self, batch: int) -> int:
        return math.prod((batch * self.rows, *self.dims[1:]) if self.rows else self.dims)


@dataclass(frozen=True)
class ConversionStep:
    """One operation of a conversion between layouts, on this process's shard."""

    # the name of a collective, or slice, pad (zeros around the shard), keep_first (zeros on all but the first process)
    kind: str
    axes: tuple[int, ...]  # indices of the mesh axes whose processes form the group, ascending
    dim: int = 0  # the dimension that is gathered or sharded; for all_to_all the dimension that is sharded
    joined: int = 0  # for all_to_all, the dimension that is gathered
    outer: tuple[int, ...] = ()  # axes that already shard `dim`, more major than `axes`
    joined_outer: tuple[int, ...] = ()  # the same for `joined`

    @property
    def communicates(self) -> bool:
        return self.kind not in {"slice", "pad", "keep_first"}


def conversion_steps(source: Layout, target: Layout) -> list[ConversionStep]:
    """Returns the steps that convert layout `source` into `target`: at most one collective per dimension and kind.

    The axes that shard a dimension are nested, major to minor. Steps remove and add axes at the minor end.
    """
    current = list(source)
    found: list[ConversionStep] = []
    sums = tuple(a for a, here in enumerate(current) if here == "P" and target[a] == "R")
    if sums:
        found.append(ConversionStep("all_reduce", sums))
        for axis in sums:
            current[axis] = "R"
    found += _all_to_all_steps(current, target)
    found += _steps_removing_axes(current, target)
    found += _steps_adding_axes(current, target)
    first = tuple(a for a, here in enumerate(current) if here == "R" and target[a] == "P")
    return [*found, ConversionStep("keep_first", first)] if first else found


def _axes_of(layout: Sequence[Placement], dim: int) -> list[int]:
    return [axis for axis, here in enumerate(layout) if here == dim]


def _unchanged_axes(current: Sequence[Placement], target: Layout, dim: int) -> int:
    """Returns the number of leading axes that shard dimension `dim` in both layouts."""
    pairs = zip(_axes_of(current, dim), _axes_of(target, dim), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _all_to_all_steps(current: list[Placement], target: Layout) -> list[ConversionStep]:
    """Returns an all-to-all for each axis that moves between the minor ends of two dimensions. Updates `current`."""
    found: list[ConversionStep] = []
    for axis, there in enumerate(target):
        here = current[axis]
        if not isinstance(here, int) or not isinstance(there, int) or here == there:
            continue
        before, after = _axes_of(current, here), _axes_of(target, there)
        place = after.index(axis)
        if before[-1] == axis and _axes_of(current, there) == after[:place]:
            outer, joined_outer = tuple(after[:place]), tuple(before[:-1])
            found.append(ConversionStep("all_to_all", (axis,), there, here, outer, joined_outer))
            current[axis] = there
    return found


def _steps_removing_axes(current: list[Placement], target: Layout) -> list[ConversionStep]:
    found: list[ConversionStep] = []
    for dim in sorted({here for here in current if isinstance(here, int)}):
        leaving = _axes_of(current, dim)[_unchanged_axes(current, target, dim) :]
        runs = itertools.groupby(reversed(leaving), lambda axis: "pad" if target[axis] == "P" else "all_gather")
        for kind, run in runs:
            axes = tuple(sorted(run))
            for axis in axes:
                current[axis] = "P" if kind == "pad" else "R"
            found.append(ConversionStep(kind, axes, dim, outer=tuple(_axes_of(current, dim))))
    return found


def _steps_adding_axes(current: list[Placement], target: Layout) -> list[ConversionStep]:
    found: list[ConversionStep] = []
    for dim in sorted({there for there in target if isinstance(there, int)}):
        coming = _axes_of(target, dim)[len(_axes_of(current, dim)) :]
        for kind, run in itertools.groupby(coming, lambda axis: "reduce_scatter" if current[axis] == "P" else "slice"):
            axes, outer = tuple(run), tuple(_axes_of(current, dim))
            for axis in axes:
                current[axis] = dim
            found.append(ConversionStep(kind, axes, dim, outer=outer))
    return found


@dataclass(frozen=True)
class ConversionCollective:
    """Kind, axes and size of one collective that a conversion between layouts runs."""

    kind: str
    axes: tuple[int, ...]  # indices of the mesh axes of its group
    values: int  # values in each process's input, padding included


def conversion_collectives(
    source: Layout, target: Layout, extent: Extent, mesh: Mesh, batch: int, rank: int = 0
) -> list[ConversionCollective]:
    """Returns the collectives that convert layout `source` into `target`, with the sizes of their inputs on `rank`."""
    sizes = [_shard_length(extent, mesh, batch, rank, dim, _axes_of(source, dim)) for dim in range(len(extent.dims))]
    found: list[ConversionCollective] = []
    for step in conversion_steps(source, target):
        before = list(sizes)
        group = mesh.shard_count(step.axes)
        if step.kind in {"slice", "reduce_scatter", "all_to_all"}:
            sizes[step.dim] = _shard_length(extent, mesh, batch, rank, step.dim, [*step.outer, *step.axes])
        if step.kind == "all_to_all":
            sizes[step.joined] = _shard_length(extent, mesh, batch, rank, step.joined, list(step.joined_outer))
        if step.kind in {"all_gather", "pad"}:
            sizes[step.dim] = _shard_length(extent, mesh, batch, rank, step.dim, list(step.outer))
        if step.kind == "all_gather":
            before[step.dim] = max(group_lengths(extent, mesh, batch, rank, step.dim, step.outer, step.axes))
        if step.kind == "reduce_scatter":
            before[step.dim] = max(group_lengths(extent, mesh, batch, rank, step.dim, step.outer, step.axes)) * group
        if step.communicates and group > 1:
            found.append(ConversionCollective(step.kind, step.axes, math.prod(before)))
    return found


def _shard_length(extent: Extent, mesh: Mesh, batch: int, rank: int, dim: int, axes: Sequence[int]) -> int:
    edges = extent.edges(dim, mesh.shard_count(axes), batch)
    place = mesh.shard_of(axes, rank)
    return edges[place + 1] - edges[place]


def group_lengths(
    extent: Extent, mesh: Mesh, batch: int, rank: int, dim: int, outer: Sequence[int], axes: Sequence[int]
) -> list[int]:
    """Returns the lengths of `dim` on the processes of `rank`'s group along `axes`, if sharded along `outer` too."""
    parts = mesh.shard_count(axes)
    edges = extent.edges(dim, mesh.shard_count(outer) * parts, batch)
    first = mesh.shard_of(outer, rank) * parts
    return [edges[first + number + 1] - edges[first + number] for number in range(parts)]


class _GridLike(Protocol):
    """The attributes and methods of `grid.Grid` that conversions use."""

    mesh: Mesh
    world: World
    batch: int

    def group(self, axes: Sequence[int], /) -> Any: ...
    def parts(self, axes: Sequence[int], /) -> int: ...
    def place(self, axes: Sequence[int], /) -> int: ...


def convert(tensor: Tensor, source: Layout, target: Layout, extent: Extent, grid: _GridLike) -> Tensor:
    """Converts a process's shard from layout `source` to `target`, maybe as a view. A collective without autograd."""
    for step in conversion_steps(source, target):
        tensor = _run_step(step, tensor, extent, grid)
    return tensor


def _run_step(step: ConversionStep, tensor: Tensor, extent: Extent, grid: _GridLike) -> Tensor:
    if grid.parts(step.axes) == 1:
        return tensor
    before, place, dim = CLOCK.start_phase(COMMUNICATION), grid.place(step.axes), step.dim
    if step.kind == "keep_first":
        converted = tensor if place == 0 else torch.zeros_like(tensor)
    elif step.kind == "all_reduce":
        converted = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(converted, group=grid.group(step.axes))
    else:
        sizes = group_lengths(extent, grid.mesh, grid.batch, grid.world.rank, dim, step.outer, step.axes)
        start = sum(sizes[:place])
        if step.kind == "slice":
            converted = tensor.narrow(dim, start, sizes[place])
        elif step.kind == "pad":
            converted = tensor.new_zeros(*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :])
            converted.narrow(dim, start, sizes[place]).copy_(tensor)
        elif step.kind == "all_gather":
            converted = _all_gather(step, tensor, sizes, grid)
        elif step.kind == "reduce_scatter":
            converted = _reduce_scatter(step, tensor, sizes, grid)
        else:
            joined = group_lengths(
                extent, grid.mesh, grid.batch, grid.world.rank, step.joined, step.joined_outer, step.axes
            )
            converted = _all_to_all(step, tensor, sizes, joined, grid)
    CLOCK.start_phase(before)
    return converted


def _all_gather(step: ConversionStep, tensor: Tensor, sizes: list[int], grid: _GridLike) -> Tensor:
    mine = _padded(tensor, step.dim, max(sizes)).contiguous()
    everybody = mine.new_empty(len(sizes), *mine.shape)
    dist.all_gather_into_tensor(everybody.view(-1), mine.view(-1), group=grid.group(step.axes))
    return torch.cat([part.narrow(step.dim, 0, size) for part, size in zip(everybody, sizes, strict=True)], step.dim)


def _reduce_scatter(step: ConversionStep, tensor: Tensor, sizes: list[int], grid: _GridLike) -> Tensor:
    parts = torch.stack([_padded(part, step.dim, max(sizes)) for part in tensor.split(sizes, step.dim)]).contiguous()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), group=grid.group(step.axes))
    return mine.narrow(step.dim, 0, sizes[grid.place(step.axes)])


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])], dim)


def _all_to_all(step: ConversionStep, tensor: Tensor, cut: list[int], joined: list[int], grid: _GridLike) -> Tensor:
    sent = [part.contiguous() for part in tensor.split(cut, step.dim)]
    shape = list(tensor.shape)
    shape[step.dim] = cut[grid.place(step.axes)]
    shapes = [[*shape[: step.joined], length, *shape[step.joined + 1 :]] for length in joined]
    counts = [torch.Size(one).numel() for one in shapes]
    received = tensor.new_empty(sum(counts))
    flat = torch.cat([part.view(-1) for part in sent])
    dist.all_to_all_single(received, flat, counts, [part.numel() for part in sent], group=grid.group(step.axes))
    parts = [part.view(one) for part, one in zip(received.split(counts), shapes, strict=True)]
    return torch.cat(parts, step.joined)


class _Conversion(torch.autograd.Function):
    """Converts a value between two layouts in forward, and its gradient between two other layouts in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, layouts: tuple[Layout, Layout, Layout, Layout], extent: Extent, grid: _GridLike
    ) -> Tensor:
        ctx.layouts, ctx.extent, ctx.grid = layouts, extent, grid
        result = convert(tensor, layouts[0], layouts[1], extent, grid)
        # A view: autograd refuses to change it in place, and other ops may read the same memory.
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = convert(gradients[0].contiguous(), ctx.layouts[3], ctx.layouts[2], ctx.extent, ctx.grid)
        return back, None, None, None


def convert_with_grad(
    tensor: Tensor, values: tuple[Layout, Layout], gradients: tuple[Layout, Layout], extent: Extent, grid: _GridLike
) -> Tensor:
    """Converts this process's shard to another layout, and its gradient in backward. A collective in both passes.

    `values`: layouts of (the tensor, the result). `gradients`: layouts of the gradients of (the tensor, the result).
    """
    result: Any = _Conversion.apply(tensor, (*values, *gradients), extent, grid)
    return result


def gather_full(tensor: Tensor, layout: TensorLayout, grid: _GridLike) -> Tensor:
    """Gathers the shards of a parameter or buffer. Returns the full tensor [layout.shape]. A collective."""
    if not layout.cuts:
        return tensor
    cut = {axis: dim for dim, axes in layout.cuts for axis in axes}
    here: Layout = tuple(cut.get(axis, "R") for axis in range(len(grid.mesh.axes)))
    sizes = [stop - start for start, stop in layout.region(grid.mesh, grid.world.rank)]
    everywhere: Layout = tuple("R" for _ in here)
    return convert(tensor.reshape(sizes), here, everywhere, Extent(layout.view), grid).reshape(layout.shape)

"""The steps of the placement algebra on real tensors."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.core.world import World
from manyhands.parallel.placement import Extent, Layout, Step, group_sizes, steps_between


class _Places(Protocol):
    """What a conversion asks of the processes of a mesh; see `grid.Grid`."""

    mesh: Mesh
    world: World
    batch: int

    def group(self, axes: Sequence[int], /) -> Any: ...
    def parts(self, axes: Sequence[int], /) -> int: ...
    def place(self, axes: Sequence[int], /) -> int: ...
    def first(self, axes: Sequence[int], /) -> bool: ...


def convert(tensor: Tensor, source: Layout, target: Layout, extent: Extent, grid: _Places) -> Tensor:
    """This process's piece under another layout, of the same dtype; it may be a view; not differentiable."""
    for step in steps_between(source, target):
        tensor = _take(step, tensor, extent, grid)
    return tensor


def _take(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:
    if grid.parts(step.axes) == 1:
        return tensor
    before = CLOCK.to(COMMUNICATION)
    taken = _STEPS[step.kind](step, tensor, extent, grid)
    CLOCK.to(before)
    return taken


def _sizes(step: Step, extent: Extent, grid: _Places) -> list[int]:
    return group_sizes(extent, grid.mesh, grid.batch, grid.world.rank, step.dim, step.outer, step.axes)


def _all_reduce(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:  # noqa: ARG001 - as all steps
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=grid.group(step.axes))
    return total


def _all_gather(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:
    sizes = _sizes(step, extent, grid)
    mine = _padded(tensor, step.dim, max(sizes)).contiguous()
    everybody = mine.new_empty(len(sizes), *mine.shape)
    dist.all_gather_into_tensor(everybody.view(-1), mine.view(-1), group=grid.group(step.axes))
    return torch.cat([part.narrow(step.dim, 0, size) for part, size in zip(everybody, sizes, strict=True)], step.dim)


def _reduce_scatter(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:
    sizes = _sizes(step, extent, grid)
    parts = torch.stack([_padded(part, step.dim, max(sizes)) for part in tensor.split(sizes, step.dim)]).contiguous()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), group=grid.group(step.axes))
    return mine.narrow(step.dim, 0, sizes[grid.place(step.axes)])


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros after its end in one dimension: collectives want equal pieces."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _all_to_all(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:
    cut = _sizes(step, extent, grid)
    joined = group_sizes(
        extent, grid.mesh, grid.batch, grid.world.rank, step.joined, step.joined_outer, step.axes
    )  # fmt: skip
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


def _slice(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:
    sizes = _sizes(step, extent, grid)
    place = grid.place(step.axes)
    return tensor.narrow(step.dim, sum(sizes[:place]), sizes[place])


def _pad(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:
    sizes = _sizes(step, extent, grid)
    place = grid.place(step.axes)
    shape = list(tensor.shape)
    shape[step.dim] = sum(sizes)
    whole = tensor.new_zeros(shape)
    whole.narrow(step.dim, sum(sizes[:place]), sizes[place]).copy_(tensor)
    return whole


def _keep_first(step: Step, tensor: Tensor, extent: Extent, grid: _Places) -> Tensor:  # noqa: ARG001 - as all steps
    return tensor if grid.first(step.axes) else torch.zeros_like(tensor)


_STEPS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "keep_first": _keep_first,
}


class _Conversion(torch.autograd.Function):
    """A conversion whose backward takes the gradient the other way, between layouts of its own."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, layouts: tuple[Layout, Layout, Layout, Layout], extent: Extent, grid: _Places
    ) -> Tensor:
        ctx.layouts, ctx.extent, ctx.grid = layouts, extent, grid
        result = convert(tensor, layouts[0], layouts[1], extent, grid)
        # A view would let an op that works in place change what other ops read.
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = convert(gradients[0].contiguous(), ctx.layouts[3], ctx.layouts[2], ctx.extent, ctx.grid)
        return back, None, None, None


def convert_both(
    tensor: Tensor, values: tuple[Layout, Layout], gradients: tuple[Layout, Layout], extent: Extent, grid: _Places
) -> Tensor:
    """A differentiable conversion of this process's piece.

    `values` are the value's layouts before and after, `gradients` the gradient's before (as it is to leave) and after
    (as it comes in).
    """
    result: Any = _Conversion.apply(tensor, (*values, *gradients), extent, grid)
    return result


def gather_full(tensor: Tensor, layout: TensorLayout, grid: _Places) -> Tensor:
    """The whole of a parameter or buffer [layout.shape] of which this process has a piece; a collective."""
    if not layout.cuts:
        return tensor
    cut = {axis: dim for dim, axes in layout.cuts for axis in axes}
    here: Layout = tuple(cut.get(axis, "R") for axis in range(len(grid.mesh.axes)))
    sizes = [stop - start for start, stop in layout.region(grid.mesh, grid.world.rank)]
    everywhere: Layout = tuple("R" for _ in here)
    return convert(tensor.reshape(sizes), here, everywhere, Extent(layout.view), grid).reshape(layout.shape)

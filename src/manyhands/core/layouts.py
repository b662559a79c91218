"""Which piece of a tensor lies where: plain data that the executor, checkpoints and the planner share."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh


def bounds(length: int, parts: int) -> list[int]:
    """Where `parts` pieces of a length begin and end, [parts + 1]; sizes differ by one at most.

    Cutting by a, then each piece by b, gives other pieces than cutting by a·b at once where the length is no multiple
    (8 by 3, then by 2: not as by 6), so a dimension that lies over several axes is cut once, by all of them.
    """
    return [length * number // parts for number in range(parts + 1)]


def split_dimensions(shape: tuple[int, ...], view: tuple[int, ...]) -> list[range] | None:
    """For each dimension of a shape the dimensions of the view that it is split up into; None where it isn't so."""
    if len(shape) == len(view):
        return [range(dim, dim + 1) for dim in range(len(view))] if shape == view else None
    groups: list[range] = []
    position = 0
    for length in shape:
        start, product = position, 1
        while position < len(view) and (position == start or product < length):
            product *= view[position]
            position += 1
        if product != length:
            return None
        groups.append(range(start, position))
    if groups and set(view[position:]) == {1}:
        groups[-1], position = range(groups[-1].start, len(view)), len(view)
    return groups if position == len(view) else None


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor of a network (or of its optimizer) is cut over a mesh."""

    shape: tuple[int, ...]  # of the whole tensor, as one process alone has it
    # the shape that is cut: `shape`, or that with dimensions split up, where, say, heads lie within one
    view: tuple[int, ...]
    # for each dimension of the view that is cut: (dimension, numbers of the mesh's axes, ascending)
    cuts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    gradient_axes: tuple[int, ...] = ()  # numbers of the axes over which each process's gradient is a part of a sum

    @property
    def sharded_axes(self) -> set[int]:
        """Axes along which processes hold different pieces."""
        return {axis for _, axes in self.cuts for axis in axes}

    def region(self, mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) in each dimension of the view of the piece that a rank holds."""
        region = [(0, length) for length in self.view]
        for dim, axes in self.cuts:
            edges = bounds(self.view[dim], mesh.parts(axes))
            place = mesh.place(axes, rank)
            region[dim] = (edges[place], edges[place + 1])
        return tuple(region)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The piece's shape as the network holds it: in the dimensions of `shape`."""
        sizes = [stop - start for start, stop in self.region(mesh, rank)]
        groups = split_dimensions(self.shape, self.view)
        if groups is None:
            raise ValueError(f"the view {self.view} doesn't split up dimensions of {self.shape}")
        return tuple(math.prod(sizes[position] for position in group) for group in groups)

    def first_holder(self, mesh: Mesh, rank: int) -> int:
        """The lowest of the ranks that hold the same piece; it is the one that saves it."""
        cut = self.sharded_axes
        return mesh.rank(place if axis in cut else 0 for axis, place in enumerate(mesh.coordinates(rank)))

    def nearest(self, mesh: Mesh, near: range) -> dict[int, tuple[tuple[int, int], ...]]:
        """Regions that together are the whole, once, each by a rank that holds it: one of `near`, where one does."""
        free = set(range(len(mesh.axes))) - self.sharded_axes
        found = [(mesh.peers(free, first), region) for first, region in self.pieces(mesh)]
        return {min(holders, key=lambda rank: (rank not in near, rank)): region for holders, region in found}

    def pieces(self, mesh: Mesh) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """(rank, region) of each different piece, by its first holder; together they are the whole, once."""
        cut = self.sharded_axes
        for place in itertools.product(*(range(size) if axis in cut else (0,) for axis, size in enumerate(mesh.sizes))):
            rank = mesh.rank(place)
            yield rank, self.region(mesh, rank)

    def as_plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "shape": list(self.shape),
            "view": list(self.view),
            "cuts": [[dim, list(axes)] for dim, axes in self.cuts],
            "gradient_axes": list(self.gradient_axes),
        }


def unsharded(shape: tuple[int, ...], gradient_axes: tuple[int, ...] = ()) -> TensorLayout:
    """The layout of a tensor that every process holds whole."""
    return TensorLayout(shape, shape, (), gradient_axes)


def _count(value: Any) -> int:
    """A length or a number of an axis, as JSON has it.

    Raises:
        ValueError: it is something else, or beyond what a tensor can have.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value} is not a length")
    return value


def layout_from_plain(content: Any, mesh: Mesh, where: str) -> TensorLayout:
    """Reads what `as_plain` wrote.

    Raises:
        UserError: it is no layout on this mesh.
    """
    try:
        layout = TensorLayout(
            tuple(map(_count, content["shape"])),
            tuple(map(_count, content["view"])),
            tuple((_count(dim), tuple(map(_count, axes))) for dim, axes in content["cuts"]),
            tuple(map(_count, content.get("gradient_axes", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("invalid tensor layout", where, ("create the plan or checkpoint again",)) from error
    axes = [axis for _, cut in layout.cuts for axis in cut]
    dims = [dim for dim, _ in layout.cuts]
    sound = (
        split_dimensions(layout.shape, layout.view) is not None
        and len(set(axes)) == len(axes)
        and len(set(dims)) == len(dims)
        and all(0 <= axis < len(mesh.axes) for axis in (*axes, *layout.gradient_axes))
        and all(0 <= dim < len(layout.view) and list(cut) == sorted(cut) for dim, cut in layout.cuts)
        and all(length >= 0 for length in (*layout.shape, *layout.view))
    )
    if not sound:
        hints = ("create the plan or checkpoint again",)
        raise UserError(f"the tensor layout doesn't fit the mesh {mesh}", where, hints)
    return layout

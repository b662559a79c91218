"""The algebra of placements: what lies where along each mesh axis, and the collectives that turn one into another.

Along one axis a tensor is whole on every process ("R"), a sum of which each process holds one term ("P"), or cut in
one of its dimensions (that dimension's number). A layout is a placement for each axis of the mesh, major to minor.

Values and gradients are laid out separately. An op that uses a whole input for a part of its work gives back a part of
that input's gradient, so four sides of a value and its gradient are in use: a dimension (both cut), WHOLE (both whole),
SPREAD (the value whole, the gradient a term of a sum) and SUM (the value a term, the gradient whole).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.core.mesh import Mesh, bounds

Placement = int | Literal["R", "P"]
Layout = tuple[Placement, ...]
Side = int | Literal["R", "B", "P"]

WHOLE: Side = "R"
SPREAD: Side = "B"
SUM: Side = "P"


def value_of(sides: Sequence[Side]) -> Layout:
    """The layout of the value."""
    return tuple("R" if side == "B" else side for side in sides)


def gradient_of(sides: Sequence[Side]) -> Layout:
    """The layout of the gradient: a whole value's may be a sum, and a sum's is whole."""
    return tuple("P" if side == "B" else "R" if side == "P" else side for side in sides)


@dataclass(frozen=True)
class Extent:
    """The shape of a whole tensor."""

    dims: tuple[int, ...]  # lengths; the first one is of a sample batch where `rows` is set
    rows: int = 0  # rows of dimension 0 that belong to one sample of the batch; 0 where the tensor doesn't grow with it

    def edges(self, dim: int, parts: int, batch: int) -> list[int]:
        """Where the pieces of a dimension begin and end when a pass has `batch` samples."""
        if dim == 0 and self.rows:
            return [edge * self.rows for edge in bounds(batch, parts)]
        return bounds(self.dims[dim], parts)

    def values(self, batch: int) -> int:
        """How many values the whole tensor has when a pass has `batch` samples."""
        return math.prod((batch * self.rows, *self.dims[1:]) if self.rows else self.dims)


@dataclass(frozen=True)
class Step:
    """One operation on each process's piece of a tensor."""

    # all_reduce, all_gather, reduce_scatter, all_to_all; or, without communication, slice, pad (the piece among zeros)
    # and keep_first (zeros on all but the first process)
    kind: str
    axes: tuple[int, ...]  # numbers of the mesh's axes it runs along, ascending; several are one group
    dim: int = 0  # the dimension that is put together or cut; for all_to_all the one that is cut
    joined: int = 0  # for all_to_all, the dimension that is put together
    outer: tuple[int, ...] = ()  # axes that cut `dim` already, more major than `axes`
    joined_outer: tuple[int, ...] = ()  # the same for `joined`

    @property
    def communicates(self) -> bool:
        return self.kind not in {"slice", "pad", "keep_first"}


def steps_between(source: Layout, target: Layout) -> list[Step]:
    """The steps that turn one layout into another, at most one collective for each dimension and kind.

    A cut of a dimension by several axes is nested, major to minor, so an axis can be taken out of it only when all
    that are more minor have been taken out before, and added only before those.
    """
    current = list(source)
    found: list[Step] = []
    sums = tuple(a for a, here in enumerate(current) if here == "P" and target[a] == "R")
    if sums:
        found.append(Step("all_reduce", sums))
        for axis in sums:
            current[axis] = "R"
    found += _exchanges(current, target)
    found += _removals(current, target)
    found += _additions(current, target)
    first = tuple(a for a, here in enumerate(current) if here == "R" and target[a] == "P")
    return [*found, Step("keep_first", first)] if first else found


def _cutting(layout: Sequence[Placement], dim: int) -> list[int]:
    return [axis for axis, here in enumerate(layout) if here == dim]


def _kept(current: Sequence[Placement], target: Layout, dim: int) -> int:
    """How many of the axes that cut a dimension may stay: the common beginning of both lists."""
    here, there = _cutting(current, dim), _cutting(target, dim)
    count = 0
    while count < min(len(here), len(there)) and here[count] == there[count]:
        count += 1
    return count


def _exchanges(current: list[Placement], target: Layout) -> list[Step]:
    """Cuts that move from one dimension to another in one exchange, where nothing lies more minor in either."""
    found: list[Step] = []
    for axis, there in enumerate(target):
        here = current[axis]
        if not isinstance(here, int) or not isinstance(there, int) or here == there:
            continue
        before, after = _cutting(current, here), _cutting(target, there)
        place = after.index(axis)
        if before[-1] == axis and _cutting(current, there) == after[:place]:
            outer, joined_outer = tuple(after[:place]), tuple(before[:-1])
            found.append(Step("all_to_all", (axis,), there, here, outer, joined_outer))
            current[axis] = there
    return found


def _removals(current: list[Placement], target: Layout) -> list[Step]:
    found: list[Step] = []
    for dim in sorted({here for here in current if isinstance(here, int)}):
        leaving = _cutting(current, dim)[_kept(current, target, dim) :]
        while leaving:
            kind = "pad" if target[leaving[-1]] == "P" else "all_gather"
            run = [leaving.pop()]
            while leaving and ("pad" if target[leaving[-1]] == "P" else "all_gather") == kind:
                run.append(leaving.pop())
            for axis in run:
                current[axis] = "P" if kind == "pad" else "R"
            found.append(Step(kind, tuple(sorted(run)), dim, outer=tuple(_cutting(current, dim))))
    return found


def _additions(current: list[Placement], target: Layout) -> list[Step]:
    found: list[Step] = []
    for dim in sorted({there for there in target if isinstance(there, int)}):
        coming = _cutting(target, dim)[len(_cutting(current, dim)) :]
        while coming:
            outer = tuple(_cutting(current, dim))
            kind = "reduce_scatter" if current[coming[0]] == "P" else "slice"
            run = [coming.pop(0)]
            while coming and ("reduce_scatter" if current[coming[0]] == "P" else "slice") == kind:
                run.append(coming.pop(0))
            for axis in run:
                current[axis] = dim
            found.append(Step(kind, tuple(run), dim, outer=outer))
    return found


@dataclass(frozen=True)
class CollectiveMessage:
    """One collective as it appears on the wire."""

    kind: str  # of collective
    axes: tuple[int, ...]  # numbers of the mesh's axes of its group
    values: int  # values of the tensor that each process holds when it begins; for all_gather, of the padded piece


def messages(
    source: Layout, target: Layout, extent: Extent, mesh: Mesh, batch: int, rank: int = 0
) -> list[CollectiveMessage]:
    """The collectives of a conversion, with the sizes that `rank` sees."""
    sizes = [_piece(extent, mesh, batch, rank, dim, _cutting(source, dim)) for dim in range(len(extent.dims))]
    found: list[CollectiveMessage] = []
    for step in steps_between(source, target):
        before = list(sizes)
        group = mesh.parts(step.axes)
        if step.kind in {"slice", "reduce_scatter", "all_to_all"}:
            sizes[step.dim] = _piece(extent, mesh, batch, rank, step.dim, [*step.outer, *step.axes])
        if step.kind == "all_to_all":
            sizes[step.joined] = _piece(extent, mesh, batch, rank, step.joined, list(step.joined_outer))
        if step.kind in {"all_gather", "pad"}:
            sizes[step.dim] = _piece(extent, mesh, batch, rank, step.dim, list(step.outer))
        if step.kind == "all_gather":
            before[step.dim] = _longest(extent, mesh, batch, rank, step)
        if step.kind == "reduce_scatter":
            before[step.dim] = _longest(extent, mesh, batch, rank, step) * group
        if step.communicates and group > 1:
            found.append(CollectiveMessage(step.kind, step.axes, math.prod(before)))
    return found


def _piece(extent: Extent, mesh: Mesh, batch: int, rank: int, dim: int, axes: Sequence[int]) -> int:
    edges = extent.edges(dim, mesh.parts(axes), batch)
    place = mesh.place(axes, rank)
    return edges[place + 1] - edges[place]


def _longest(extent: Extent, mesh: Mesh, batch: int, rank: int, step: Step) -> int:
    """The longest piece in a group: shorter ones are padded to it."""
    sizes = group_sizes(extent, mesh, batch, rank, step.dim, step.outer, step.axes)
    return max(sizes)


def group_sizes(
    extent: Extent, mesh: Mesh, batch: int, rank: int, dim: int, outer: Sequence[int], axes: Sequence[int]
) -> list[int]:
    """Lengths of the pieces of a dimension that a group along `axes` holds, within what `outer` leaves to it."""
    parts = mesh.parts(axes)
    edges = extent.edges(dim, mesh.parts(outer) * parts, batch)
    first = mesh.place(outer, rank) * parts
    return [edges[first + number + 1] - edges[first + number] for number in range(parts)]

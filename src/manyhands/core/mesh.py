"""The mesh: the processes of a run as a grid with named axes, and the layout of sharded tensors on it."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from manyhands.core.errors import UserError, shortened

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_AXIS = re.compile(rf"({_NAME.pattern})=([0-9]{{1,9}})")
MOST_AXES = 3
MOST_PROCESSES = 65_536


@dataclass(frozen=True)
class Mesh:
    """The named axes of a mesh. The last axis varies fastest: with dp=2,tp=4, ranks 0 to 3 share an index on dp."""

    axes: tuple[tuple[str, int], ...]  # (name, size) of each axis

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, the slowest varying axis first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, major to minor."""
        return tuple(size for _, size in self.axes)

    def check_size(self, processes: int, where: str = "parallel.mesh") -> None:
        """Raises UserError if the size of the mesh is not `processes`."""
        if self.size != processes:
            hints = (f"start {self.size} processes: -n {self.size}", f"or set a mesh such as --mesh dp={processes}")
            raise UserError(f"the mesh {self} is for {self.size} processes, but the run has {processes}", where, hints)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Returns the index of a rank on each axis."""
        places: list[int] = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def rank(self, coordinates: Iterable[int]) -> int:
        """Returns the rank with these indices on the axes; the inverse of `coordinates`."""
        number = 0
        for place, size in zip(coordinates, self.sizes, strict=True):
            number = number * size + place
        return number

    def parts(self, axes: Iterable[int]) -> int:
        """Returns the product of the sizes of some axes, given by index."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, axes: Iterable[int], rank: int) -> int:
        """Returns the position of a rank in `peers(axes, rank)`; `axes` are ascending indices of axes."""
        place, coordinates = 0, self.coordinates(rank)
        for axis in axes:
            place = place * self.sizes[axis] + coordinates[axis]
        return place

    def peers(self, axes: Iterable[int], rank: int) -> list[int]:
        """Returns `rank` and the ranks that differ from it only in the given axes (indices), in ascending order."""
        free, here = set(axes), self.coordinates(rank)
        choices = [range(size) if axis in free else (here[axis],) for axis, size in enumerate(self.sizes)]
        return [self.rank(place) for place in itertools.product(*choices)]

    def as_dict(self) -> dict[str, int]:
        """Returns the size of each axis by name, for JSON."""
        return dict(self.axes)

    def __str__(self) -> str:
        """Formats the mesh as in job.toml: dp=2,tp=2."""
        return ",".join(f"{name}={size}" for name, size in self.axes)


def parse_mesh(text: str, where: str = "parallel.mesh") -> Mesh:
    """Parses "dp=2,tp=2". Raises UserError: it is not a list of named sizes."""
    matches = [match for word in text.split(",") if (match := _AXIS.fullmatch(word.strip()))]
    count = text.count(",") + 1
    if len(matches) < count:
        hints = ("name axes with sizes, major to minor: dp=2,tp=2",)
        raise UserError(f'"{shortened(text)}" is not a mesh', where, hints)
    return make_mesh({match[1]: int(match[2]) for match in matches}, where, count)


def make_mesh(sizes: Mapping[str, Any], where: str = "mesh", count: int | None = None) -> Mesh:
    """Creates a mesh from axis names and sizes; `count` is their number with repeated names.

    Raises:
        UserError: an axis is repeated or has no process, or there are too many axes or processes.
    """
    if not 0 < len(sizes) <= MOST_AXES or len(sizes) != (count or len(sizes)):
        hints = ("write a mesh such as dp=2,tp=2",)
        raise UserError("a mesh needs one to three axes with different names", where, hints)
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            hints = ("write a whole number, 1 or higher",)
            raise UserError(f"the mesh's axis {shortened(name)} has size {shortened(str(size))}", where, hints)
        if not _NAME.fullmatch(name):
            hints = ("use letters, digits and underscores, such as dp, tp, tp2",)
            raise UserError(f'"{shortened(name)}" is not a valid axis name', where, hints)
    mesh = Mesh(tuple(sizes.items()))
    if mesh.size > MOST_PROCESSES:
        what = f"the mesh has {mesh.size} processes; the maximum is {MOST_PROCESSES}"
        raise UserError(what, where, ("set the number of processes along each axis, such as dp=2,tp=2",))
    return mesh


def bounds(length: int, parts: int) -> list[int]:
    """Returns the edges [parts + 1] of `parts` pieces of a length; sizes differ by one at most.

    Splitting by a, then each piece by b, gives other pieces than splitting by a·b if the length is no multiple
    (8 by 3, then by 2: not as by 6), so a dimension that lies over several axes is split once, by all of them.
    """
    return [length * number // parts for number in range(parts + 1)]


def split_dimensions(shape: tuple[int, ...], view: tuple[int, ...]) -> list[range] | None:
    """Returns the dimensions of the view that each dimension of a shape is split into; None if they don't match."""
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


Region = tuple[tuple[int, int], ...]
Length = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor of a network, or of its optimizer, is sharded over a mesh."""

    shape: tuple[Length, ...]  # of the unsharded tensor
    # the shape that is sharded: `shape`, or that with dimensions split up, where, say, heads lie within one
    view: tuple[Length, ...]
    # for each dimension of the view that is sharded: (dimension, numbers of the mesh's axes, ascending)
    cuts: tuple[tuple[Length, tuple[Length, ...]], ...] = ()
    gradient_axes: tuple[Length, ...] = ()  # numbers of the axes over which each process's gradient is a part of a sum

    @property
    def sharded_axes(self) -> set[int]:
        """The axes along which processes hold different shards."""
        return {axis for _, axes in self.cuts for axis in axes}

    def region(self, mesh: Mesh, rank: int) -> Region:
        """Returns (start, stop), in each dimension of the view, of the piece that a rank holds."""
        region = [(0, length) for length in self.view]
        for dim, axes in self.cuts:
            edges = bounds(self.view[dim], mesh.parts(axes))
            place = mesh.place(axes, rank)
            region[dim] = (edges[place], edges[place + 1])
        return tuple(region)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Returns the piece's shape as the network holds it: in the dimensions of `shape`."""
        sizes = [stop - start for start, stop in self.region(mesh, rank)]
        groups = split_dimensions(self.shape, self.view)
        if groups is None:
            raise ValueError(f"the view {self.view} doesn't split the dimensions of {self.shape} into factors")
        return tuple(math.prod(sizes[position] for position in group) for group in groups)

    def first_holder(self, mesh: Mesh, rank: int) -> int:
        """Returns the lowest rank that holds the same piece; it is the one that saves it."""
        sharded = self.sharded_axes
        return mesh.rank(place if axis in sharded else 0 for axis, place in enumerate(mesh.coordinates(rank)))

    def pieces(self, mesh: Mesh) -> Iterator[tuple[int, Region]]:
        """Yields (rank, region) of each different piece, by its first holder; together they are the whole tensor."""
        for first in mesh.peers(self.sharded_axes, 0):
            yield first, self.region(mesh, first)

    def nearest(self, mesh: Mesh, near: range) -> dict[int, Region]:
        """Returns each different piece once, by a rank that holds it: one of `near`, if one of them does."""
        free = set(range(len(mesh.axes))) - self.sharded_axes
        found = [(mesh.peers(free, first), region) for first, region in self.pieces(mesh)]
        return {min(holders, key=lambda rank: (rank not in near, rank)): region for holders, region in found}

    def as_plain(self) -> dict[str, Any]:
        """Returns the layout as JSON data."""
        return _LAYOUT.dump_python(self, mode="json")


_LAYOUT = TypeAdapter(TensorLayout)


def unsharded(shape: tuple[int, ...], gradient_axes: tuple[int, ...] = ()) -> TensorLayout:
    """Returns the layout of a replicated tensor."""
    return TensorLayout(shape, shape, (), gradient_axes)


def layout_from_plain(content: Any, mesh: Mesh, where: str) -> TensorLayout:
    """Reads what `as_plain` returned. Raises UserError: it is no layout on this mesh."""
    hints = ("create the plan or checkpoint again",)
    try:
        layout = _LAYOUT.validate_python(content)
    except ValidationError as error:
        raise UserError("invalid tensor layout", where, hints) from error
    axes = [axis for _, axes in layout.cuts for axis in axes]
    dims = [dim for dim, _ in layout.cuts]
    sound = (
        split_dimensions(layout.shape, layout.view) is not None
        and len(set(axes)) == len(axes)
        and len(set(dims)) == len(dims)
        and all(axis < len(mesh.axes) for axis in (*axes, *layout.gradient_axes))
        and all(dim < len(layout.view) and list(axes) == sorted(axes) for dim, axes in layout.cuts)
    )
    if not sound:
        raise UserError(f"the tensor layout doesn't fit the mesh {mesh}", where, hints)
    return layout

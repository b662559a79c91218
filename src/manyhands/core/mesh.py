"""Device meshes (a mesh is a grid of the run's ranks with named axes), and the layout of sharded tensors on a mesh."""

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
    """A grid of ranks with named axes. The last axis varies fastest: with dp=2,tp=4, ranks 0 to 3 are index 0 on dp."""

    axes: tuple[tuple[str, int], ...]  # (name, size) of each axis

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def check_size(self, processes: int, where: str = "parallel.mesh") -> None:
        if self.size != processes:
            hints = (f"start {self.size} processes: -n {self.size}", f"or set a mesh such as --mesh dp={processes}")
            raise UserError(f"the mesh {self} is for {self.size} processes, but the run has {processes}", where, hints)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        places: list[int] = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def rank(self, coordinates: Iterable[int]) -> int:
        """Returns the rank with these coordinates, as the inverse of the method `coordinates`."""
        number = 0
        for place, size in zip(coordinates, self.sizes, strict=True):
            number = number * size + place
        return number

    def shard_count(self, axes: Iterable[int]) -> int:
        """Returns the number of shards of a dimension that is sharded over the axes with these indices."""
        return math.prod(self.sizes[axis] for axis in axes)

    def shard_of(self, axes: Iterable[int], rank: int) -> int:
        """Returns the index of a rank's shard of a dimension sharded over the axes with these ascending indices."""
        place, coordinates = 0, self.coordinates(rank)
        for axis in axes:
            place = place * self.sizes[axis] + coordinates[axis]
        return place

    def peers(self, axes: Iterable[int], rank: int) -> list[int]:
        """Returns the ascending ranks whose coordinates differ from those of `rank` only on `axes` (axis indices)."""
        free, here = set(axes), self.coordinates(rank)
        choices = [range(size) if axis in free else (here[axis],) for axis, size in enumerate(self.sizes)]
        return [self.rank(place) for place in itertools.product(*choices)]

    def as_dict(self) -> dict[str, int]:
        return dict(self.axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def parse_mesh(text: str, where: str = "parallel.mesh") -> Mesh:
    """Parses a text such as "dp=2,tp=2". Raises UserError if the text is not a mesh."""
    matches = [match for word in text.split(",") if (match := _AXIS.fullmatch(word.strip()))]
    count = text.count(",") + 1
    if len(matches) < count:
        hints = ("name axes with sizes, major to minor: dp=2,tp=2",)
        raise UserError(f'"{shortened(text)}" is not a mesh', where, hints)
    return make_mesh({match[1]: int(match[2]) for match in matches}, where, count)


def make_mesh(sizes: Mapping[str, Any], where: str = "mesh", count: int | None = None) -> Mesh:
    """Creates a mesh from {axis name: size}. Raises UserError if the mesh is invalid or doesn't have `count` axes."""
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


def shard_boundaries(length: int, parts: int) -> list[int]:
    """Divides a dimension into `parts` shards whose sizes differ by at most 1. Returns the `parts` + 1 boundaries.

    A dimension that is sharded over several axes is split once, by the product of their sizes, without nesting.
    """
    return [length * number // parts for number in range(parts + 1)]


def match_dimensions(shape: tuple[int, ...], view: tuple[int, ...]) -> list[range] | None:
    """Returns, for each dimension of `shape`, the dimensions of `view` whose product it is; None if there are none."""
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
    """The sharding of one tensor over a mesh."""

    shape: tuple[Length, ...]  # shape of the unsharded tensor
    # the shape that is sharded: `shape`, possibly with dimensions split up, such as into heads
    view: tuple[Length, ...]
    # for each sharded dimension of the view: (dimension, ascending indices of the mesh's axes)
    cuts: tuple[tuple[Length, tuple[Length, ...]], ...] = ()
    gradient_axes: tuple[Length, ...] = ()  # indices of the axes over which the processes' gradients must be summed

    @property
    def sharded_axes(self) -> set[int]:
        return {axis for _, axes in self.cuts for axis in axes}

    def region(self, mesh: Mesh, rank: int) -> Region:
        """Returns the (start, stop) indices of a rank's shard in each dimension of the view."""
        region = [(0, length) for length in self.view]
        for dim, axes in self.cuts:
            edges = shard_boundaries(self.view[dim], mesh.shard_count(axes))
            place = mesh.shard_of(axes, rank)
            region[dim] = (edges[place], edges[place + 1])
        return tuple(region)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard, with as many dimensions as `shape`."""
        sizes = [stop - start for start, stop in self.region(mesh, rank)]
        groups = match_dimensions(self.shape, self.view)
        if groups is None:
            raise ValueError(f"the view {self.view} doesn't factor the dimensions of the shape {self.shape}")
        return tuple(math.prod(sizes[position] for position in group) for group in groups)

    def first_holder(self, mesh: Mesh, rank: int) -> int:
        """Returns the lowest rank that has the same shard as `rank`. Only this lowest rank saves the shard."""
        sharded = self.sharded_axes
        return mesh.rank(place if axis in sharded else 0 for axis, place in enumerate(mesh.coordinates(rank)))

    def distinct_shards(self, mesh: Mesh) -> Iterator[tuple[int, Region]]:
        """Yields (rank, region) of each distinct shard, where `rank` is the lowest rank that has the shard."""
        for first in mesh.peers(self.sharded_axes, 0):
            yield first, self.region(mesh, first)

    def nearest_holders(self, mesh: Mesh, near: range) -> dict[int, Region]:
        """Returns {rank: region} with one rank for each distinct shard. Prefers ranks in the range `near`."""
        free = set(range(len(mesh.axes))) - self.sharded_axes
        found = [(mesh.peers(free, first), region) for first, region in self.distinct_shards(mesh)]
        return {min(holders, key=lambda rank: (rank not in near, rank)): region for holders, region in found}

    def as_plain(self) -> dict[str, Any]:
        return _LAYOUT.dump_python(self, mode="json")


_LAYOUT = TypeAdapter(TensorLayout)


def unsharded_layout(shape: tuple[int, ...], gradient_axes: tuple[int, ...] = ()) -> TensorLayout:
    return TensorLayout(shape, shape, (), gradient_axes)


def layout_from_plain(content: Any, mesh: Mesh, where: str) -> TensorLayout:
    """Creates a layout from the result of `TensorLayout.as_plain`. Raises UserError if it doesn't fit the mesh."""
    hints = ("create the plan or checkpoint again",)
    try:
        layout = _LAYOUT.validate_python(content)
    except ValidationError as error:
        raise UserError("invalid tensor layout", where, hints) from error
    axes = [axis for _, axes in layout.cuts for axis in axes]
    dims = [dim for dim, _ in layout.cuts]
    sound = (
        match_dimensions(layout.shape, layout.view) is not None
        and len(set(axes)) == len(axes)
        and len(set(dims)) == len(dims)
        and all(axis < len(mesh.axes) for axis in (*axes, *layout.gradient_axes))
        and all(dim < len(layout.view) and list(axes) == sorted(axes) for dim, axes in layout.cuts)
    )
    if not sound:
        raise UserError(f"the tensor layout doesn't fit the mesh {mesh}", where, hints)
    return layout

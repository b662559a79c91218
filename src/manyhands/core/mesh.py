"""A mesh: the processes of a run as a grid with named axes, such as dp=2,tp=2."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from manyhands.core.errors import UserError, shortened

_AXIS = re.compile(r"([A-Za-z][A-Za-z0-9_]*)=([0-9]{1,9})")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
MOST_AXES = 3
MOST_PROCESSES = 65_536


@dataclass(frozen=True)
class Mesh:
    """The named axes of a mesh, major to minor: with dp=2,tp=4, ranks 0 to 3 have the same index on dp.

    Attributes:
        axes: (name, size) of each axis.
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(size for _, size in self.axes)

    def check_size(self, processes: int, where: str = "parallel.mesh") -> None:
        """Raises UserError unless the mesh has this number of processes."""
        if self.size != processes:
            hints = (f"start {self.size} processes: -n {self.size}", f"or set a mesh such as --mesh dp={processes}")
            raise UserError(f"the mesh {self} is for {self.size} processes, but the run has {processes}", where, hints)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, major to minor."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, major to minor."""
        return tuple(size for _, size in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Returns the index of a rank on each axis."""
        places: list[int] = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def rank(self, coordinates: Iterable[int]) -> int:
        """Returns the rank with these indices; the inverse of `coordinates`."""
        number = 0
        for place, size in zip(coordinates, self.sizes, strict=True):
            number = number * size + place
        return number

    def parts(self, axes: Iterable[int]) -> int:
        """Returns the number of processes along the axes, which are given by index."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, axes: Iterable[int], rank: int) -> int:
        """Returns the index of a rank in its group along the axes, in ascending order; the first varies slowest."""
        place = 0
        for axis in axes:
            place = place * self.sizes[axis] + self.coordinates(rank)[axis]
        return place

    def peers(self, axes: Iterable[int], rank: int) -> list[int]:
        """Returns the ranks of the group of `rank` along the axes, itself included, in ascending order."""
        free = set(axes)
        here = self.coordinates(rank)
        choices = [range(size) if axis in free else (here[axis],) for axis, size in enumerate(self.sizes)]
        return [self.rank(place) for place in itertools.product(*choices)]

    def as_dict(self) -> dict[str, int]:
        """Returns the size of each axis by name, for JSON."""
        return dict(self.axes)

    def __str__(self) -> str:
        """Formats the mesh as in job.toml: dp=2,tp=2."""
        return ",".join(f"{name}={size}" for name, size in self.axes)


def parse_mesh(text: str, where: str = "parallel.mesh") -> Mesh:
    """Reads "dp=2,tp=2".

    Raises:
        UserError: it is not a list of named sizes.
    """
    matches = [_AXIS.fullmatch(word.strip()) for word in text.split(",")]
    if any(match is None for match in matches):
        raise UserError(
            f'"{shortened(text)}" is not a mesh', where, ("name axes with sizes, major to minor: dp=2,tp=2",)
        )
    return make_mesh({match[1]: int(match[2]) for match in matches if match}, where, count=len(matches))


def make_mesh(sizes: Mapping[str, Any], where: str = "mesh", count: int | None = None) -> Mesh:
    """Creates a mesh from axis names and sizes.

    Raises:
        UserError: an axis is repeated or has no process, or there are too many axes or processes.
    """
    if not 0 < len(sizes) <= MOST_AXES or len(sizes) != (len(sizes) if count is None else count):
        hints = ("write a mesh such as dp=2,tp=2",)
        raise UserError("a mesh needs one to three axes with different names", where, hints)
    small = [name for name, size in sizes.items() if type(size) is not int or size < 1]
    if small:
        raise UserError(
            f"the mesh's axis {shortened(small[0])} has size {shortened(str(sizes[small[0]]))}",
            where,
            ("write a whole number, 1 or higher",),
        )
    if strange := [name for name in sizes if not _NAME.fullmatch(name)]:
        hints = ("use letters, digits and underscores, such as dp, tp, tp2",)
        raise UserError(f'"{shortened(strange[0])}" is not a valid axis name', where, hints)
    if math.prod(sizes.values()) > MOST_PROCESSES:
        what = f"the mesh has {math.prod(sizes.values())} processes; the maximum is {MOST_PROCESSES}"
        raise UserError(what, where, ("set the number of processes along each axis, such as dp=2,tp=2",))
    return Mesh(tuple(sizes.items()))


def factorisations(world_size: int, most_axes: int = 2) -> list[Mesh]:
    """Returns all meshes of `world_size` processes with axes named dp, tp and tp2, each longer than one."""
    names = ("dp", "tp", "tp2")
    found: list[Mesh] = []
    for count in range(1, min(most_axes, len(names)) + 1):
        divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
        fitting = [sizes for sizes in itertools.product(divisors, repeat=count) if math.prod(sizes) == world_size]
        found += [Mesh(tuple(zip(names, sizes, strict=False))) for sizes in fitting]
    return found or [Mesh((("dp", 1),))]

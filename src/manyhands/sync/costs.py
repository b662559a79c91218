"""Costs of sync methods: seconds and bytes per step, from link, shapes and step time. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.core.options import Options, option
from manyhands.sync.link_speeds import LinkSpeed

CodecName = Literal["none", "bf16", "int8", "int4", "lowrank"]

# A sum reads two vectors and writes one; what a core of an ordinary machine moves.
_STREAMS, _MEMORY_BYTES_PER_S = 3, 1e10


@dataclass(frozen=True)
class LinkCase:
    """The inputs of the costs of synchronization."""

    shapes: tuple[tuple[int, ...], ...]  # of all trainable parameters
    item_bytes: int  # of one of their values
    buffers: int  # values in the network's buffers (BatchNorm's statistics)
    machines: int  # parties that agree over the link
    step_s: float  # one update without any agreement
    backward_s: float  # the part of it in which gradients can be sent already
    link: LinkSpeed  # between two machines
    steps: int  # updates of the whole run
    # one sum of two vectors of all values on this device, in which compressing is counted; 0 estimates it
    pass_s: float = 0.0
    idle_s: float = 0.0  # the part of `backward_s` in which what compresses has nothing else to do
    # what layers send to each other in every update where machines agree in each (BatchNorm's sums)
    layers_s: float = 0.0

    def compressing_s(self, passes: float) -> float:
        """Seconds of so many passes over all values in an exchange; 0 on one machine."""
        if self.machines == 1:
            return 0.0
        return passes * (self.pass_s or _STREAMS * self.values * self.item_bytes / _MEMORY_BYTES_PER_S)

    @property
    def values(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Cost:
    """A variant of a sync method, and its costs."""

    method: str  # its name
    step_s: float  # one update, agreement included, in the long run
    sent_bytes: float  # by each machine per update
    exchange_s: float = 0.0  # one agreement by itself
    codec: CodecName = "none"  # of `local`
    every: int = 1  # steps between agreements
    delay: int = 0  # steps for which an agreement goes on beside training
    refused: str = ""  # why it is no candidate, though its costs are shown; empty for candidates


# Of a factor's value on its way, and how many values share a scale: few, since columns differ much in size. What
# rounding loses is held back with what the rank leaves out.
FACTOR_BITS, FACTOR_BLOCK = 4, 32
# Tensors of fewer values go as they are, and factors aren't thinner than that: next to the time that a message takes to
# arrive, nothing would be saved. In a ResNet-18 that concerns the first layers, and makes a twentieth of its bytes.
_MIN_IN_MATRIX, _MIN_IN_FACTOR = 4096, 1536
# Gradients leave in batches, each so much of what is still to be sent, so that little is left when the last ones come.
_SHARE, _MOST, _MIN_VALUES = 0.4, 0.25, 8192


@dataclass(frozen=True)
class Matrix:
    """A tensor that is sent as a thin factor."""

    place: int  # of the tensor
    rows: int  # of the matrix that it is taken for
    columns: int  # likewise
    rank: int  # columns of its factors
    first: int  # the factor that goes in the first turn: 0 the left one [rows, rank], 1 the right one [columns, rank]

    def length(self, turn: int) -> int:
        """Values in a column of the factor of a turn."""
        return self.columns if (self.first + turn) % 2 else self.rows


@dataclass(frozen=True)
class Ranks:
    """How the tensors of a vector are sent."""

    matrices: tuple[Matrix, ...]  # those that go as products of two thin matrices, of which one is sent in each turn
    rest: tuple[int, ...]  # places of those that go as they are
    shapes: tuple[tuple[int, ...], ...]  # of all tensors

    def values(self, turn: int) -> int:
        """Values sent in a turn: one factor of each matrix, and the tensors that are no matrices."""
        thin = sum(matrix.rank * matrix.length(turn) for matrix in self.matrices)
        return thin + sum(math.prod(self.shapes[place]) for place in self.rest)


def rank_shapes(shapes: Sequence[tuple[int, ...]], rank: int) -> Ranks:
    """Sends large tensors as [rows, rank] x [rank, columns] if both together are at most half of it.

    Halving one side makes the matrix nearly square, since its factors are shortest so; all turns send about equally
    much. Small matrices have more columns than `rank`, which cost little.
    """
    found: list[tuple[int, int, int, int]] = []
    rest: list[int] = []
    for place, shape in enumerate(shapes):
        # A vector has no structure that factors could follow.
        rows, columns = _nearly_square(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        most = rows * columns // (2 * (rows + columns)) if rows * columns >= _MIN_IN_MATRIX else 0
        if most < rank:
            rest.append(place)
        else:
            found.append((place, rows, columns, min(most, max(rank, 2 * _MIN_IN_FACTOR // (rows + columns)))))
    matrices: list[Matrix] = []
    ahead = 0  # values by which even turns send more than odd ones
    for place, rows, columns, own in sorted(found, key=lambda matrix: -matrix[3] * abs(matrix[1] - matrix[2])):
        first = int((rows > columns) == (ahead > 0))
        ahead += own * (columns - rows if first else rows - columns)
        matrices.append(Matrix(place, rows, columns, own, first))
    return Ranks(tuple(sorted(matrices, key=lambda matrix: matrix.place)), tuple(rest), tuple(shapes))


def _nearly_square(rows: int, columns: int) -> tuple[int, int]:
    while columns and columns % 2 == 0 and 4 * rows <= columns:
        rows, columns = 2 * rows, columns // 2
    while rows and rows % 2 == 0 and 4 * columns <= rows:
        rows, columns = rows // 2, 2 * columns
    return rows, columns


def batches(shapes: Sequence[tuple[int, ...]], rank: int) -> list[list[int]]:
    """Places of tensors whose gradients leave together, from the last on; shapes in the order of the forward pass."""
    ranks = rank_shapes(shapes, rank)
    sent = {matrix.place: matrix.rank * (matrix.rows + matrix.columns) / 2 for matrix in ranks.matrices}
    sent |= {place: float(math.prod(shapes[place])) for place in ranks.rest}
    whole = sum(sent.values())
    left, found, gathered = whole, [list[int]()], 0.0
    for place in reversed(range(len(shapes))):
        found[-1].append(place)
        gathered += sent[place]
        if gathered >= max(min(_SHARE * left, _MOST * whole), _MIN_VALUES) and place:
            left, gathered = left - gathered, 0.0
            found.append([])
    return found


class RankOptions(Options):
    """The rank of factors."""

    rank: int = option(
        4, "rank of the low-rank approximation; used only with method powersgd or codec lowrank", ge=1, le=128
    )

"""Which parameters a low rank pays for, and how many values it sends. No tensors: the planner counts with it too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of a factor's value on its way; what rounding loses is held back with what the rank leaves out.
FACTOR_BITS = 8


@dataclass(frozen=True)
class Ranks:
    """How the tensors of a vector are sent.

    Attributes:
        matrices: (place, rows, columns) of each tensor that goes as a product of two thin matrices.
        rest: places of those that go as they are.
        rank: columns of the thin matrices.
        shapes: of all tensors.
    """

    matrices: tuple[tuple[int, int, int], ...]
    rest: tuple[int, ...]
    rank: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def left_values(self) -> int:
        """Values of the first message: left factors, and the tensors that go as they are."""
        return sum(rows * self.rank for _, rows, _ in self.matrices) + sum(
            math.prod(self.shapes[place]) for place in self.rest
        )

    @property
    def right_values(self) -> int:
        """Values of the second message: right factors."""
        return sum(columns * self.rank for _, _, columns in self.matrices)


def rank_shapes(shapes: Sequence[tuple[int, ...]], rank: int) -> Ranks:
    """Sends a tensor [n, …] as [n, rank] x [rank, the rest] where that is at most half of it."""
    matrices: list[tuple[int, int, int]] = []
    rest: list[int] = []
    for place, shape in enumerate(shapes):
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if 2 * rank * (rows + columns) <= rows * columns:
            matrices.append((place, rows, columns))
        else:
            rest.append(place)
    return Ranks(tuple(matrices), tuple(rest), rank, tuple(shapes))

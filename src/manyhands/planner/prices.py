"""Bounds by prices: what a byte and an exposed second cost is asked of the problem until the answers meet.

For any price of the gradients' excess between 0 and 1 and any price of a byte, the least of
seconds + price * excess + price * (bytes - limit) is no more than the optimum, and elimination finds it. It is the
optimum itself where neither the limit nor the hiding of gradients binds. Where they do, the gap is small, and most
choices are more than the gap away from any optimum.
"""

import math
from dataclasses import dataclass, replace

import highspy
import numpy as np

from manyhands.planner.elimination import Elimination, EliminationOrder
from manyhands.planner.integer import least_memory, memory_of, quiet_solver, search_integers
from manyhands.planner.problem import Matrix
from manyhands.planner.tables import Tables, keep

_MOST_ROUNDS = 20
_CLOSE = 1e-4
_ROUNDING = 1e-11


@dataclass(frozen=True)
class _PricedAssignment:
    """An assignment that some prices led to."""

    choices: list[int]
    seconds: float
    excess: float
    memory: float

    @property
    def step_seconds(self) -> float:
        return self.seconds + max(0.0, self.excess)


class Prices:
    """Looks for good prices, and keeps the best assignment that fits.

    The tables have no forbidden choices. `seconds` are those of an assignment that is known already: only better ones
    count, and the result may be slower than the best by the share `gap`.
    """

    def __init__(
        self, tables: Tables, order: EliminationOrder, seconds: float = float("inf"), gap: float = 0.0
    ) -> None:
        self._tables, self._order, self._gap = tables, order, max(gap, _ROUNDING)
        self._answers: list[_PricedAssignment] = []
        self._best: tuple[float, float] = (1.0, 0.0)
        self.bound_seconds = -float("inf")
        self.choices: list[int] | None = None
        self.seconds = seconds
        self.least_memory_bytes: float | None = None

    @property
    def closed(self) -> bool:
        """Whether the best assignment is the optimum, but for the gap that is allowed."""
        return math.isfinite(self.seconds) and self.seconds <= self.bound_seconds + self._gap * abs(self.seconds)

    def ask(self) -> None:
        """Tries prices until nothing is to be gained; afterwards `closed`, a gap, or nothing fits."""
        self._try((1.0, 0.0))
        if self._answers[-1].excess < 0 and not self.closed:
            self._try((0.0, 0.0))
        if not self.closed and self._answers[-1].memory > self._tables.limit and not self._smallest():
            return
        for _ in range(_MOST_ROUNDS):
            if self.closed:
                return
            prices, hope = self._next_prices()
            if hope - self.bound_seconds <= _CLOSE * abs(hope):
                return
            self._try(prices)

    def cross(self, limit_s: float) -> None:
        """Looks for a better assignment among the crosses of all answers: few choices at each node, soon searched."""
        sizes = self._tables.sizes
        masks = {node: np.zeros(size, dtype=bool) for node, size in enumerate(sizes)}
        for answer in self._answers:
            for node, choice in enumerate(answer.choices):
                masks[node][choice] = True
        found = search_integers(keep(self._tables, masks), limit_s, gap=max(self._gap, _CLOSE))
        if found.choices is not None:
            self._consider([int(np.flatnonzero(masks[node])[choice]) for node, choice in enumerate(found.choices)])

    def near(self, cutoff_seconds: float) -> Tables | None:
        """The tables without what has a bound above the best assignment or the cutoff; None if a node has no choice."""
        byte = self._best[1]
        worst = min(self.seconds, cutoff_seconds) + (byte * self._tables.limit if byte else 0.0)
        worst += 1e-9 * abs(worst)
        nodes, pairs = self._eliminate(self._best).least(self._tables.pairs)
        left = {pair: np.where(pairs[pair] <= worst, matrix, np.inf) for pair, matrix in self._tables.pairs.items()}
        masks = {node: sums <= worst for node, sums in enumerate(nodes)}
        return keep(replace(self._tables, pairs=left), masks) if all(mask.any() for mask in masks.values()) else None

    def _eliminate(self, prices: tuple[float, float]) -> Elimination:
        tables, (excess, byte) = self._tables, prices
        columns = zip(tables.seconds, tables.excess, tables.memory, strict=True)
        nodes = [own + excess * surplus + byte * memory for own, surplus, memory in columns]
        pairs: dict[tuple[int, int], Matrix] = dict(tables.pairs)
        if byte:
            pairs |= {pair: tables.pairs[pair] + byte * kept for pair, kept in tables.kept.items()}
        return Elimination(self._order, nodes, pairs)

    def _try(self, prices: tuple[float, float]) -> None:
        eliminated = self._eliminate(prices)
        bound = eliminated.value - (prices[1] * self._tables.limit if prices[1] else 0.0)
        if bound > self.bound_seconds:
            self.bound_seconds, self._best = bound, prices
        self._consider(eliminated.choices())

    def _consider(self, choices: list[int]) -> None:
        tables = self._tables
        seconds = sum(float(own[choice]) for own, choice in zip(tables.seconds, choices, strict=True))
        seconds += sum(float(matrix[choices[a], choices[b]]) for (a, b), matrix in tables.pairs.items())
        excess = sum(float(own[choice]) for own, choice in zip(tables.excess, choices, strict=True))
        answer = _PricedAssignment(choices, seconds, excess, memory_of(tables, choices))
        self._answers.append(answer)
        if answer.memory <= tables.limit and answer.step_seconds < self.seconds:
            self.choices, self.seconds = choices, answer.step_seconds

    def _smallest(self) -> bool:
        """Considers the smallest assignment; false if even that doesn't fit."""
        tables = least_memory(self._tables)
        eliminated = Elimination(self._order, tables.seconds, tables.pairs)
        self._consider(eliminated.choices())
        self.least_memory_bytes = self._answers[-1].memory
        return self._answers[-1].memory <= self._tables.limit

    def _next_prices(self) -> tuple[tuple[float, float], float]:
        """Where the bound could be highest, judged by the answers so far, and how high: a program of three columns."""
        limit = self._tables.limit
        scale = abs(self.seconds) or 1.0
        bounded = np.isfinite(limit)
        size = limit if bounded and limit else 1.0
        solver = quiet_solver()
        solver.addVar(-highspy.kHighsInf, highspy.kHighsInf)
        solver.addVar(0.0, 1.0)
        solver.addVar(0.0, 1e6 if bounded else 0.0)
        solver.changeColCost(0, -1.0)
        for answer in self._answers:
            over = (answer.memory - limit) / size if bounded else 0.0
            row = np.array([1.0, -answer.excess / scale, -over])
            solver.addRow(-highspy.kHighsInf, answer.seconds / scale, 3, np.arange(3, dtype=np.int32), row)
        solver.run()
        hope, excess, byte = solver.getSolution().col_value
        return (float(np.clip(excess, 0.0, 1.0)), max(0.0, byte) * scale / size), hope * scale

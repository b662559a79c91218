"""A problem as arrays, and what may be left out of it without losing the optimum."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.core.errors import UserError
from manyhands.planner.problem import Matrix, NoPlanError, Problem

Pair = tuple[int, int]
_NO_PLAN_MENDS = ("loosen a pin", "choose another mesh")


@dataclass(frozen=True)
class Tables:
    """The numbers of a problem; each pair of nodes has one matrix at most."""

    seconds: list[Matrix]  # of each node's choices
    excess: list[Matrix]  # gradients' seconds minus what hides them, of each node's choices
    memory: list[Matrix]  # bytes of each node's choices
    pairs: dict[Pair, Matrix]  # seconds by (a, b) with a < b
    kept: dict[Pair, Matrix]  # bytes by (a, b), where there are some
    limit: float  # the most bytes; infinite if there is no limit
    original: list[NDArray[np.intp]]  # the numbers in the problem of each node's choices

    @property
    def sizes(self) -> list[int]:
        return [len(choices) for choices in self.original]

    def neighbours(self, node: int) -> list[tuple[int, Pair]]:
        """(other node, pair) of each matrix that a node takes part in."""
        return [(b if a == node else a, (a, b)) for a, b in self.pairs if node in (a, b)]

    def named(self, choices: list[int]) -> list[int]:
        """Numbers of choices as the problem counts them."""
        return [int(original[choice]) for original, choice in zip(self.original, choices, strict=True)]


def tables_of(problem: Problem) -> Tables:
    """A problem's numbers, parallel edges added up, loops moved into their nodes. Raises UserError: a wrong number."""
    columns = [np.array([_numbers(choice) for choice in node], dtype=float).reshape(-1, 4) for node in problem.nodes]
    for number, column in enumerate(columns):
        if not len(column):
            raise NoPlanError(f"{problem.name(number)} has no choice at all", "plan", _NO_PLAN_MENDS)
        _check(problem.name(number), column[:, 0], column[:, 1:])
    tables = Tables(
        seconds=[column[:, 0].copy() for column in columns],
        excess=[column[:, 1] - problem.overlap * column[:, 2] for column in columns],
        memory=[column[:, 3].copy() for column in columns],
        pairs={},
        kept={},
        limit=float("inf") if problem.memory_limit_bytes is None else float(problem.memory_limit_bytes),
        original=[np.arange(len(column)) for column in columns],
    )
    checked: set[tuple[int, int]] = set()
    for edge in problem.edges:
        memory = np.zeros_like(edge.seconds) if edge.memory_bytes is None else edge.memory_bytes
        if edge.seconds.shape != (tables.sizes[edge.a], tables.sizes[edge.b]) or memory.shape != edge.seconds.shape:
            raise UserError(f"the costs between {problem.name(edge.a)} and {problem.name(edge.b)} have a wrong shape")
        if (id(edge.seconds), id(edge.memory_bytes)) not in checked:
            checked.add((id(edge.seconds), id(edge.memory_bytes)))
            _check(f"{problem.name(edge.a)} to {problem.name(edge.b)}", edge.seconds, memory)
        _add(tables.pairs, tables.seconds, edge.a, edge.b, edge.seconds)
        if edge.memory_bytes is not None:
            _add(tables.kept, tables.memory, edge.a, edge.b, edge.memory_bytes)
    for pair, kept in tables.kept.items():
        tables.pairs.setdefault(pair, np.zeros_like(kept))
    return tables


def _numbers(choice: Any) -> tuple[float, float, float, float]:
    return choice.seconds, choice.gradient_seconds, choice.hideable_seconds, choice.memory_bytes


def _check(name: str, seconds: Matrix, others: Matrix) -> None:
    # Gains would be fine for the search, but they only come from mistakes: no op takes less than no time.
    if np.isnan(seconds).any() or (seconds < 0).any() or not np.isfinite(others).all() or (others < 0).any():
        raise UserError(f"a cost of {name} is negative or no number", "plan", ("measure anew",))


def _add(matrices: dict[Pair, Matrix], nodes: list[Matrix], a: int, b: int, matrix: Matrix) -> None:
    if a == b:
        nodes[a] = nodes[a] + np.diagonal(matrix)
        return
    if a > b:
        a, b, matrix = b, a, matrix.T
    matrices[a, b] = matrices[a, b] + matrix if (a, b) in matrices else matrix


def keep(tables: Tables, masks: dict[int, NDArray[np.bool_]]) -> Tables:
    """The tables with only those choices of the named nodes whose mask is true."""
    masks = {node: mask for node, mask in masks.items() if not mask.all()}
    if not masks:
        return tables

    def thin(columns: list[Any]) -> list[Any]:
        return [column[masks[node]] if node in masks else column for node, column in enumerate(columns)]

    def cut(matrices: dict[Pair, Matrix]) -> dict[Pair, Matrix]:
        changed = dict(matrices)
        for (a, b), matrix in matrices.items():
            if a in masks or b in masks:
                matrix = matrix[masks[a]] if a in masks else matrix
                changed[a, b] = matrix[:, masks[b]] if b in masks else matrix
        return changed

    return replace(
        tables,
        seconds=thin(tables.seconds),
        excess=thin(tables.excess),
        memory=thin(tables.memory),
        original=thin(tables.original),
        pairs=cut(tables.pairs),
        kept=cut(tables.kept),
    )


def drop_forbidden(tables: Tables, problem: Problem) -> Tables:
    """Leaves out choices that are forbidden or have no partner left. Raises NoPlanError: a node has none left."""
    alive = [np.isfinite(seconds) for seconds in tables.seconds]
    allowed = {pair: np.isfinite(matrix) for pair, matrix in tables.pairs.items()}
    _some_left(alive, list(range(len(alive))), problem)
    waiting = [pair for pair, matrix in allowed.items() if not matrix.all()]
    while waiting:
        a, b = waiting.pop()
        here = alive[a] & allowed[a, b][:, alive[b]].any(axis=1)
        there = alive[b] & allowed[a, b][here].any(axis=0)
        changed = [node for node, new in ((a, here), (b, there)) if (new != alive[node]).any()]
        alive[a], alive[b] = here, there
        _some_left(alive, [a, b], problem)
        waiting += [pair for pair in allowed if any(node in pair for node in changed) and pair not in waiting]
    return keep(tables, dict(enumerate(alive)))


def _some_left(alive: list[NDArray[np.bool_]], nodes: list[int], problem: Problem) -> None:
    if empty := [node for node in nodes if not alive[node].any()]:
        others = " and ".join(problem.name(node) for node in nodes) if len(nodes) == 2 else problem.name(empty[0])
        raise NoPlanError(f"no choice is left that is allowed for {others}", "plan", _NO_PLAN_MENDS)


def drop_dominated(tables: Tables) -> Tables:
    """Leaves out each choice that another of its node could replace in any assignment, at no loss of time or memory."""
    for node, size in enumerate(tables.sizes):
        if size > 1:
            tables = keep(tables, {node: _undominated(tables, node)})
    return tables


def _undominated(tables: Tables, node: int) -> NDArray[np.bool_]:
    """What replacing choice k by l saves at least, whatever the neighbours choose, decides; [k, l] each."""
    excess = tables.excess[node]
    # The exposed gradients grow by the excess's growth at most, and may not shrink with it at all.
    saved = np.subtract.outer(tables.seconds[node], tables.seconds[node])
    saved = saved - np.maximum(0, np.subtract.outer(excess, excess).T)
    freed = np.subtract.outer(tables.memory[node], tables.memory[node])
    for _, pair in tables.neighbours(node):
        saved = saved + _least_difference(tables.pairs[pair] if pair[0] == node else tables.pairs[pair].T)
        if pair in tables.kept:
            freed = freed + _least_difference(tables.kept[pair] if pair[0] == node else tables.kept[pair].T)
    better = saved >= 0
    if np.isfinite(tables.limit):
        better &= freed >= 0
    np.fill_diagonal(better, val=False)
    alive = np.ones(len(excess), dtype=bool)
    for choice in np.flatnonzero(better.any(axis=1)):
        alive[choice] = not (better[choice] & alive).any()
    return alive


def _least_difference(matrix: Matrix) -> Matrix:
    """[k, l]: the least of matrix[k] - matrix[l]; where both are forbidden they don't count."""
    if np.isfinite(matrix).all():
        return (matrix[:, None, :] - matrix[None, :, :]).min(axis=2)
    with np.errstate(invalid="ignore"):
        difference = matrix[:, None, :] - matrix[None, :, :]
    return np.where(np.isnan(difference), np.inf, difference).min(axis=2)

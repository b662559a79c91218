"""Exact minimum of sums of tables over a graph, one node after the other; fast where the graph is nearly a chain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.planner.problem import Matrix

# A table of so many numbers takes 64 MiB; a wider graph is left to the integer program.
MOST_ENTRIES = 1 << 23
Scope = tuple[int, ...]
Factor = tuple[Scope, Matrix]


@dataclass(frozen=True)
class EliminationOrder:
    """Nodes in the order in which they are eliminated."""

    nodes: tuple[int, ...]  # each node once
    scopes: tuple[Scope, ...]  # the nodes that are left when it goes and that it meets, for each of `nodes`


def elimination_order(
    sizes: Sequence[int], pairs: Sequence[tuple[int, int]], most_entries: int = MOST_ENTRIES
) -> EliminationOrder | None:
    """An order that keeps tables small, always taking the node with the smallest; None if one would be too large."""
    meets: list[set[int]] = [set() for _ in sizes]
    for a, b in pairs:
        meets[a].add(b)
        meets[b].add(a)

    def entries(node: int) -> float:
        return float(np.prod([float(sizes[other]) for other in (node, *meets[node])]))

    costs = {node: entries(node) for node in range(len(sizes))}
    nodes: list[int] = []
    scopes: list[Scope] = []
    while costs:
        node = min(costs, key=lambda node: (costs[node], node))
        if costs.pop(node) > most_entries:
            return None
        nodes.append(node)
        scopes.append(tuple(sorted(meets[node])))
        for other in scopes[-1]:
            meets[other] |= meets[node] - {other}
            meets[other].discard(node)
        costs.update({other: entries(other) for other in scopes[-1]})
    return EliminationOrder(tuple(nodes), tuple(scopes))


class Elimination:
    """One pass over nodes and pairs (a < b): the minimum, an assignment that has it, and least sums by choice."""

    def __init__(self, order: EliminationOrder, nodes: Sequence[Matrix], pairs: dict[tuple[int, int], Matrix]) -> None:
        self._order = order
        self._factors: list[list[Factor]] = [[((node,), nodes[node])] for node in order.nodes]
        self._place = {node: place for place, node in enumerate(order.nodes)}
        self._parents: list[int | None] = []
        self._messages: list[Matrix] = []
        self._best: list[Matrix] = []
        self.value = 0.0
        for pair, matrix in pairs.items():
            self._factors[min(self._place[node] for node in pair)].append((pair, matrix))
        for place, scope in enumerate(order.scopes):
            table = self._table(place)
            best = table.argmin(axis=-1)
            message = np.take_along_axis(table, best[..., None], axis=-1)[..., 0]
            parent = min((self._place[node] for node in scope), default=None)
            if parent is None:
                self.value += float(message)
            else:
                self._factors[parent].append((scope, message))
            self._parents.append(parent)
            self._messages.append(message)
            self._best.append(best)

    def choices(self) -> list[int]:
        chosen: dict[int, int] = {}
        for node, scope, best in zip(*map(reversed, (self._order.nodes, self._order.scopes, self._best)), strict=True):
            chosen[node] = int(best[tuple(chosen[other] for other in scope)])
        return [chosen[node] for node in range(len(chosen))]

    def least(self, pairs: Iterable[tuple[int, int]] = ()) -> tuple[list[Matrix], dict[tuple[int, int], Matrix]]:
        """For each node and choice, and each pair and choices, the least sum of all assignments that take them."""
        beliefs: dict[int, Matrix] = {}
        least: dict[int, Matrix] = {}
        least_pairs: dict[tuple[int, int], Matrix] = {}
        held: dict[int, list[tuple[int, int]]] = {}
        for pair in pairs:
            held.setdefault(min(self._place[node] for node in pair), []).append(pair)
        children = [self._parents.count(place) for place in range(len(self._parents))]
        for place in reversed(range(len(self._parents))):
            parent, table = self._parents[place], self._table(place)
            if parent is None:
                table = table + (self.value - self._messages[place])
            else:
                table = table + self._outside(place, parent, beliefs[parent])[..., None]
                children[parent] -= 1
                if not children[parent]:
                    del beliefs[parent]
            if children[place]:
                beliefs[place] = table
            axes = (*self._order.scopes[place], self._order.nodes[place])
            least[axes[-1]] = _onto(table, axes, axes[-1:])
            least_pairs |= {pair: _onto(table, axes, pair) for pair in held.get(place, ())}
        return [least[node] for node in range(len(least))], least_pairs

    def _outside(self, place: int, parent: int, belief: Matrix) -> Matrix:
        """The least that all else adds, by the choices of the nodes that `place` meets."""
        axes = (*self._order.scopes[parent], self._order.nodes[parent])
        scope, message = self._order.scopes[place], self._messages[place]
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(message), _onto(belief, axes, scope) - message, np.inf)

    def _table(self, place: int) -> Matrix:
        axes = (*self._order.scopes[place], self._order.nodes[place])
        total: Matrix | float = 0.0
        for scope, array in sorted(self._factors[place], key=lambda factor: factor[1].size):
            total = total + _spread(array, scope, axes)
        shape = [1] * len(axes)
        for scope, array in self._factors[place]:
            for node, size in zip(scope, array.shape, strict=True):
                shape[axes.index(node)] = size
        return np.broadcast_to(np.asarray(total), shape)


def _onto(table: Matrix, axes: Scope, scope: Scope) -> Matrix:
    """The least entries by the nodes of `scope`."""
    least = table.min(axis=tuple(axis for axis, node in enumerate(axes) if node not in scope))
    left = [node for node in axes if node in scope]
    return least.transpose([left.index(node) for node in scope])


def _spread(array: Matrix, scope: Scope, axes: Scope) -> Matrix:
    """The array with its dimensions in the order of `axes`, of size one where it has none."""
    order = sorted(range(len(scope)), key=lambda dim: axes.index(scope[dim]))
    array = array.transpose(order)
    sizes = {scope[dim]: size for dim, size in zip(order, array.shape, strict=True)}
    return array.reshape([sizes.get(node, 1) for node in axes])

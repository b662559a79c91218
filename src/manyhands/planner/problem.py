"""The planner's problem as plain numbers: nodes with choices, edges with costs between them, and a limit of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.core.errors import ManyhandsError, UserError

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class OpChoice:
    """What one way of splitting an op costs each process in a step. Infinite seconds forbid the choice."""

    seconds: float  # computing forward, backward and update, and collectives that nothing hides
    gradient_seconds: float = 0.0  # collectives that agree on its parameters' gradients
    hideable_seconds: float = 0.0  # computing in the backward pass that such collectives may hide behind
    memory_bytes: float = 0.0  # parameters, gradients, optimizer and saved activations


@dataclass(frozen=True)
class Edge:
    """What two nodes' choices cost together."""

    a: int  # number of the first node
    b: int  # number of the second node
    seconds: Matrix  # [choice of a, choice of b]; infinite entries are forbidden. Equal matrices may be one object.
    memory_bytes: Matrix | None = None  # likewise; None if nothing is kept


@dataclass(frozen=True)
class Problem:
    """A choice is wanted for each node, so that a step is short and memory suffices.

    The step's seconds are the sum over nodes and edges, and of the gradients' seconds what isn't hidden:
    max(0, sum of gradient_seconds - overlap * sum of hideable_seconds).
    """

    nodes: Sequence[Sequence[OpChoice]]  # the choices of each node
    edges: Sequence[Edge] = ()  # costs between nodes
    # the most that all nodes and edges together may take; None if there is no limit
    memory_limit_bytes: float | None = None
    overlap: float = 0.0  # the share of hideable seconds that gradients' collectives really hide behind, 0 to 1
    names: Sequence[str] = ()  # of the nodes, as errors say them

    def name(self, node: int) -> str:
        return self.names[node] if self.names else f"node {node}"


@dataclass(frozen=True)
class Solution:
    """One choice for each node, and what they cost together."""

    choices: tuple[int, ...]  # number of the choice of each node
    seconds: float  # of a step: the sum of the next three
    node_seconds: float  # the nodes' own
    edge_seconds: float  # the edges'
    exposed_seconds: float  # what isn't hidden of the gradients' collectives
    gradient_seconds: float  # of the gradients' collectives, hidden or not
    memory_bytes: float  # of all nodes and edges
    bound_seconds: float | None = None  # no assignment that is allowed is faster; None where nobody searched

    @property
    def optimal(self) -> bool:
        """Whether a search has shown that nothing is faster."""
        return self.bound_seconds is not None and self.bound_seconds >= self.seconds - 1e-9 * abs(self.seconds)


class NoPlanError(UserError):
    """No assignment is allowed."""

    least_memory_bytes: float | None = None  # what the smallest plan takes, if the limit of memory is the reason


class SearchStoppedError(ManyhandsError):
    """The time for searching was used up before any plan that fits was found."""


def evaluate(problem: Problem, choices: Sequence[int]) -> Solution:
    """What an assignment costs; infinite if it is forbidden. The limit of memory isn't looked at."""
    taken = [node[choice] for node, choice in zip(problem.nodes, choices, strict=True)]
    node_seconds = sum(choice.seconds for choice in taken)
    edge_seconds = sum(float(edge.seconds[choices[edge.a], choices[edge.b]]) for edge in problem.edges)
    gradient_seconds = sum(choice.gradient_seconds for choice in taken)
    hidden_seconds = problem.overlap * sum(choice.hideable_seconds for choice in taken)
    exposed_seconds = max(0.0, gradient_seconds - hidden_seconds)
    kept = [
        edge.memory_bytes[choices[edge.a], choices[edge.b]] for edge in problem.edges if edge.memory_bytes is not None
    ]
    return Solution(
        choices=tuple(int(choice) for choice in choices),
        seconds=node_seconds + edge_seconds + exposed_seconds,
        node_seconds=node_seconds,
        edge_seconds=edge_seconds,
        exposed_seconds=exposed_seconds,
        gradient_seconds=gradient_seconds,
        memory_bytes=sum(choice.memory_bytes for choice in taken) + float(sum(kept)),
    )

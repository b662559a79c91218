"""The planner's problem: nodes with choices, edges with costs between them, a memory limit; and its linear program."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from manyhands.core.errors import ManyhandsError, UserError

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class OpChoice:
    """The cost of one sharding of an op for each process in a step. Infinite seconds forbid the choice."""

    seconds: float  # computing forward, backward and update, and collectives that nothing hides
    gradient_seconds: float = 0.0  # collectives that agree on its parameters' gradients
    hideable_seconds: float = 0.0  # computing in the backward pass that such collectives may hide behind
    memory_bytes: float = 0.0  # parameters, gradients, optimizer and saved activations
    compute_seconds: float = 0.0  # of `seconds`, those of computing, for predictions


@dataclass(frozen=True)
class Edge:
    """The costs of pairs of choices of two nodes."""

    a: int  # number of the first node
    b: int  # number of the second node
    seconds: Matrix  # [choice of a, choice of b]; infinite entries are forbidden. Equal matrices may be one object.
    memory_bytes: Matrix | None = None  # likewise; None if nothing is kept


@dataclass(frozen=True)
class Problem:
    """Select a choice for each node, so that a step is short and fits into memory.

    The seconds of a step are the sum over nodes and edges, and the part of the gradients' seconds that isn't hidden:
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
    """One choice for each node, with the total cost."""

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
        """True if the search has shown that no assignment is faster."""
        return self.bound_seconds is not None and self.bound_seconds >= self.seconds - 1e-9 * abs(self.seconds)


class NoPlanError(UserError):
    """No assignment is allowed."""

    least_memory_bytes: float | None = None  # what the smallest plan takes, if the limit of memory is the reason


class SearchStoppedError(ManyhandsError):
    """The time limit ended before a plan that fits was found."""


def evaluate(problem: Problem, choices: Sequence[int]) -> Solution:
    """Returns the cost of an assignment; infinite if it is forbidden. Ignores the memory limit."""
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


TOLERANCE = 1e-9
_INF = highspy.kHighsInf
_HINTS = ("remove a pin", "or choose another mesh")
# HiGHS exceeds a row by its tolerance, so an assignment may exceed the memory limit by some bytes.
_MOST_RETRIES = 30
Pair = tuple[int, int]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class SolverResult:
    """A result of HiGHS."""

    solution: Solution | None  # a relaxation's is rounded, and may be forbidden or too large; None if there is none
    bound: float  # no assignment costs less
    stopped: bool  # whether the time limit was reached
    shares: Matrix  # of each column, 0 to 1
    reduced: Matrix  # an assignment that takes the column costs at least `bound` plus this


class Program:
    """One column for each choice of a node, for each pair of choices of an edge, and for the exposed seconds.

    Costs are seconds, without a memory limit, until `limit_memory` and `minimize_memory`.

    Raises:
        NoPlanError: a node or an edge has no choice that is allowed.
        UserError: a cost is negative, not a number, or has the wrong shape.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.relaxations: list[SolverResult] = []  # without the memory limit, and with it
        nodes, edges = _nodes(problem), _edges(problem)
        for node in [a for a, b in edges if a == b]:
            nodes[node][:2] += np.diagonal(edges.pop((node, node)), axis1=1, axis2=2)
        sizes = [node.shape[1] for node in nodes]
        self.choices = sum(sizes)  # columns of nodes, which come first
        self._nodes = np.split(np.arange(self.choices), np.cumsum(sizes)[:-1])
        self._costs = [node[:2] for node in nodes]  # [seconds or bytes, column]
        numbers = np.arange(len(nodes)).repeat(sizes)
        self._entries = [(numbers, np.arange(self.choices), np.ones(self.choices))]  # (row, column, value)
        self._known: dict[bytes, tuple[Indices, Indices, Indices]] = {}
        self._count = len(nodes)  # of rows
        count = self.choices
        for pair, both in edges.items():
            if not np.isfinite(both[0] + nodes[pair[0]][0][:, None] + nodes[pair[1]][0]).any():
                names = " and ".join(problem.name(node) for node in pair)
                raise NoPlanError(f"no strategy is allowed for {names}", "plan", _HINTS)
            count = self._add_edge(pair, both, count)
        seconds, self._bytes = np.hstack([*self._costs, np.array([[0.0], [0.0]])])
        allowed = np.isfinite(seconds)
        usual = seconds[allowed & (seconds > 0)]
        # HiGHS's tolerances are made for numbers near one.
        self._scale = float(np.median(usual)) if len(usual) else 1.0
        self._seconds = np.append(np.where(allowed, seconds, 0.0)[:-1] / self._scale, 1.0)
        self._upper = np.append(allowed[:-1].astype(float), _INF)
        excess = np.concatenate([node[2] for node in nodes]) / self._scale
        self._add_row(np.append(np.arange(self.choices), count), np.append(excess, -1.0))
        # Without a limit the row of bytes has no bounds.
        self._size = max(problem.memory_limit_bytes or 0.0, float(self._bytes.max()), 1.0)
        used = np.flatnonzero(self._bytes)
        self._add_row(used, self._bytes[used] / self._size)
        self._every = np.arange(count + 1, dtype=np.int32)
        self._solver = self._load()

    def _add_edge(self, pair: Pair, both: Matrix, count: int) -> int:
        """Adds a column for each pair of classes of choices; choices with the same costs are one class."""
        key = repr(both.shape).encode() + both.tobytes()
        if key not in self._known:
            (first, of_first), (second, of_second) = (
                np.unique(np.hstack(list(side)), axis=0, return_index=True, return_inverse=True)[1:]
                for side in (both, both.transpose(0, 2, 1))
            )
            # A row for each class, of its pairs minus its choices.
            pairs = np.indices((len(first), len(second))).reshape(2, -1)
            rows = [pairs[0], of_first.ravel(), len(first) + pairs[1], len(first) + of_second.ravel()]
            self._known[key] = first, second, np.concatenate(rows)
        first, second, rows = self._known[key]
        costs = both[:, first][:, :, second].reshape(2, -1)
        self._costs.append(costs)
        taken = np.arange(count, count + costs.shape[1])
        columns = np.concatenate([taken, self._nodes[pair[0]], taken, self._nodes[pair[1]]])
        self._entries.append((self._count + rows, columns, np.where(columns < self.choices, -1.0, 1.0)))
        self._count += len(first) + len(second)
        return count + costs.shape[1]

    def _add_row(self, columns: Indices, values: Matrix) -> None:
        self._entries.append((np.full(len(columns), self._count), columns, values))
        self._count += 1

    def _load(self) -> highspy.Highs:
        sides = np.zeros(self._count)
        sides[: len(self._nodes)] = 1.0
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        order = np.argsort(rows, kind="stable")
        starts = np.append(0, np.cumsum(np.bincount(rows, minlength=self._count)))
        solver = highspy.Highs()
        options = {
            "output_flag": False,
            # No threads of its own: the planner runs in processes that fork and that share few cores.
            "threads": 1,
            "mip_abs_gap": TOLERANCE,
            "mip_feasibility_tolerance": TOLERANCE,
            "primal_feasibility_tolerance": TOLERANCE,
            "dual_feasibility_tolerance": TOLERANCE,
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(
            *(len(self._every), self._count, len(rows)),
            *(int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize), 0.0),
            *(self._seconds, np.zeros(len(self._every)), self._upper),
            *(np.concatenate([sides[:-2], [-_INF, -_INF]]), np.append(sides[:-1], _INF)),
            *(starts.astype(np.int32), columns[order].astype(np.int32), values[order]),
            (self._every < self.choices).astype(np.int32),  # 1 for whole numbers
        )
        return solver

    def limit_memory(self) -> None:
        limit = self.problem.memory_limit_bytes
        self._solver.changeRowBounds(self._count - 1, -_INF, _INF if limit is None else limit / self._size)

    def minimize_memory(self) -> None:
        self._solver.changeRowBounds(self._count - 1, -_INF, _INF)
        self._solver.changeColsCost(len(self._every), self._every, self._bytes / self._size)
        self._scale = self._size

    def relax(self, limit_s: float) -> SolverResult:
        """Solves the program with fractions; warm if only costs or the limit have changed since the last call."""
        self._solver.setOptionValue("solve_relaxation", True)
        # Presolving takes longer than the simplex method, and would start it cold.
        self._solver.setOptionValue("presolve", "off")
        return self._run(limit_s)

    def search(
        self, columns: NDArray[np.bool_], limit_s: float, gap: float, limit: float = float("inf")
    ) -> SolverResult:
        """Solves the integer program over some of the columns, to a share `gap`."""
        deadline = time.monotonic() + limit_s
        upper = np.where(columns, self._upper, 0.0)
        self._solver.changeColsBounds(len(self._every), self._every, np.zeros(len(upper)), upper)
        self._solver.setOptionValue("solve_relaxation", False)
        self._solver.setOptionValue("presolve", "choose")
        self._solver.setOptionValue("mip_rel_gap", max(gap, TOLERANCE))
        answer = self._run(deadline - time.monotonic())
        for _ in range(_MOST_RETRIES):
            if answer.solution is None or answer.solution.memory_bytes <= limit:
                return answer
            taken = [node[choice] for node, choice in zip(self._nodes, answer.solution.choices, strict=True)]
            self._solver.addRow(-_INF, len(taken) - 1, len(taken), np.array(taken, np.int32), np.ones(len(taken)))
            answer = self._run(deadline - time.monotonic())
        return SolverResult(None, 0.0, True, answer.shares, answer.reduced)

    def _run(self, limit_s: float) -> SolverResult:
        # HiGHS counts the time of all its runs together.
        self._solver.setOptionValue("time_limit", self._solver.getRunTime() + max(1.0, limit_s))
        self._solver.run()
        info, found = self._solver.getInfo(), self._solver.getSolution()
        relaxed = self._solver.getOptionValue("solve_relaxation")[1]
        status = self._solver.getModelStatus()
        stopped = status not in {highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible}
        shares = np.asarray(found.col_value)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return SolverResult(None, 0.0 if stopped else float("inf"), stopped, shares, shares)
        bound = info.objective_function_value if relaxed else info.mip_dual_bound
        bound = 0.0 if relaxed and stopped else max(0.0, bound * self._scale)
        chosen = [int(shares[columns].argmax()) for columns in self._nodes]
        reduced = np.asarray(found.col_dual) * self._scale if relaxed and not stopped else np.zeros(len(shares))
        return SolverResult(evaluate(self.problem, chosen), bound, stopped, shares, reduced)


def _nodes(problem: Problem) -> list[Matrix]:
    """Seconds, bytes, and the gradients' seconds minus those that hide them, of each node's choices."""
    nodes: list[Matrix] = []
    for number, node in enumerate(problem.nodes):
        name = problem.name(number)
        if not node:
            raise NoPlanError(f"{name} has no strategy", "plan", _HINTS)
        columns = [(one.seconds, one.memory_bytes, one.gradient_seconds, one.hideable_seconds) for one in node]
        seconds, memory, gradient, hideable = numbers = np.array(columns, dtype=float).T
        _check(name, seconds, numbers[1:])
        if not np.isfinite(seconds).any():
            raise NoPlanError(f"no strategy is allowed for {name}", "plan", _HINTS)
        nodes.append(np.stack([seconds, memory, gradient - problem.overlap * hideable]))
    return nodes


def _edges(problem: Problem) -> dict[Pair, Matrix]:
    """Seconds and bytes by (a, b) with a <= b, those of parallel edges added up."""
    edges: dict[Pair, Matrix] = {}
    for edge in problem.edges:
        a, b, name = edge.a, edge.b, f"{problem.name(edge.a)} to {problem.name(edge.b)}"
        kept = np.zeros(edge.seconds.shape) if edge.memory_bytes is None else edge.memory_bytes
        if edge.seconds.shape != (len(problem.nodes[a]), len(problem.nodes[b])) or kept.shape != edge.seconds.shape:
            raise UserError(f"the costs from {name} have a wrong shape")
        _check(name, edge.seconds, kept)
        both = np.stack([edge.seconds, kept])
        if a > b:
            a, b, both = b, a, both.transpose(0, 2, 1)
        edges[a, b] = edges[a, b] + both if (a, b) in edges else both
    return edges


def _check(name: str, seconds: Matrix, others: Matrix) -> None:
    # Negative costs would be fine for the search, but they come from mistakes only: no op takes less than no time.
    if np.isnan(seconds).any() or (seconds < 0).any() or not np.isfinite(others).all() or (others < 0).any():
        raise UserError(f"a cost of {name} is negative or not a number", "plan", ("measure again",))

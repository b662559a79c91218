"""A solver that assigns a choice to each node of a graph, so that a step is fastest and fits into memory.

The solution of the linear relaxation is nearly always integral, and then optimal. If it exceeds the memory limit, the
limit is added as a row, and the relaxation is solved again from a warm start. If the solution is fractional, integer
programs follow: over the choices with nonzero values in the relaxations, then over choices with zero reduced cost, and
finally over all choices that may be part of a better assignment.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from manyhands.core.errors import UserError

DEFAULT_LIMIT_S = 60.0
TOLERANCE = 1e-9
_GIB = 1 << 30
_INF = highspy.kHighsInf
# HiGHS may exceed the memory limit by some bytes (its tolerance). The search then excludes the assignment and retries.
_MOST_RETRIES = 30
Pair = tuple[int, int]
Indices = NDArray[np.intp]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class OpCost:
    """The cost of one sharding of an op, per process and step. Infinite seconds forbid the sharding."""

    seconds: float  # computation (forward, backward, update), and collectives that can't overlap
    gradient_seconds: float = 0.0  # collectives for the gradients of its parameters
    hideable_seconds: float = 0.0  # computation of the backward pass that can hide gradient collectives
    memory_bytes: float = 0.0  # parameters, gradients, optimizer and saved activations
    compute_seconds: float = 0.0  # the computation in `seconds`, for predictions

    def __add__(self, other: "OpCost") -> "OpCost":
        return OpCost(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Edge:
    """The costs between two nodes, for each pair of their choices."""

    a: int  # index of the first node
    b: int  # index of the second node
    seconds: Matrix  # [choice of a, choice of b]; infinite: forbidden. Edges may share one matrix object.
    memory_bytes: Matrix | None = None  # of the same shape; None: no memory


@dataclass(frozen=True)
class Problem:
    """An optimization problem: select a choice for each node so that a step is fast and fits into memory.

    The seconds of a step are the sum over nodes and edges, plus the exposed seconds of gradient collectives: max(0, sum
    of gradient_seconds - overlap * sum of hideable_seconds).
    """

    nodes: Sequence[Sequence[OpCost]]  # the choices of each node
    edges: Sequence[Edge] = ()  # costs between nodes
    memory_limit_bytes: float | None = None  # limit for all nodes and edges together; None: no limit
    overlap: float = 0.0  # fraction of hideable seconds that really hides gradient collectives, 0 to 1
    names: Sequence[str] = ()  # of the nodes, for errors

    def name(self, node: int) -> str:
        return self.names[node] if self.names else f"node {node}"


@dataclass(frozen=True)
class Solution:
    """An assignment of a choice to each node, with its total cost."""

    choices: tuple[int, ...]  # index of the choice of each node
    seconds: float  # of a step
    memory_bytes: float  # of all nodes and edges
    bound_seconds: float = 0.0  # lower bound for all allowed assignments


class NoPlanError(UserError):
    """Raised if no plan fits into memory."""

    def __init__(self, limit_bytes: float, least_bytes: float) -> None:
        limit, least = f"{limit_bytes / _GIB:.4g} GiB", f"{least_bytes / _GIB:.4g} GiB"
        hints = ("raise the memory limit", "use more processes", "or reduce the batch")
        super().__init__(f"no plan fits into {limit} per process; the smallest takes {least}", "--memory", hints)
        self.least_memory_bytes = least_bytes


def evaluate(problem: Problem, choices: Sequence[int]) -> Solution:
    """Returns an assignment with its cost, which is infinite if a choice is forbidden. Ignores the memory limit."""
    taken = [node[choice] for node, choice in zip(problem.nodes, choices, strict=True)]
    pairs = [(edge, (choices[edge.a], choices[edge.b])) for edge in problem.edges]
    hidden_seconds = problem.overlap * sum(choice.hideable_seconds for choice in taken)
    exposed_seconds = max(0.0, sum(choice.gradient_seconds for choice in taken) - hidden_seconds)
    edge_seconds = sum(float(edge.seconds[pair]) for edge, pair in pairs)
    kept_bytes = float(sum(edge.memory_bytes[pair] for edge, pair in pairs if edge.memory_bytes is not None))
    return Solution(
        choices=tuple(map(int, choices)),
        seconds=sum(choice.seconds for choice in taken) + edge_seconds + exposed_seconds,
        memory_bytes=sum(choice.memory_bytes for choice in taken) + kept_bytes,
    )


@dataclass(frozen=True)
class SolverResult:
    """The result of one run of HiGHS."""

    solution: Solution | None  # rounded for a relaxation, hence possibly forbidden or too large; None: no solution
    bound: float  # lower bound of the cost, in seconds
    stopped: bool  # True if the time limit was reached
    shares: Matrix  # value of each column, 0 to 1
    reduced: Matrix  # reduced costs: with the column, an assignment costs at least `bound` + this


class Program:
    """An integer program with columns for choices of nodes, pairs of choices of edges, and exposed seconds (`Problem`).

    The memory limit applies from the second relaxation on. Raises UserError if a cost is negative or NaN.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.limit_bytes = _INF if problem.memory_limit_bytes is None else problem.memory_limit_bytes
        self.relaxations: list[SolverResult] = []  # without the memory limit, then with it
        nodes, edges = _nodes(problem), _edges(problem)
        for node in [a for a, b in edges if a == b]:
            nodes[node][:2] += np.diagonal(edges.pop((node, node)), axis1=1, axis2=2)
        sizes = [node.shape[1] for node in nodes]
        self.choices = sum(sizes)  # number of columns of nodes, which come first
        self._nodes = np.split(np.arange(self.choices), np.cumsum(sizes)[:-1])
        self._costs = [node[:2] for node in nodes]  # [seconds or bytes, column]
        numbers = np.arange(len(nodes)).repeat(sizes)
        self._entries = [(numbers, np.arange(self.choices), np.ones(self.choices))]  # (row, column, value)
        self._known: dict[bytes, tuple[Indices, Indices, Indices]] = {}
        self._count = len(nodes)  # number of rows
        count = self.choices
        for pair, both in edges.items():
            count = self._add_edge(pair, both, count)
        seconds, memory = np.hstack([*self._costs, np.array([[0.0], [0.0]])])
        allowed = np.isfinite(seconds)
        usual = seconds[allowed & (seconds > 0)]
        # Scaled, because HiGHS's tolerances assume numbers near one.
        self._scale = float(np.median(usual)) if len(usual) else 1.0
        self._seconds = np.append(np.where(allowed, seconds, 0.0)[:-1] / self._scale, 1.0)
        self._upper = np.append(allowed[:-1].astype(float), _INF)
        excess = np.concatenate([node[2] for node in nodes]) / self._scale
        # The row of bytes is the last; without a limit, it has no bounds.
        self._size = max(problem.memory_limit_bytes or 0.0, float(memory.max()), 1.0)
        used = np.flatnonzero(memory)
        for columns, values in (
            (np.append(np.arange(self.choices), count), np.append(excess, -1.0)),
            (used, memory[used] / self._size),
        ):
            self._entries.append((np.full(len(columns), self._count), columns, values))
            self._count += 1
        self._every = np.arange(count + 1, dtype=np.int32)
        self._solver = self._create_solver()

    def _add_edge(self, pair: Pair, both: Matrix, count: int) -> int:
        """Adds columns for an edge: one per pair of classes of choices with equal costs. Returns the new total."""
        key = repr(both.shape).encode() + both.tobytes()
        if key not in self._known:
            (first, of_first), (second, of_second) = (
                np.unique(np.hstack(list(side)), axis=0, return_index=True, return_inverse=True)[1:]
                for side in (both, both.transpose(0, 2, 1))
            )
            # A row for each class: the sum of its pairs minus the sum of its choices.
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

    def _create_solver(self) -> highspy.Highs:
        sides = np.zeros(self._count)
        sides[: len(self._nodes)] = 1.0
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        order = np.argsort(rows, kind="stable")
        starts = np.append(0, np.cumsum(np.bincount(rows, minlength=self._count)))
        solver = highspy.Highs()
        options = {
            "output_flag": False,
            # One thread: the planner runs in processes that fork and share few cores.
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
            (self._every < self.choices).astype(np.int32),  # 1: integer
        )
        return solver

    def relax(self, deadline: float) -> SolverResult:
        """Solves the linear relaxation. Starts from the last solution if only the memory limit has changed since."""
        self._solver.setOptionValue("solve_relaxation", True)
        # Presolving takes longer than the simplex method, and prevents a warm start.
        self._solver.setOptionValue("presolve", "off")
        return self._run(deadline - time.monotonic())

    def search(self, columns: NDArray[np.bool_], deadline: float, gap: float) -> SolverResult:
        """Solves the integer program within the memory limit to a relative `gap`. `columns`: mask of usable columns."""
        upper = np.where(columns, self._upper, 0.0)
        self._solver.changeColsBounds(len(self._every), self._every, np.zeros(len(upper)), upper)
        self._solver.setOptionValue("solve_relaxation", False)
        self._solver.setOptionValue("presolve", "choose")
        self._solver.setOptionValue("mip_rel_gap", max(gap, TOLERANCE))
        answer = self._run(deadline - time.monotonic())
        for _ in range(_MOST_RETRIES):
            if answer.solution is None or answer.solution.memory_bytes <= self.limit_bytes:
                return answer
            taken = [node[choice] for node, choice in zip(self._nodes, answer.solution.choices, strict=True)]
            self._solver.addRow(-_INF, len(taken) - 1, len(taken), np.array(taken, np.int32), np.ones(len(taken)))
            answer = self._run(deadline - time.monotonic())
        return SolverResult(None, 0.0, True, answer.shares, answer.reduced)

    def _run(self, limit_s: float) -> SolverResult:
        # HiGHS's time limit covers all of its runs together.
        self._solver.setOptionValue("time_limit", self._solver.getRunTime() + max(1.0, limit_s))
        self._solver.run()
        info, found = self._solver.getInfo(), self._solver.getSolution()
        relaxed = self._solver.getOptionValue("solve_relaxation")[1]
        status = self._solver.getModelStatus()
        stopped = status not in {highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible}
        shares = np.asarray(found.col_value)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return SolverResult(None, 0.0 if stopped else _INF, stopped, shares, shares)
        bound = info.objective_function_value if relaxed else info.mip_dual_bound
        bound = 0.0 if relaxed and stopped else max(0.0, bound * self._scale)
        chosen = [int(shares[columns].argmax()) for columns in self._nodes]
        reduced = np.asarray(found.col_dual) * self._scale if relaxed and not stopped else np.zeros(len(shares))
        return SolverResult(evaluate(self.problem, chosen), bound, stopped, shares, reduced)

    def solve(self, deadline: float, gap: float, cutoff_seconds: float) -> Solution | None:
        """Returns an assignment that fits into memory and is slower than the best by at most the fraction `gap`.

        After the deadline, returns the best assignment so far, whose `bound_seconds` limits the error. If no assignment
        can be faster than `cutoff_seconds` (a plan on another mesh), returns any that fits. Returns None if no
        assignment is allowed and fits, or none was found in time. Repeated calls reuse the relaxations.
        """
        if not self.relaxations:
            self.relaxations.append(self.relax(deadline))
        first = self.relaxations[0]
        if first.solution is None:
            return None
        found = _Incumbent(self.limit_bytes, gap, cutoff_seconds, bound=first.bound)
        found.add(first.solution)
        if self.limit_bytes < _INF and len(self.relaxations) == 1 and not found.done():
            self._solver.changeRowBounds(self._count - 1, -_INF, self.limit_bytes / self._size)
            self.relaxations.append(self.relax(deadline))
        last = self.relaxations[-1]  # the tightest
        if last.solution is None:
            return None
        found.bound = last.bound
        found.add(last.solution)
        edges = np.arange(len(last.shares)) >= self.choices
        mixed = np.any([answer.shares > TOLERANCE for answer in self.relaxations], axis=0) | edges
        free = (last.reduced <= TOLERANCE * last.bound) | edges
        for columns in (mixed, free):
            if not found.done():
                now = time.monotonic()
                found.add(self.search(columns, now + (deadline - now) / 4, gap).solution)
        if not found.done():
            most = found.seconds if found.best is None else min(found.seconds, cutoff_seconds)
            near = last.reduced <= most - last.bound + TOLERANCE * last.bound
            near[-1] = True  # the exposed seconds: for values above 1, a reduced cost is no bound
            answer = self.search(near, deadline, gap)
            found.add(answer.solution)
            exact = not (answer.stopped or gap)
            found.bound = max(found.bound, min(most, found.seconds if exact else answer.bound))
        if found.best is None:
            return None
        proven = found.seconds - found.bound <= TOLERANCE * found.seconds
        return replace(found.best, bound_seconds=found.seconds if proven else min(found.bound, found.seconds))


@dataclass
class _Incumbent:
    """The best assignment found so far that fits into memory, and the stopping criterion of the search."""

    limit_bytes: float
    gap: float
    cutoff_seconds: float
    bound: float
    best: Solution | None = None

    @property
    def seconds(self) -> float:
        return self.best.seconds if self.best else _INF

    def add(self, solution: Solution | None) -> None:
        if solution and solution.memory_bytes <= self.limit_bytes and solution.seconds < self.seconds:
            self.best = solution

    def done(self) -> bool:
        near = self.seconds - self.bound <= max(self.gap, TOLERANCE) * self.seconds
        return self.best is not None and (self.bound >= self.cutoff_seconds or near)


def _nodes(problem: Problem) -> list[Matrix]:
    """Returns a matrix [3, choices] for each node: seconds, bytes, and gradient seconds minus hidden seconds."""
    nodes: list[Matrix] = []
    for number, node in enumerate(problem.nodes):
        columns = [(one.seconds, one.memory_bytes, one.gradient_seconds, one.hideable_seconds) for one in node]
        seconds, memory, gradient, hideable = numbers = np.array(columns, dtype=float).T
        _check_costs(problem.name(number), seconds, numbers[1:])
        nodes.append(np.stack([seconds, memory, gradient - problem.overlap * hideable]))
    return nodes


def _edges(problem: Problem) -> dict[Pair, Matrix]:
    """Returns {(a, b): seconds and bytes [2, choices of a, choices of b]}, a <= b. Adds up parallel edges."""
    edges: dict[Pair, Matrix] = {}
    for edge in problem.edges:
        a, b, name = edge.a, edge.b, f"{problem.name(edge.a)} to {problem.name(edge.b)}"
        kept = np.zeros(edge.seconds.shape) if edge.memory_bytes is None else edge.memory_bytes
        _check_costs(name, edge.seconds, kept)
        both = np.stack([edge.seconds, kept])
        if a > b:
            a, b, both = b, a, both.transpose(0, 2, 1)
        edges[a, b] = edges[a, b] + both if (a, b) in edges else both
    return edges


def _check_costs(name: str, seconds: Matrix, others: Matrix) -> None:
    if np.isnan(seconds).any() or (seconds < 0).any() or not np.isfinite(others).all() or (others < 0).any():
        raise UserError(f"a cost of {name} is negative or not a number", "plan", ("measure again",))


def _least_memory_bytes(problem: Problem, deadline: float) -> float:
    """Returns the smallest memory of any assignment in bytes, or infinity if no assignment is allowed."""
    nodes = [[OpCost(one.memory_bytes if one.seconds < _INF else _INF) for one in node] for node in problem.nodes]
    edges = [
        Edge(one.a, one.b, np.where(one.seconds < _INF, 0.0 if one.memory_bytes is None else one.memory_bytes, _INF))
        for one in problem.edges
    ]
    smallest = Program(Problem(nodes, edges, names=problem.names)).solve(deadline, 0.0, _INF)
    return smallest.seconds if smallest else _INF


def solve_all(
    problems: Sequence[Problem], limit_s: float = DEFAULT_LIMIT_S, gap: float = 0.0
) -> tuple[list[Solution | None], float]:
    """Solves one problem per mesh. The fastest solution is optimal up to `gap`, unless `limit_s` seconds end first.

    Other solutions fit into memory and are proven to be slower, but may not be the best on their mesh. Returns (a
    solution or None per problem, bytes of the smallest assignment if no problem has a solution).
    """
    allowed = {number: problem for number, problem in enumerate(problems) if all(problem.nodes)}
    deadline = time.monotonic() + limit_s
    programs, solved = dict[int, Program](), dict[int, Solution]()
    for number, problem in allowed.items():
        left_s = max(1.0, (deadline - time.monotonic()) / 2)
        program = programs[number] = Program(problem)
        if solution := program.solve(time.monotonic() + left_s, gap, -_INF):
            solved[number] = solution
    for number in sorted(solved, key=lambda number: (solved[number].bound_seconds, number)):
        best_seconds, first = min(solution.seconds for solution in solved.values()), solved[number]
        if first.bound_seconds < min(best_seconds, first.seconds) * (1 - max(gap, 1e-9)):
            left_s = max(1.0, deadline - time.monotonic())
            again = programs[number].solve(time.monotonic() + left_s, gap, best_seconds)
            solved[number] = min(again or first, first, key=lambda solution: solution.seconds)
    smallest = [_least_memory_bytes(problem, deadline) for problem in allowed.values()] if not solved else []
    return [solved.get(number) for number in range(len(problems))], min(smallest, default=_INF)

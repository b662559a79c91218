"""The problem as an integer program, for HiGHS; exact for any graph, with the limit of memory."""

from dataclasses import dataclass, field, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from manyhands.planner.problem import Matrix
from manyhands.planner.tables import Pair, Tables

# HiGHS allows a row to be missed by a little, so a plan may come back that is too large by some bytes.
_MOST_RETRIES = 30
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class IntegerResult:
    """What the integer program came to."""

    choices: list[int] | None  # the best assignment; None if there is none that fits, or none was found in time
    bound_seconds: float  # nothing that fits is faster
    stopped: bool  # whether the time was used up


@dataclass
class _Program:
    """Columns and rows as they are gathered; `entries` are (rows, columns, values)."""

    costs: list[Matrix] = field(default_factory=list)
    uppers: list[Matrix] = field(default_factory=list)
    bytes_: list[Matrix] = field(default_factory=list)
    entries: list[tuple[NDArray[np.intp], NDArray[np.intp], Matrix]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    columns: int = 0

    def add_columns(self, costs: Matrix, memory: Matrix) -> NDArray[np.intp]:
        """New columns from 0 to 1; forbidden ones are held at 0."""
        allowed = np.isfinite(costs)
        self.costs.append(np.where(allowed, costs, 0.0).ravel())
        self.uppers.append(allowed.astype(float).ravel())
        self.bytes_.append(memory.ravel())
        first, self.columns = self.columns, self.columns + costs.size
        return np.arange(first, self.columns)

    def add_row(self, columns: NDArray[np.intp], values: Matrix, lower: float, upper: float) -> None:
        self.entries.append((np.full(len(columns), len(self.lower)), columns, values))
        self.lower.append(lower)
        self.upper.append(upper)


def search_integers(tables: Tables, limit_s: float, gap: float = 0.0) -> IntegerResult:
    """The assignment of least seconds that fits into the limit of memory, or one slower by at most the share `gap`.

    The tables have no forbidden choices. After `limit_s` the best so far has to do.
    """
    program = _Program()
    scale = _scale(tables)
    nodes = _fill(program, tables, scale)
    solver = _solver(program, sum(tables.sizes))
    solver.setOptionValue("time_limit", limit_s)
    solver.setOptionValue("mip_rel_gap", max(gap, _TOLERANCE))
    for _ in range(_MOST_RETRIES):
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        stopped = status == highspy.HighsModelStatus.kTimeLimit
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return IntegerResult(None, info.mip_dual_bound * scale if stopped else float("inf"), stopped)
        values = np.asarray(solver.getSolution().col_value)
        choices = [int(values[columns].argmax()) for columns in nodes]
        if memory_of(tables, choices) <= tables.limit:
            return IntegerResult(choices, info.mip_dual_bound * scale, stopped)
        taken = np.array([columns[choice] for columns, choice in zip(nodes, choices, strict=True)], dtype=np.int32)
        solver.addRow(-highspy.kHighsInf, len(taken) - 1, len(taken), taken, np.ones(len(taken)))
    return IntegerResult(None, 0.0, stopped=True)


def memory_of(tables: Tables, choices: list[int]) -> float:
    nodes = sum(float(memory[choice]) for memory, choice in zip(tables.memory, choices, strict=True))
    return nodes + sum(float(kept[choices[a], choices[b]]) for (a, b), kept in tables.kept.items())


def _scale(tables: Tables) -> float:
    """A usual cost: HiGHS's tolerances are made for numbers near one."""
    costs = np.concatenate([*tables.seconds, *(matrix.ravel() for matrix in tables.pairs.values())])
    costs = costs[np.isfinite(costs) & (costs > 0)]
    return float(np.median(costs)) if len(costs) else 1.0


def _fill(program: _Program, tables: Tables, scale: float) -> list[NDArray[np.intp]]:
    """Writes the program and returns the columns of each node's choices."""
    nodes = [
        program.add_columns(seconds / scale, memory)
        for seconds, memory in zip(tables.seconds, tables.memory, strict=True)
    ]
    for columns in nodes:
        program.add_row(columns, np.ones(len(columns)), 1.0, 1.0)
    for (a, b), matrix in tables.pairs.items():
        _add_pair(program, (nodes[a], nodes[b]), matrix / scale, tables.kept.get((a, b)))
    if any(excess.any() for excess in tables.excess):
        exposed = program.add_columns(np.ones(1), np.zeros(1))
        program.uppers[-1] = np.full(1, highspy.kHighsInf)
        excess = np.concatenate(tables.excess) / scale
        program.add_row(np.append(np.concatenate(nodes), exposed), np.append(excess, -1.0), -highspy.kHighsInf, 0.0)
    if np.isfinite(tables.limit):
        size = max(tables.limit, 1.0)
        memory = np.concatenate(program.bytes_) / size
        used = np.flatnonzero(memory)
        program.add_row(used, memory[used], -highspy.kHighsInf, tables.limit / size)
    return nodes


def _add_pair(
    program: _Program, nodes: tuple[NDArray[np.intp], NDArray[np.intp]], matrix: Matrix, kept: Matrix | None
) -> None:
    """A column for each pair of classes of choices; choices with the same costs are one class."""
    kept = np.zeros_like(matrix) if kept is None else kept
    both = np.hstack([matrix, kept]), np.hstack([matrix.T, kept.T])
    (rows, row_class), (columns, column_class) = (
        np.unique(side, axis=0, return_index=True, return_inverse=True)[1:] for side in both
    )
    grid = np.ix_(rows, columns)
    pairs = program.add_columns(matrix[grid], kept[grid]).reshape(len(rows), len(columns))
    for lines, classes, choices in ((pairs, row_class, nodes[0]), (pairs.T, column_class, nodes[1])):
        for number, line in enumerate(lines):
            members = choices[classes.ravel() == number]
            values = np.concatenate([np.ones(len(line)), -np.ones(len(members))])
            program.add_row(np.concatenate([line, members]), values, 0.0, 0.0)


def _solver(program: _Program, integers: int) -> highspy.Highs:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.columns, len(program.lower)
    model.col_cost_, model.col_upper_ = np.concatenate(program.costs), np.concatenate(program.uppers)
    model.col_lower_ = np.zeros(program.columns)
    model.row_lower_, model.row_upper_ = np.array(program.lower), np.array(program.upper)
    rows, columns, values = (np.concatenate(parts) for parts in zip(*program.entries, strict=True))
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.searchsorted(rows, np.arange(len(program.lower) + 1)).astype(np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = columns.astype(np.int32), values
    kinds = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    model.integrality_ = [kinds[column >= integers] for column in range(program.columns)]
    solver = quiet_solver()
    solver.passModel(model)
    return solver


def quiet_solver() -> highspy.Highs:
    """HiGHS without output, threads and easy tolerances."""
    solver = highspy.Highs()
    options = {
        "output_flag": False,
        # No threads of its own: the planner runs in processes that fork and that share few cores.
        "threads": 1,
        "mip_abs_gap": _TOLERANCE,
        "mip_feasibility_tolerance": _TOLERANCE,
        "primal_feasibility_tolerance": _TOLERANCE,
        "dual_feasibility_tolerance": _TOLERANCE,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    return solver


def least_memory(tables: Tables) -> Tables:
    """The tables of another problem: bytes in the place of seconds, and no limit."""
    pairs: dict[Pair, Matrix] = {}
    for pair, matrix in tables.pairs.items():
        kept = tables.kept.get(pair, np.zeros_like(matrix))
        pairs[pair] = np.where(np.isfinite(matrix), kept, np.inf)
    seconds = [
        np.where(np.isfinite(own), memory, np.inf) for own, memory in zip(tables.seconds, tables.memory, strict=True)
    ]
    excess = [np.zeros_like(memory) for memory in tables.memory]
    return replace(tables, seconds=seconds, excess=excess, pairs=pairs, kept={}, limit=float("inf"))

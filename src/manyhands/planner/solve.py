"""Finds the assignment with the fastest step, by linear programs and, if these are fractional, integer programs.

The relaxation of the problem is nearly always integral, and then optimal. If its assignment doesn't fit into memory,
the warm solver gets the limit as one more row, whose multiplier is the price of a byte. What is fractional then is
decided by an integer program: over the few choices that the relaxations mix, over those that cost nothing extra at
their prices, and in the end over all that may be part of a better assignment.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from manyhands.planner.problem import (
    TOLERANCE,
    NoPlanError,
    Problem,
    Program,
    SearchStoppedError,
    Solution,
    SolverResult,
    evaluate,
)

DEFAULT_LIMIT_S = 60.0
_GIB = 1 << 30


def solve(
    problem: Problem, limit_s: float = DEFAULT_LIMIT_S, gap: float = 0.0, cutoff_seconds: float = float("inf")
) -> Solution:
    """Returns the best allowed assignment that fits into memory, or one that is slower by at most the fraction `gap`.

    After `limit_s`, returns the best so far; its bound limits the error. `cutoff_seconds` are those of a
    plan for another mesh: as soon as nothing here can be faster, any assignment that fits is returned.

    Raises:
        NoPlanError: no assignment is allowed, or none fits; it names the least memory possible.
        SearchStoppedError: the time was used up before anything was found.
        UserError: the problem's numbers make no sense.
    """
    if not problem.nodes:
        return replace(evaluate(problem, ()), bound_seconds=0.0)
    program, deadline = Program(problem), time.monotonic() + limit_s
    solution = _solve(program, deadline, gap, cutoff_seconds)
    if solution is None:
        raise too_large(problem.memory_limit_bytes or 0.0, _least_memory_bytes(program, deadline))
    return solution


def _solve(program: Program, deadline: float, gap: float, cutoff_seconds: float) -> Solution | None:
    """As `solve`, None if nothing fits; a program that is solved again keeps its relaxations."""
    most, answers = program.problem.memory_limit_bytes, program.relaxations
    limit = float("inf") if most is None else most
    goal = _Goal(lambda one: one.seconds if one.memory_bytes <= limit else float("inf"), limit, gap, cutoff_seconds)
    if not answers:
        answers.append(_relax(program, deadline))
    if answers[0].solution is None:
        raise _contradiction()
    if most is not None and len(answers) == 1 and not goal.reached(answers[0].solution, answers[0].bound):
        program.limit_memory()
        answers.append(_relax(program, deadline))
    best, bound = _search(program, goal, answers, deadline)
    if best is None and bound < float("inf"):
        raise _stopped()
    return best and replace(best, bound_seconds=bound)


@dataclass(frozen=True)
class _Goal:
    """The cost to minimize, and when a search may end."""

    cost: Callable[[Solution], float]  # infinite if it isn't allowed
    limit_bytes: float = float("inf")
    gap: float = 0.0
    cutoff: float = float("inf")

    def reached(self, best: Solution | None, bound: float) -> bool:
        cost = self.cost_of(best)
        return cost < float("inf") and (bound >= self.cutoff or cost - bound <= max(self.gap, TOLERANCE) * cost)

    def cost_of(self, solution: Solution | None) -> float:
        return float("inf") if solution is None else self.cost(solution)


def _search(
    program: Program, goal: _Goal, relaxations: list[SolverResult], deadline: float
) -> tuple[Solution | None, float]:
    """The best assignment and a bound, from relaxations of which the last is the tightest.

    Without an assignment, the bound is infinite if there is none, and finite if the time was used up.
    """
    best = min((answer.solution for answer in relaxations), key=goal.cost_of)
    last = relaxations[-1]
    if last.solution is None:
        return None, float("inf")
    bound = last.bound
    edges = np.arange(len(last.shares)) >= program.choices
    mixed = np.any([answer.shares > TOLERANCE for answer in relaxations], axis=0) | edges
    free = (last.reduced <= TOLERANCE * last.bound) | edges
    for columns in (mixed, free, None):
        if goal.reached(best, bound):
            break
        left_s = deadline - time.monotonic()
        if columns is not None:
            answer = program.search(columns, left_s / 4, goal.gap, goal.limit_bytes)
            best = min(best, answer.solution, key=goal.cost_of)
            continue
        most = goal.cost_of(best) if best is None else min(goal.cost_of(best), goal.cutoff)
        near = last.reduced <= most - last.bound + TOLERANCE * last.bound
        answer = program.search(near, left_s, goal.gap, goal.limit_bytes)
        best = min(best, answer.solution, key=goal.cost_of)
        exact = not (answer.stopped or goal.gap)
        bound = max(bound, min(most, goal.cost_of(best) if exact else answer.bound))
    cost = goal.cost_of(best)
    if cost == float("inf"):
        return None, bound
    return best, cost if cost - bound <= TOLERANCE * cost else min(bound, cost)


def _relax(program: Program, deadline: float) -> SolverResult:
    answer = program.relax(deadline - time.monotonic())
    if answer.solution is None and answer.stopped:
        raise _stopped()
    return answer


def _least_memory_bytes(program: Program, deadline: float) -> float:
    program.minimize_memory()
    goal = _Goal(lambda one: one.memory_bytes if one.seconds < float("inf") else float("inf"))
    best, _ = _search(program, goal, [_relax(program, deadline)], deadline)
    if best is None:
        raise _contradiction()
    return best.memory_bytes


def _stopped() -> SearchStoppedError:
    return SearchStoppedError("no plan was found in time", "plan", ("search longer", "or raise the memory limit"))


def _contradiction() -> NoPlanError:
    return NoPlanError("no plan is allowed: the ops' strategies contradict each other", "plan", ("remove a pin",))


def too_large(limit_bytes: float, least_bytes: float) -> NoPlanError:
    error = NoPlanError(
        f"no plan fits into {limit_bytes / _GIB:.4g} GiB per process; the smallest takes {least_bytes / _GIB:.4g} GiB",
        "--memory",
        ("raise the memory limit", "use more processes", "or reduce the batch"),
    )
    error.least_memory_bytes = least_bytes
    return error


def solve_all(
    problems: Sequence[Problem], limit_s: float = DEFAULT_LIMIT_S, gap: float = 0.0
) -> tuple[list[Solution | None], float]:
    """Solves the problems of a network on several meshes; finds the fastest of all, as `solve` does.

    The others are only shown to be slower, so their assignments fit but may not be the best. `limit_s` is the time for
    all meshes together.

    Returns:
        The solutions, None for a mesh without one; and the smallest bytes possible on any mesh if there is none at all.
    """
    deadline = time.monotonic() + limit_s
    programs: dict[int, Program] = {}
    solved: dict[int, Solution] = {}
    for number, problem in enumerate(problems):
        left_s = max(1.0, (deadline - time.monotonic()) / 2)
        with contextlib.suppress(NoPlanError, SearchStoppedError):
            program = programs[number] = Program(problem)
            if solution := _solve(program, time.monotonic() + left_s, gap, -float("inf")):
                solved[number] = solution
    for number in sorted(solved, key=lambda number: (solved[number].bound_seconds or 0.0, number)):
        best_seconds = min(solution.seconds for solution in solved.values())
        first = solved[number]
        if (first.bound_seconds or 0.0) < min(best_seconds, first.seconds) * (1 - max(gap, 1e-9)):
            left_s = max(1.0, deadline - time.monotonic())
            with contextlib.suppress(SearchStoppedError):
                again = _solve(programs[number], time.monotonic() + left_s, gap, best_seconds)
                solved[number] = min(again or first, first, key=lambda solution: solution.seconds)
    least_bytes = float("inf")
    for program in programs.values() if not solved else ():
        with contextlib.suppress(NoPlanError, SearchStoppedError):
            least_bytes = min(least_bytes, _least_memory_bytes(program, deadline))
    return [solved.get(number) for number in range(len(problems))], least_bytes

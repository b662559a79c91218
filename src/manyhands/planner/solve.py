"""Finds the assignment that costs a step the least, exactly."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.planner.elimination import Elimination, EliminationOrder, elimination_order
from manyhands.planner.integer import least_memory, search_integers
from manyhands.planner.prices import Prices
from manyhands.planner.problem import NoPlanError, Problem, SearchStoppedError, Solution, evaluate
from manyhands.planner.tables import Tables, drop_dominated, drop_forbidden, tables_of

DEFAULT_LIMIT_S = 60.0
_GIB = 1 << 30
# Prices are asked anew as long as that leaves so few of the choices.
_WORTHWHILE = 0.9


def solve(
    problem: Problem, limit_s: float = DEFAULT_LIMIT_S, gap: float = 0.0, cutoff_seconds: float = float("inf")
) -> Solution:
    """The best assignment of all that are allowed and fit into memory, or one slower by at most the share `gap`.

    Where the graph is narrow, elimination gives the optimum or, if the limit of memory or the hiding of gradients
    couple all nodes, a bound; the few choices near it are left to the integer program. A wide graph goes there at once.

    After `limit_s` the best so far has to do; its bound says how far it may be off. `cutoff_seconds` are of a plan for
    another mesh: once it is clear that nothing here is faster, whatever fits will do.

    Raises:
        NoPlanError: no assignment is allowed, or none fits; it names the least memory possible.
        SearchStoppedError: the time was used up before anything was found.
        UserError: the problem's numbers make no sense.
    """
    deadline, enough = time.monotonic() + limit_s, _Enough(gap, cutoff_seconds)
    tables = drop_forbidden(tables_of(problem), problem)
    if not problem.nodes:
        return replace(evaluate(problem, ()), bound_seconds=0.0)
    order = elimination_order(tables.sizes, list(tables.pairs))
    if order is None:
        tables = drop_dominated(tables)
        order = elimination_order(tables.sizes, list(tables.pairs))
    if order is None:
        return _from_integers(problem, tables, None, deadline, enough)
    known, left = _by_prices(problem, tables, order, deadline, enough)
    return known if left is None else _from_integers(problem, drop_dominated(left), known, deadline, enough)


@dataclass(frozen=True)
class _Enough:
    """When a search may end early; see `solve`."""

    gap: float
    cutoff_seconds: float


def _by_prices(
    problem: Problem, tables: Tables, order: EliminationOrder, deadline: float, enough: _Enough
) -> tuple[Solution, Tables | None]:
    """An assignment that fits, with a bound, and the choices that may still be better, if there are any."""
    known: Solution | None = None
    while True:
        prices = Prices(tables, order, known.seconds if known else float("inf"), enough.gap)
        prices.ask()
        if prices.bound_seconds == float("inf"):
            raise _contradiction()
        if prices.seconds == float("inf"):
            raise _too_large(problem, prices.least_memory_bytes)
        if not prices.closed and prices.bound_seconds < enough.cutoff_seconds:
            prices.cross(max(1.0, (deadline - time.monotonic()) / 8))
        if prices.choices is not None:
            known = evaluate(problem, tables.named(prices.choices))
        assert known is not None
        known = replace(known, bound_seconds=max(prices.bound_seconds, known.bound_seconds or 0.0))
        if prices.closed or prices.bound_seconds >= enough.cutoff_seconds:
            return known, None
        left = prices.near(enough.cutoff_seconds)
        if left is None:
            return replace(known, bound_seconds=enough.cutoff_seconds), None
        if sum(left.sizes) > _WORTHWHILE * sum(tables.sizes) or time.monotonic() > deadline:
            return known, left
        tables = left


def _from_integers(
    problem: Problem, tables: Tables, known: Solution | None, deadline: float, enough: _Enough
) -> Solution:
    """Solves the integer program; `known` is an assignment that fits and the bound that belongs to it."""
    found = search_integers(tables, max(1.0, deadline - time.monotonic()), enough.gap)
    if found.choices is None and known is None:
        if found.stopped:
            raise SearchStoppedError("no plan was found in time", "plan", ("search longer", "allow more memory"))
        raise _why_none(problem, tables, deadline)
    candidates = [known] if known is not None else []
    if found.choices is not None:
        candidates.append(evaluate(problem, tables.named(found.choices)))
    best = min(candidates, key=lambda solution: solution.seconds)
    bound = found.bound_seconds if found.stopped or enough.gap else best.seconds
    if known is not None:
        # What is above the cutoff has been left out of the tables, so the program knows nothing of it.
        bound = min(bound, enough.cutoff_seconds) if best.seconds > enough.cutoff_seconds else bound
        bound = max(bound, known.bound_seconds or 0.0)
    return replace(best, bound_seconds=min(bound, best.seconds))


def _why_none(problem: Problem, tables: Tables, deadline: float) -> NoPlanError:
    smallest = search_integers(least_memory(tables), max(1.0, deadline - time.monotonic()))
    if smallest.choices is None:
        return _contradiction()
    return _too_large(problem, evaluate(problem, tables.named(smallest.choices)).memory_bytes)


def _contradiction() -> NoPlanError:
    return NoPlanError("the ops' choices contradict each other: no plan is allowed", "plan", ("loosen a pin",))


def _too_large(problem: Problem, least_bytes: float | None) -> NoPlanError:
    least, limit = (least_bytes or 0.0) / _GIB, (problem.memory_limit_bytes or 0.0) / _GIB
    error = NoPlanError(
        f"no plan fits into {limit:.4g} GiB on each process; the smallest takes {least:.4g} GiB",
        "memory",
        ("allow more memory", "use more processes", "make the batch smaller"),
    )
    error.least_memory_bytes = least_bytes
    return error


def solve_all(
    problems: Sequence[Problem], limit_s: float = DEFAULT_LIMIT_S, gap: float = 0.0
) -> list[Solution | NoPlanError]:
    """Solves one network's problems on several meshes; the fastest of all is found as `solve` finds it.

    Of the others it is only shown that they aren't faster, so theirs are assignments that fit, but may not be the best.
    `limit_s` is for all together.
    """
    deadline = time.monotonic() + limit_s
    answers: list[Solution | NoPlanError] = []
    for problem in problems:
        try:
            answers.append(
                solve(problem, max(1.0, (deadline - time.monotonic()) / 2), gap, cutoff_seconds=-float("inf"))
            )
        except NoPlanError as error:
            answers.append(error)
    solved = {number: answer for number, answer in enumerate(answers) if isinstance(answer, Solution)}
    for number in sorted(solved, key=lambda number: (solved[number].bound_seconds or 0.0, number)):
        best_seconds = min(solution.seconds for solution in solved.values())
        first = solved[number]
        if (first.bound_seconds or 0.0) < min(best_seconds, first.seconds) * (1 - max(gap, 1e-9)):
            again = solve(problems[number], max(1.0, deadline - time.monotonic()), gap, cutoff_seconds=best_seconds)
            solved[number] = min(again, first, key=lambda solution: solution.seconds)
    return [solved.get(number, answer) for number, answer in enumerate(answers)]


def least_memory_bytes(problem: Problem) -> float:
    """The bytes of the smallest assignment that is allowed, whatever its seconds.

    Raises:
        NoPlanError: no assignment is allowed.
        SearchStoppedError: the time was used up.
    """
    tables = least_memory(drop_forbidden(tables_of(problem), problem))
    order = elimination_order(tables.sizes, list(tables.pairs))
    if order is not None:
        value = Elimination(order, tables.seconds, tables.pairs).value
        if value == float("inf"):
            raise _contradiction()
        return value
    found = search_integers(tables, DEFAULT_LIMIT_S)
    if found.choices is None:
        raise SearchStoppedError("no plan was found in time", "plan") if found.stopped else _contradiction()
    return evaluate(problem, tables.named(found.choices)).memory_bytes

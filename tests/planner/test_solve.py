"""The solver equals brute force on every small problem, and never is above an assignment that somebody writes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.planner import solve as solving
from manyhands.planner.problem import Choice, Edge, NoPlanError, Problem, evaluate
from manyhands.planner.solve import least_memory_bytes, solve

numbers = st.integers(0, 40).map(lambda number: number / 8)
costs = st.one_of(numbers, numbers, numbers, st.just(math.inf))


@st.composite
def problems(draw, most_nodes=6, most_choices=4):
    choice = st.builds(Choice, costs, numbers, numbers, st.integers(0, 20).map(float))
    nodes = draw(st.lists(st.lists(choice, min_size=1, max_size=most_choices), min_size=1, max_size=most_nodes))
    ends = st.tuples(st.integers(0, len(nodes) - 1), st.integers(0, len(nodes) - 1))
    edges = []
    for a, b in draw(st.lists(ends, max_size=2 * len(nodes))):
        count = len(nodes[a]) * len(nodes[b])
        seconds = np.array(draw(st.lists(costs, min_size=count, max_size=count))).reshape(len(nodes[a]), len(nodes[b]))
        kept = draw(st.one_of(st.none(), st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)))
        edges.append(Edge(a, b, seconds, None if kept is None else np.array(kept).reshape(seconds.shape)))
    limit = draw(st.one_of(st.none(), st.integers(0, 15 * len(nodes)).map(float)))
    return Problem(nodes, edges, limit, draw(st.sampled_from([0.0, 0.5, 1.0])))


def all_solutions(problem):
    for choices in itertools.product(*(range(len(node)) for node in problem.nodes)):
        solution = evaluate(problem, choices)
        if solution.seconds < math.inf:
            yield solution


def best_by_trying(problem):
    limit = math.inf if problem.memory_limit_bytes is None else problem.memory_limit_bytes
    fitting = [solution.seconds for solution in all_solutions(problem) if solution.memory_bytes <= limit]
    return min(fitting, default=None)


def check(problem):
    best = best_by_trying(problem)
    if best is None:
        with pytest.raises(NoPlanError) as caught:
            solve(problem)
        sizes = [solution.memory_bytes for solution in all_solutions(problem)]
        assert caught.value.least_memory_bytes == (min(sizes) if sizes else None)
        return
    solution = solve(problem)
    assert solution.seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert solution.proven
    assert evaluate(problem, solution.choices).seconds == solution.seconds
    assert problem.memory_limit_bytes is None or solution.memory_bytes <= problem.memory_limit_bytes


@settings(max_examples=200, deadline=None)
@given(problems())
def test_equals_brute_force(problem):
    check(problem)


@settings(max_examples=80, deadline=None)
@given(problems(most_nodes=5))
def test_equals_brute_force_where_the_graph_is_too_wide_for_elimination(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "elimination_order", lambda sizes, pairs: None)
        check(problem)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_least_memory_is_what_brute_force_finds(problem):
    sizes = [solution.memory_bytes for solution in all_solutions(problem)]
    if not sizes:
        with pytest.raises(NoPlanError):
            least_memory_bytes(problem)
    else:
        assert least_memory_bytes(problem) == min(sizes)

"""The solver equals brute force on small problems, and is never above a given assignment that fits."""

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.planner.solve import Edge, OpCost, Problem, Program, evaluate, solve_all

numbers = st.integers(0, 40).map(lambda number: number / 8)
costs = st.one_of(numbers, numbers, numbers, st.just(math.inf))


# A choice that exposes seconds lies beside a slower one that fits.
EXPOSED = [OpCost(0, memory_bytes=4), OpCost(0), OpCost(0.25, 0.125, memory_bytes=3), OpCost(0)]


@st.composite
def problems(draw, most_nodes=6, most_choices=4, costs=costs):
    choice = st.builds(OpCost, costs, numbers, numbers, st.integers(0, 20).map(float))
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


def solve(problem, gap=0.0, cutoff_seconds=math.inf):
    return Program(problem).solve(time.monotonic() + 60, gap, cutoff_seconds)


def least_memory_bytes(problem):
    return solve_all([dataclasses.replace(problem, memory_limit_bytes=-1.0)])[1]


@settings(max_examples=100)
@given(problems(), st.sampled_from([0.0, 0.0, 0.01, 0.3]), st.one_of(st.just(math.inf), st.integers(0, 100)))
@example(Problem([EXPOSED], [Edge(0, 0, np.diag([0, 0.5, 0, 0.5]))], memory_limit_bytes=3), 0.0, math.inf)
def test_equals_brute_force_within_the_gap_that_is_allowed_and_below_a_cutoff(problem, gap, cutoff):
    sizes = [solution.memory_bytes for solution in all_solutions(problem)]
    assert least_memory_bytes(problem) == min(sizes, default=math.inf)
    best, solution = best_by_trying(problem), solve(problem, gap, cutoff / 4)
    if best is None:
        assert solution is None
        return
    assert solution.bound_seconds <= best * (1 + 1e-9) + 1e-12
    assert solution.seconds >= best * (1 - 1e-9) - 1e-12
    assert evaluate(problem, solution.choices).seconds == solution.seconds
    assert problem.memory_limit_bytes is None or solution.memory_bytes <= problem.memory_limit_bytes
    if best < cutoff / 4:
        assert solution.seconds <= best / (1 - gap) * (1 + 1e-9) + 1e-12
    if not gap and cutoff == math.inf:
        assert solution.bound_seconds == solution.seconds


@settings(max_examples=25)
@given(problems(most_nodes=14, most_choices=5, costs=numbers), st.data())
def test_is_never_above_an_assignment_that_fits(problem, data):
    choices = [data.draw(st.integers(0, len(node) - 1)) for node in problem.nodes]
    written = evaluate(problem, choices)
    solution = solve(dataclasses.replace(problem, memory_limit_bytes=written.memory_bytes))
    assert solution.seconds <= written.seconds * (1 + 1e-9)
    assert solution.memory_bytes <= written.memory_bytes


NEVER = Problem([[OpCost(1)], [OpCost(1)]], [Edge(0, 1, np.full((1, 1), math.inf))])


@settings(max_examples=30)
@given(st.lists(problems(most_nodes=4, most_choices=3), min_size=1, max_size=4))
@example([Problem([[OpCost(1)], []]), NEVER, Problem([[OpCost(3)]])])
@example([Problem([[OpCost(1)], []]), NEVER])
def test_of_several_meshes_the_best_is_found(several):
    answers, least_bytes = solve_all(several)
    best = [best_by_trying(problem) for problem in several]
    assert [answer is None for answer in answers] == [seconds is None for seconds in best]
    solutions = [answer for answer in answers if answer is not None]
    sizes = [] if solutions else [solution.memory_bytes for one in several for solution in all_solutions(one)]
    assert least_bytes == min(sizes, default=math.inf)
    if solutions:
        fastest = min(solutions, key=lambda solution: solution.seconds)
        assert fastest.seconds == pytest.approx(min(seconds for seconds in best if seconds is not None), rel=1e-9)


def residual_network(blocks, choices, seed):
    """Chains of four with a short-cut around each, where equal layouts cost nothing, as in a ResNet."""
    random = np.random.default_rng(seed)
    reshard = (1 - np.eye(choices)) * random.uniform(0.5, 2, (choices, choices))
    count = 1 + 4 * blocks
    nodes = [
        [
            OpCost(random.uniform(1, 3), random.uniform(0, 2), random.uniform(0, 1), float(random.integers(1, 50)))
            for _ in range(choices)
        ]
        for _ in range(count)
    ]
    edges = [Edge(number, number + 1, reshard) for number in range(count - 1)]
    edges += [Edge(4 * block, 4 * block + 4, reshard) for block in range(blocks)]
    return Problem(nodes, edges, None, 0.7)


@pytest.mark.parametrize(("seed", "choices", "share"), [(0, 4, 0.1), (1, 12, 0.5), (2, 12, 0.9), (3, 4, 0.5)])
def test_with_a_binding_limit_a_plan_within_a_hundredth_takes_nine_runs_of_the_solver(
    monkeypatch, seed, choices, share
):
    free = residual_network(16, choices, seed)
    least, most = least_memory_bytes(free), solve(free).memory_bytes
    runs = []
    run = Program._run
    monkeypatch.setattr(Program, "_run", lambda self, limit_s: runs.append(limit_s) or run(self, limit_s))
    problem = dataclasses.replace(free, memory_limit_bytes=least + share * (most - least))
    solution = solve(problem, gap=0.01)
    assert solution.memory_bytes <= problem.memory_limit_bytes
    assert solution.bound_seconds >= 0.99 * solution.seconds
    assert len(runs) <= 9
    exact = solve(free)
    assert exact.bound_seconds == exact.seconds
    assert exact.seconds <= solution.seconds


@pytest.mark.parametrize("wrong", [OpCost(-1), OpCost(math.nan), OpCost(1, math.inf), OpCost(1, 0, 0, math.nan)])
def test_numbers_that_cannot_be_costs_are_refused(wrong):
    with pytest.raises(UserError, match="fc"):
        solve(Problem([[wrong]], names=("fc",)))

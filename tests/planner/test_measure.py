"""All-reduces timed on live processes: the same numbers everywhere, and data that a file can hold."""

from manyhands.planner.links import measure_all_reduce
from tests.processes.ranks import run_on_ranks


def _measured(_world, budget_s):
    return measure_all_reduce(sizes_bytes=(1000, 100_000), budget_s=budget_s)


def test_all_processes_get_the_same_points():
    first, *others = run_on_ranks(_measured, 4, 60.0)
    assert all(other == first for other in others)
    assert [size for size, _ in first] == [1000.0, 100_000.0]
    assert all(seconds > 0 for _, seconds in first)


def test_without_a_budget_one_size_is_timed_and_nobody_waits_for_ever():
    first, other, *_ = run_on_ranks(_measured, 4, 0.0)
    assert first == other
    assert len(first) == 1

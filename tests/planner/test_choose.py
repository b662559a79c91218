"""Data parallel is kept unless it is beaten beyond noise, whatever else is there."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.planner.choose import DATA_PARALLEL, pick_measured, pick_predicted, time_in_rounds

times = st.lists(st.floats(0.01, 10), min_size=3, max_size=9)


def test_all_are_timed_in_turns_and_the_first_round_is_not_counted():
    called = []

    def measure(plan):
        called.append(plan)
        return float(len(called))

    seconds = time_in_rounds(["a", "b", "c"], measure, rounds=3)
    assert called == list("cbaabccbaabc")
    assert seconds == {"a": [4, 9, 10], "b": [5, 8, 11], "c": [6, 7, 12]}


@given(times, st.one_of(st.floats(1.04, 50), st.floats(0.1, 1.02)))
def test_a_plan_that_is_always_clearly_faster_is_chosen_however_the_machine_slows(base, gain):
    pick = pick_measured({DATA_PARALLEL: base, "cut": [value / gain for value in base]})
    assert pick.name == ("cut" if gain > 1.03 else DATA_PARALLEL)
    assert "cut" in pick.reason
    assert float(pick.reason.split("measured ")[1].split("x")[0]) == pytest.approx(gain, abs=0.006)


@given(times, st.permutations(["a", "b", "c"]), st.randoms())
def test_the_order_of_the_finalists_does_not_matter(base, names, random):
    seconds = {name: [random.uniform(0.1, 2) for _ in base] for name in sorted(names)} | {DATA_PARALLEL: base}
    assert pick_measured(seconds).name == pick_measured({name: seconds[name] for name in [DATA_PARALLEL, *names]}).name


def test_a_gain_within_noise_is_none():
    noisy = [1.0, 3.0, 0.5, 2.8, 0.6, 1.2]
    pick = pick_measured({DATA_PARALLEL: [1.0] * 6, "cut": noisy})
    assert pick.name == DATA_PARALLEL
    assert pick_measured({DATA_PARALLEL: [1.1] * 6, "cut": [1.0, 1.01, 0.99, 1.0, 1.02, 1.0]}).name == "cut"


def test_where_data_parallel_cannot_run_the_fastest_is_chosen_and_too_few_rounds_are_refused():
    pick = pick_measured({DATA_PARALLEL: [math.inf] * 3, "a": [2.0] * 3, "b": [1.0] * 3})
    assert (pick.name, "can't run" in pick.reason) == ("b", True)
    for seconds in ({DATA_PARALLEL: [1.0] * 2}, {DATA_PARALLEL: [1.0] * 3, "cut": [1.0] * 4}):
        with pytest.raises(UserError, match="the same number of times"):
            pick_measured(seconds)


@given(st.floats(0.1, 2), st.floats(0, 1))
def test_predictions_must_promise_more_than_they_and_timings_vary(seconds, doubtful):
    slowest = max(1.1 * seconds, seconds + doubtful)
    assume(abs(slowest - 1) > 1e-9)
    pick = pick_predicted({DATA_PARALLEL: 1.0, "cut": seconds}, {"cut": doubtful})
    assert pick.name == ("cut" if slowest < 1 else DATA_PARALLEL)
    assert pick.name in pick.reason

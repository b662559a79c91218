"""Shares of a batch by measured speed: complete, within limits, and none that another process would finish sooner."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.train.shares import balanced

speeds = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8)


@given(speeds, st.integers(0, 200), st.integers(0, 40), st.data())
def test_shares_are_complete_and_nobody_goes_without(speeds_s, more, group, data):
    batch, equal = len(speeds_s) + more, -(-(len(speeds_s) + more) // len(speeds_s))
    most = [data.draw(st.integers(equal, batch)) for _ in speeds_s]
    found = balanced(speeds_s, batch, group, most)
    assert sum(found) == batch
    assert min(found) >= 1
    assert all(one <= limit for one, limit in zip(found, most, strict=True))


@given(speeds, st.integers(0, 200))
def test_no_sample_would_be_done_sooner_elsewhere(speeds_s, more):
    batch = len(speeds_s) + more
    found = balanced(speeds_s, batch, 0, [batch] * len(speeds_s))
    longest = max(one * count for one, count in zip(speeds_s, found, strict=True))
    for one, count in zip(speeds_s, found, strict=True):
        others = [each * had for each, had in zip(speeds_s, found, strict=True) if had > 1]
        assert not others or one * (count + 1) >= max(others) * (1 - 1e-9)
    assert longest <= max(speeds_s) * -(-batch // len(speeds_s)) * (1 + 1e-9)


def test_three_times_the_speed_gives_three_times_the_share_in_full_groups_where_it_fits():
    assert balanced([1.0, 3.0], 32, 0, [32, 32]) == [24, 8]
    assert balanced([1.0, 2.9], 64, 8, [64, 64]) == [48, 16]
    assert balanced([1.0, 3.0], 32, 32, [32, 32]) == [24, 8]
    assert balanced([1.0, 3.0], 32, 0, [20, 32]) == [20, 12]
    # 35 groups of 4 and 5: a process that may take 21 gets no group of 5 beside four of 4.
    assert max(balanced([1.0] * 6 + [0.25], 141, 4, [21] * 6 + [23])[:6]) <= 21

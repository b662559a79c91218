"""Each ordered pair measures once, and nobody takes part in two measurements at a time."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.doctor.survey import MOST_ROUNDS, MOST_TRIED, rounds, ways_tried

hosts = st.integers(0, 20).map(lambda count: [f"n{number}" for number in range(count)])


@given(hosts)
def test_each_ordered_pair_meets_once(names):
    met = [pair for pairs in rounds(names) for pair in pairs]
    assert sorted(met) == sorted((one, two) for one in names for two in names if one != two)


@given(hosts, st.integers(0, 8))
def test_nobody_is_in_two_pairs_of_a_round_and_rounds_are_few(names, most):
    played = rounds(names, most)
    assert len(played) <= (most or 2 * len(names))
    for pairs in played:
        seated = [name for pair in pairs for name in pair]
        assert pairs
        assert len(seated) == len(set(seated))


@given(st.integers(1, 300))
def test_machines_try_all_others_or_of_many_some_and_the_first(count):
    """A thousand machines don't try a million ways; what is measured was tried; what holds all together is."""
    names = [f"n{number}" for number in range(count)]
    tried = ways_tried(names)
    pairs = {(host, other) for host, others in tried.items() for other in others}
    assert list(tried) == names
    assert all(len(others) == len(set(others) - {host}) for host, others in tried.items())
    assert all(len(others) <= min(count - 1, MOST_TRIED) for others in tried.values())
    assert {(host, names[0]) for host in names[1:]} <= pairs
    assert {pair for pairs in rounds(names, MOST_ROUNDS) for pair in pairs} <= pairs
    reached = {name: sum(other == name for _, other in pairs) for name in names}
    assert all(times >= min(count - 1, MOST_TRIED // 2 - 1) for times in reached.values())
    if count <= MOST_TRIED // 2:
        assert len(pairs) == count * (count - 1)

"""Each ordered pair measures once, and nobody takes part in two measurements at a time."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.doctor.rounds import rounds

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

"""Laws of the order of samples and of how processes share them."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.data.order import BatchSharing, Order, assign_blocks, group_boundaries

counts = st.integers(1, 300)
processes = st.integers(1, 9)
groups = st.integers(0, 40)
micro_batches = st.integers(0, 64)


# Of up to 9 processes; none: all the same.
wanted_shares = st.lists(st.integers(1, 50), max_size=9).map(tuple)


def _sharing(size, micro, group, wanted):
    return BatchSharing(len(wanted) or size, micro, group, shares=wanted)


def _micro_batches(count, cut):
    try:
        return cut.micro_batches(count)
    except UserError:
        # Only when a group can't fit into one pass.
        assert cut.group
        assert cut.largest_micro_batch < max(b - a for a, b in itertools.pairwise(group_boundaries(count, cut.group)))
        return None


@given(counts, processes, micro_batches, groups, wanted_shares)
def test_shares_are_disjoint_and_complete_and_small_enough(count, size, micro, group, wanted):
    sharing = _sharing(size, micro, group, wanted)
    micro_batches = _micro_batches(count, sharing)
    if micro_batches is None:
        return
    position = 0
    for shares in micro_batches:
        assert len(shares) == sharing.processes
        for share in shares:
            assert share.start == position
            assert not micro or share.count <= micro
            position = share.stop
    assert position == count


@given(st.integers(1, 30), groups, wanted_shares.filter(bool))
def test_nobody_goes_without_who_would_have_some_of_single_samples(times, group, wanted):
    (shares,) = BatchSharing(len(wanted), 0, group, shares=wanted).micro_batches(times * sum(wanted))
    assert all(share.count for share in shares)


@given(counts, groups, processes, st.lists(processes, min_size=1, max_size=4))
def test_no_process_takes_more_in_one_pass_than_when_the_run_began(count, group, first, later):
    most = BatchSharing(first, 0, group).limited(0, count).largest_since_start
    widest = max(b - a for a, b in itertools.pairwise(group_boundaries(count, group)))
    for size in later:
        cut = BatchSharing(size, 0, group).limited(most, count)
        assert cut.largest_since_start == most
        assert cut.largest_share(count) <= max(most, -(-widest // size))
        assert cut.micro_batch or size >= first or cut.largest_share(count) <= most
        most = cut.largest_since_start


@given(counts, processes, micro_batches, groups, wanted_shares)
def test_normalization_groups_do_not_depend_on_who_computes_them(count, size, micro, group, wanted):
    micro_batches = _micro_batches(count, _sharing(size, micro, group, wanted))
    if micro_batches is None or not group:
        return
    seen = []
    for shares in micro_batches:
        sizes = {}
        for share in shares:
            assert sum(span.stop - span.start for span in share.spans) == share.count
            assert share.shared_groups == shares[0].shared_groups
            for span in share.spans:
                sizes[span.group] = span.size
                assert span.shared < 0 or span.size == shares[0].shared_groups[span.shared]
        firsts = sum(span.first for share in shares for span in share.spans)
        assert firsts == len(sizes)
        seen += [sizes[number] for number in sorted(sizes)]
    assert seen == [stop - start for start, stop in itertools.pairwise(group_boundaries(count, group))]


@given(counts, st.integers(1, 40))
def test_groups_are_even(count, group):
    sizes = [stop - start for start, stop in itertools.pairwise(group_boundaries(count, group))]
    assert sum(sizes) == count
    assert max(sizes) <= group
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 5), st.booleans(), st.data())
def test_an_epoch_holds_each_sample_once_and_can_be_entered_anywhere(length, batch, epoch, drop_last, data):
    order = Order(length, min(batch, length), 7, drop_last)
    whole = list(order.batches(epoch))
    assert len(whole) == order.steps_per_epoch
    samples = torch.cat(whole).tolist()
    assert len(set(samples)) == len(samples)
    assert len(samples) == length or drop_last
    first = data.draw(st.integers(0, order.steps_per_epoch))
    rest = list(order.batches(epoch, first))
    assert [part.tolist() for part in rest] == [part.tolist() for part in whole[first:]]


def test_epochs_and_seeds_differ():
    orders = [Order(100, 10, seed).permutation(epoch).tolist() for seed, epoch in ((0, 3), (0, 1), (1, 3), (0, 3))]
    assert [found == orders[0] for found in orders] == [True, False, False, True]


@pytest.mark.parametrize(
    ("processes", "group", "wanted", "count", "dealt", "shared"),
    [
        (3, 32, (), 256, [64, 96, 96], False),
        (3, 32, (), 128, [42, 43, 43], True),
        (2, 8, (24, 8), 32, [24, 8], False),
        (2, 8, (25, 7), 32, [24, 8], False),
        (2, 16, (24, 8), 32, [24, 8], True),
    ],
)
def test_whole_groups_are_dealt_out_where_that_costs_little(processes, group, wanted, count, dealt, shared):
    (shares,) = BatchSharing(processes, 0, group, shares=wanted).micro_batches(count)
    assert [share.count for share in shares] == dealt
    assert bool(shares[0].shared_groups) == shared


@given(wanted_shares.filter(bool))
def test_a_batch_that_shares_add_up_to_is_shared_out_as_they_say(wanted):
    (shares,) = BatchSharing(len(wanted), shares=wanted).micro_batches(sum(wanted))
    assert tuple(share.count for share in shares) == wanted


@given(counts, processes, micro_batches, groups, st.integers(1, 9))
def test_equal_shares_are_those_of_nobody_who_said_anything(count, size, micro, group, one):
    said = _micro_batches(count, BatchSharing(size, micro, group, shares=(one,) * size))
    assert said == _micro_batches(count, BatchSharing(size, micro, group))


@given(counts, wanted_shares.filter(bool))
def test_each_block_is_dealt_once_and_none_would_be_done_sooner_elsewhere(count, shares):
    dealt = assign_blocks(count, shares)
    assert sorted(itertools.chain(*dealt)) == list(range(count))
    assert len({*shares}) > 1 or dealt[0] == list(range(0, count, len(shares)))  # equal ones have turns
    assert all(mine == sorted(mine) for mine in dealt)
    longest = max(Fraction(len(mine), share) for mine, share in zip(dealt, shares, strict=True))
    assert all(Fraction(len(mine) + 1, share) >= longest for mine, share in zip(dealt, shares, strict=True))

"""Fewer processes are recommended where they do as well, and never by less than what was timed varies."""

from dataclasses import replace

import pytest

from manyhands.planner.choose import DATA_PARALLEL, pick_predicted
from manyhands.planner.find import SearchRequest, enough, fewer_counts, find
from manyhands.planner.links import links_of
from manyhands.planner.timing import Timing
from manyhands.sync.link_speeds import LinkSpeed, link_seconds, work_seconds
from tests.planner.nets import chain, graph_of, heavy

HEAVY, CHAIN = graph_of(heavy()), graph_of(chain(), channels=4)


def links_at(bytes_per_s):
    return lambda mesh: links_of(mesh, per_machine=1, between=LinkSpeed(bytes_per_s, 1e-4))


def fewest(found, spread=0.0):
    fewer = found.fewer(dict.fromkeys(fewer_counts(found.request.world_size)))
    return enough(found, fewer, found.chosen.prediction.seconds, spread)


def test_all_are_looked_at_while_they_are_few():
    assert fewer_counts(2) == [1]
    assert fewer_counts(4) == [1, 2, 3]
    assert fewer_counts(12) == [1, 3, 6]


def test_a_plan_that_sends_nothing_is_one_machine_s():
    found = find(CHAIN, SearchRequest(4, 64), links=links_at(1e3))
    assert found.chosen.prediction.sent_bytes == 0
    count, why = fewest(found)
    assert count == 1
    assert "repeats every computation" in why


def test_on_a_fast_link_all_are_needed_and_on_a_slow_one_fewer_do():
    assert fewest(find(CHAIN, SearchRequest(4, 64), links=links_at(1e15)))[0] in {0}
    slow = find(HEAVY, SearchRequest(4, 64), links=links_at(1e4))
    data = replace(slow, pick=replace(slow.pick, name=DATA_PARALLEL))
    count, why = enough(data, data.fewer(dict.fromkeys(fewer_counts(4))), data.options[0].prediction.seconds, 0.0)
    assert (count, "one process" in why) == (1, True)


def test_nothing_is_recommended_by_less_than_what_was_timed_varies():
    found = find(HEAVY, SearchRequest(4, 64), links=links_at(1e4))
    found = replace(found, pick=replace(found.pick, name=DATA_PARALLEL))
    alone = found.fewer({1: None})
    as_fast = alone[0].prediction.seconds
    assert enough(found, alone, as_fast, spread=0.0)[0] == 1
    assert enough(found, alone, as_fast, spread=0.2)[0] == 0
    assert pick_predicted({DATA_PARALLEL: 1.2, "cut": 1.0}, {"cut": 0.1}).name == "cut"
    assert pick_predicted({DATA_PARALLEL: 1.2, "cut": 1.0}, {"cut": 0.3}).name == DATA_PARALLEL


def test_of_fewer_processes_a_clearly_faster_number_goes_before_a_smaller_one():
    found = find(HEAVY, SearchRequest(4, 64), links=links_at(1e4))
    found = replace(found, pick=replace(found.pick, name=DATA_PARALLEL))
    one, two = found.fewer({1: None, 2: None})

    def taken(two_s, spread=0.0):
        pair = [
            replace(option, prediction=replace(one.prediction, compute_seconds=took_s))
            for option, took_s in ((one, 1.0), (two, two_s))
        ]
        return enough(found, pair, 5.0, spread)

    assert taken(0.6)[0] == 2
    assert taken(0.6)[1].startswith("data parallel on 2 takes 600 ms per step, while data parallel on 4 takes 5 s")
    assert taken(0.95)[0] == taken(1.2)[0] == 1
    assert taken(0.8, spread=0.25)[0] == 1


def test_a_share_that_was_timed_scales_all_plans_alike():
    plain = find(CHAIN, SearchRequest(4, 64))
    timed = find(CHAIN, SearchRequest(4, 64), share=Timing(7.0, 0.25))
    assert timed.options[0].prediction.compute_seconds == pytest.approx(7.0)
    assert timed.spread == 0.25
    scale = 7.0 / plain.options[0].prediction.compute_seconds
    (scaled,), (estimated,), (own,) = timed.fewer({1: None}), plain.fewer({1: None}), timed.fewer({1: Timing(20.0)})
    assert scaled.prediction.compute_seconds == pytest.approx(scale * estimated.prediction.compute_seconds)
    assert own.prediction.compute_seconds == 20.0


def test_work_hides_behind_nothing():
    free, working = LinkSpeed(1e9, 1e-5), LinkSpeed(1e9, 1e-5, work_s_per_byte=1e-9, work_s_per_message=1e-6)
    assert work_seconds("all_reduce", 3, 1e8, free) == 0
    assert 0 < work_seconds("all_reduce", 3, 1e8, working) <= link_seconds("all_reduce", 3, 1e8, working)
    idle, busy = (
        find(HEAVY, SearchRequest(2, 4096), links=lambda mesh, link=link: links_of(mesh, per_machine=1, between=link))
        for link in (free, working)
    )
    assert busy.options[0].prediction.gradient_seconds > idle.options[0].prediction.gradient_seconds

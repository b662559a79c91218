"""That machines stand still for each other is said once, with the share and what --sync auto would make of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torchvision.models import resnet18

from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import named_link
from manyhands.sync.options import SyncOptions
from manyhands.train.status import CommunicationMonitor

SHAPES = tuple(tuple(one.shape) for one in resnet18().parameters())
RUN = SimpleNamespace(job=SimpleNamespace(sync=SyncOptions()), folder=SimpleNamespace(path=Path("runs/a")))


class Journal:
    def __init__(self):
        self.said = []

    def event(self, kind, text, step, **figures):
        self.said.append((kind, text, step, figures))


def standing(link):
    return CommunicationMonitor(
        lambda computing_s: LinkCase(SHAPES, 4, 9610, 3, computing_s, 0.0, named_link(link), 10_000), RUN, {}
    )


def heeded(one, stood_s, step_s, steps, processes=3):
    journal = Journal()
    for step in range(1, steps + 1):
        status = SimpleNamespace(extra=[processes * stood_s, processes * step_s, processes])
        one.observe(status, step, journal)
    return journal.said


def test_a_slow_link_is_told_of_once_with_the_share_and_the_way_out():
    ((kind, text, step, figures),) = heeded(standing("10mbit"), 54.0, 55.0, 9)
    assert (kind, step) == ("sync", 2)
    assert figures["share"] == pytest.approx(54 / 55)
    assert "98% of the 55 s per step" in text
    assert "powersgd" in text
    assert "manyhands resume runs/a --set sync.method=auto" in text


def test_short_steps_are_watched_for_a_while():
    ((_, text, step, _),) = heeded(standing("100mbit"), 0.9, 1.0, 9)
    assert step == 4
    assert "90% of the 1 s per step" in text


def test_a_third_of_the_time_and_less_goes_unsaid():
    assert heeded(standing("10mbit"), 0.33, 1.0, 50) == []


def test_where_auto_would_change_nothing_that_is_said():
    ((_, text, _, _),) = heeded(standing("100gbit"), 0.9, 1.0, 9)
    assert "--sync auto would also choose allreduce" in text
    assert "resume" not in text


def test_standing_still_is_what_neither_computes_nor_waits_for_data():
    one = standing("10mbit")
    stood_s, all_s, processes = one.numbers_to_sum(10.0, 2, 3.0)
    assert (all_s, processes) == (10.0, 1)
    assert 5.0 < stood_s <= 7.0
    one.compute_s = 2.5
    assert one.numbers_to_sum(10.0, 2, 3.0) == [2.0, 10.0, 1]
    assert one.numbers_to_sum(1.0, 2, 3.0) == [0.0, 1.0, 1]

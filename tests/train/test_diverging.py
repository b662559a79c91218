"""A loss that stays far above what it began at is told of once; what is usual isn't."""

import math

import pytest

from manyhands.train.status import Divergence


def told(classes, *losses):
    watch = Divergence(classes)
    return [place for place, loss in enumerate(losses) if watch.observe(loss)]


@pytest.mark.parametrize(
    "losses",
    [
        (2.3, 2.0, 1.5, 9.0, 1.4, 8.0, 1.3),  # thrown up for once
        (0.01, 0.05, 0.04, 0.06, 0.05),  # a run that goes on
        (2.3, 6.8, 6.8, 6.8, 6.8),
        (900.0, 1500.0, 2000.0, 2500.0, 2600.0),  # a loss of one's own
    ],
)
def test_what_is_usual(losses):
    assert told(10, *losses) == []


def test_what_diverges_is_told_once():
    assert told(10, 2.3, 8.0, 9.0, 30.0, 40.0, 1e6) == [3]
    assert told(10, 2.3, 8.0, math.inf, 1e30, 40.0) == [3]
    assert told(1000, 6.9, 21.0, 22.0, 23.0) == [3]

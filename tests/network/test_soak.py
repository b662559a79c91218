"""Faults one after the other, in short; `make soak` goes on for as long as is wanted."""

import pytest

from tests.faults.soak import faults, job, kills, launches, place

pytestmark = [pytest.mark.timeout(580), pytest.mark.slow]


def test_five_faults_in_one_run_change_nothing():
    with place() as (lab, folder):
        kinds = ("kill", "kill", "kill", "stop")
        found = kills(lab, folder, count=5, words=job("digits", 130), seed=7, kinds=kinds)
    assert found["holds"], found


def test_what_a_run_holds_is_as_much_after_faults_as_before():
    with place() as (lab, folder):
        found = faults(lab, folder, minutes=1.5, every_s=8, words=job("digits", 1_000_000), seed=7)
    assert found["holds"], found


def test_five_launches_that_end_at_random_moments_leave_nothing():
    with place() as (lab, folder):
        # Drawn so that one is killed while it trains, and one stopped.
        drawn = {"seed": 32, "within_s": 8.0, "training": 0.4}
        found = launches(lab, folder, count=5, words=job("digits", 1_000_000), **drawn)
    assert found["holds"], found
    assert found["trained"] >= 2, found

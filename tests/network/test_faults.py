"""Faults that a run on three hosts survives without a restart, and several in a row; `make soak` runs more."""

import time

import pytest

from tests.e2e.command import QUICKLY, events, finish, training, wait_until
from tests.faults.soak import faults, job, kills, launches, place
from tests.network.runs import EXACT, assert_same_updates, begun, gone, hosts, undisturbed

pytestmark = [pytest.mark.timeout(580), pytest.mark.slow]
JOB = f"digits mlp --epochs 60 --set train.evaluate_every=60 {QUICKLY} {EXACT}"
# Each process of a host sees this time, ahead or behind; n3's jumps to and fro.
CLOCK = """
import os, time
real, by = time.time, os.environ["CLOCK_BY"]
time.time = lambda: real() + (60 * (int(real()) % 2) if by == "jumps" else float(by))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of the undisturbed run."""
    return undisturbed(JOB, out=tmp_path_factory.mktemp("whole") / "run")


def ends_undisturbed(lab, process, whole):
    finish(process, code=0)
    assert not events("run", "restarted")
    assert_same_updates("run", whole)
    gone(lab)


def test_a_short_cut_is_ridden_through(lab, here, whole):
    with training("launch", JOB, hosts(lab), "--out run") as process:
        wait_until(begun(), process)
        lab.down(2)
        time.sleep(8)
        assert process.poll() is None
        lab.up(2)
        ends_undisturbed(lab, process, whole)


def test_clocks_that_are_apart_do_no_harm(lab, here, whole):
    (here / "clock").mkdir()
    (here / "clock/sitecustomize.py").write_text(CLOCK)
    path = f"{here / 'clock'}:{lab.environment['PYTHONPATH']}"
    for host, by in ((1, "60"), (2, "-60"), (3, "jumps")):
        lab.start(host, environment={"PYTHONPATH": path, "CLOCK_BY": by})
    with training("launch", JOB, hosts(lab), "--out run") as process:
        ends_undisturbed(lab, process, whole)
    # They did see another time.
    assert abs(events("run", "finished")[0]["time"] - time.time()) > 30


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
        drawn = {"seed": 32, "within_s": 8.0, "trained": 0.4}
        found = launches(lab, folder, count=5, words=job("digits", 1_000_000), **drawn)
    assert found["holds"], found
    assert found["trained"] >= 2, found

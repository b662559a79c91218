"""Faults between machines that a run doesn't even notice."""

import time

import pytest

from tests.e2e.command import QUICK, events, finish, wait_until
from tests.network.runs import EXACT, assert_same_updates, begun, gone, hosts, running, undisturbed

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
JOB = ["digits", "mlp", "--epochs", "60", "--set", "train.evaluate_every=60", *QUICK, *EXACT]
# Each process of a host sees this time, ahead or behind; n3's jumps to and fro.
CLOCK = """
import os, time
real, by = time.time, os.environ["CLOCK_BY"]
time.time = lambda: real() + (60 * (int(real()) % 2) if by == "jumps" else float(by))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of the undisturbed run."""
    return undisturbed(*JOB, out=tmp_path_factory.mktemp("whole") / "run")


def assert_undisturbed(ended, whole):
    assert ended.code == 0, ended.err
    assert not events("run", "restarted")
    assert_same_updates("run", whole)


def test_a_short_cut_is_ridden_through(lab, here, whole):
    with running("launch", *JOB, *hosts(lab), "--out", "run") as process:
        wait_until(begun(), process)
        lab.down(2)
        time.sleep(8)
        assert process.poll() is None
        lab.up(2)
        ended = finish(process)
    assert_undisturbed(ended, whole)
    gone(lab)


def test_clocks_that_are_apart_do_no_harm(lab, here, whole):
    (here / "clock").mkdir()
    (here / "clock/sitecustomize.py").write_text(CLOCK)
    path = f"{here / 'clock'}:{lab.environment['PYTHONPATH']}"
    for host, by in ((1, "60"), (2, "-60"), (3, "jumps")):
        lab.start(host, environment={"PYTHONPATH": path, "CLOCK_BY": by})
    with running("launch", *JOB, *hosts(lab), "--out", "run") as process:
        ended = finish(process)
    assert_undisturbed(ended, whole)
    # They did see another time.
    assert abs(events("run", "finished")[0]["time"] - time.time()) > 30
    gone(lab)

"""A run on three hosts that loses one goes on under each way of sharing the work, and is itself again with three."""

import json
import os
import signal

import psutil
import pytest

from tests.e2e.command import QUICK, events, final_weights, run, running, wait_until
from tests.e2e.test_hard_places import assert_alike
from tests.network.test_launch import EXACT, begun, gone, hosts, is_agent

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
JOB = ["digits", "mlp", "--batch", "60", *QUICK, *EXACT, "--set", "checkpoint.every=20steps"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lose_one(lab, here, *options):
    """A run on three hosts, one of which is lost while it trains; what it said."""
    job = [*JOB, "--epochs", "12", *options]
    with running("launch", *job, *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        (agent,) = [pid for pid in lab.processes(2) if is_agent(psutil.Process(pid))]
        os.kill(agent, signal.SIGKILL)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        gone(lab)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert again["step"] == resumed["step"]
    assert len(json.loads((here / "run/machines.json").read_text())) == 2
    return err


@pytest.mark.parametrize("mode", [["fsdp"], ["semi"], ["auto"]])
def test_a_new_plan_goes_on_from_the_last_checkpoint(mode, lab, here):
    lose_one(lab, here, "--parallel", *mode)
    whole = run("train", *JOB, "--epochs", "12", "--out", "whole")
    assert whole.code == 0, whole.err
    assert_alike(final_weights("run"), final_weights("whole"))


@pytest.mark.parametrize("method", [["powersgd", "--set", "sync.rank=2"], ["local", "--set", "sync.every=8"]])
def test_what_a_lost_host_held_back_is_said_and_nobody_else_takes_it(method, lab, here):
    said = lose_one(lab, here, "--sync", *method)
    assert "WARNING" in said
    again = run("resume", "run", "--epochs", "42")
    assert again.code == 0, again.err
    assert "3 processes on" in again.err

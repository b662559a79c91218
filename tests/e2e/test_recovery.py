"""A run that a fault hits goes on by itself: to the same weights, from the very update that the others had made."""

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from PIL import Image

from manyhands.train.saver import best_interval
from tests.e2e.command import (
    NETS,
    QUICK,
    assert_equal_weights,
    assert_one_screen,
    events,
    final_weights,
    finish,
    marked,
    run,
    start,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)
JOB = ["synthetic:1000x1x8x8x10", f"{NETS}:Killed", "--batch", "50", "--epochs", "2", *QUICK]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_process_is_replaced_and_costs_no_update(processes, here):
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}
    ended = run("train", *JOB, "-n", processes, "--out", "run", **fault)
    assert ended.code == 0, ended.err
    assert "WARNING rank 1 was killed by SIGKILL: restarting from step" in ended.err
    (again,) = events("run", "restarted")
    (resumed,) = events("run", "resumed")
    # All but the one that was killed had made the update before; nothing is trained twice.
    assert resumed["step"] == again["step"] > 7
    assert not marked(str(here))
    ended = run("train", *JOB, "-n", processes, "--out", "whole", **fault)
    assert ended.code == 0, ended.err
    assert not events("whole", "restarted")
    assert_equal_weights(final_weights("run"), final_weights("whole"))
    # How often to save is weighed anew after the kill.
    weighed, quiet = (events(name, "interval")[-1]["data"] for name in ("run", "whole"))
    assert (weighed["failures"], quiet["failures"]) == (1, 0)
    assert weighed["between_failures_s"] < quiet["between_failures_s"] / 10
    best = best_interval(weighed["save_s"], weighed["between_failures_s"])
    assert weighed["seconds"] == pytest.approx(best, rel=0.01)


# The head itself, which hears a stop just when a fault has ended its processes and it is about to start others.
STOPPED_BETWEEN = """
import os, signal, sys
from manyhands.cli.main import main
from manyhands.run.recovery import RestartPolicy
after = RestartPolicy.after
RestartPolicy.after = lambda *given: (restart := after(*given)) and (os.kill(os.getpid(), signal.SIGINT) or restart)
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_stop_between_two_starts_says_where_the_run_goes_on(here):
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}
    stopped = run("train", *JOB, "-n", "2", "--out", "run", program=("-c", STOPPED_BETWEEN), **fault)
    assert stopped.code == 75
    assert "stopped while no process was training; the last checkpoint is step" in stopped.err
    assert ": manyhands resume run" in stopped.err
    told = run("why", "./run").out
    assert "run stopped after" in told.splitlines()[0], told
    assert "why: stopped while no process was training" in told.splitlines()[1], told
    assert not marked(str(here))


@pytest.mark.slow
def test_one_process_alone_goes_on_from_what_was_saved(here):
    job = ["synthetic:1000x1x8x8x10", "mlp", "--batch", "50", "--epochs", "20", *QUICK, "--out", "run"]
    training = start("train", *job, "--set", "checkpoint.every=10steps")
    wait_until(lambda: events("run", "saved"), training)
    _workers_of(training)[0].kill()
    ended = finish(training)
    assert ended.code == 0, ended.err
    (resumed,) = events("run", "resumed")
    assert resumed["step"] >= 10


@pytest.mark.slow
def test_an_exception_that_occurs_once_is_reported_and_costs_no_update(here):
    job = [word.replace("Killed", "RaisesOnce") for word in JOB]
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}
    ended = run("train", *job, "-n", "2", "--out", "run", **fault)
    assert ended.code == 0, ended.err
    (again,) = events("run", "restarted")
    (resumed,) = events("run", "resumed")
    assert "KeyError" in again["message"]
    assert resumed["step"] == again["step"] > 7
    assert run("train", *job, "-n", "2", "--out", "whole", **fault).code == 0
    assert not events("whole", "restarted")
    assert_equal_weights(final_weights("run"), final_weights("whole"))


@pytest.mark.slow
def test_an_error_that_comes_every_time_ends_the_run_after_the_second(here):
    ended = run("train", "digits", f"{NETS}:Raises", "-n", "2", "--out", "run", *QUICK, "--epochs", "3")
    assert ended.code == 1
    assert_one_screen(ended.err)
    assert len(events("run", "restarted")) == len(events("run", "failed")) == 1
    told, _, screen = ended.err.partition("manyhands: ")
    assert "the same error twice within 20 updates" in told
    assert 'KeyError: "the user\'s own mistake"' in screen
    assert screen.count("Traceback") == 1
    assert Path("run/ranks/failures/start-0/1.json").exists()


@pytest.mark.slow
def test_what_fails_before_its_first_update_is_not_tried_again(here):
    ended = run("train", "digits", f"{NETS}:Missing", "-n", "2", "--out", "run", *QUICK)
    assert ended.code == 2
    assert not events("run", "restarted")


@pytest.mark.slow
def test_a_killed_agent_is_replaced(here):
    job = ["synthetic:1000x1x8x8x10", "mlp", "--batch", "50", "--epochs", "20", *QUICK, "--out", "run", "-n", "2"]
    training = start("train", *job, "--set", "checkpoint.every=10steps")
    wait_until(lambda: events("run", "saved"), training)
    before = _workers_of(training)
    before[0].parent().kill()
    ended = finish(training)
    assert ended.code == 0, ended.err
    assert "the agent that watches the processes failed: the agent was killed by SIGKILL: restarting from" in ended.err
    assert not any(one.is_running() for one in before)


@pytest.mark.slow
def test_a_stopped_process_is_ended_and_replaced(here):
    job = ["synthetic:20000x1x8x8x10", "mlp", "--batch", "50", "--epochs", "20", *QUICK, "--out", "run", "-n", "2"]
    training = start("train", *job)
    wait_until(lambda: events("run", "saved"), training)
    stopped = _workers_of(training)[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    ended = finish(training)
    assert ended.code == 0, ended.err
    assert re.search(r"WARNING rank 1 on \S+ was stopped for \d+ s and was killed: restarting from step", ended.err)
    assert not stopped.is_running()


@pytest.mark.slow
def test_processes_that_are_killed_leave_nothing_in_the_temporary_folder(here, request):
    temporary = Path(tempfile.mkdtemp())  # short: sockets lie there
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    for number in range(40):
        path = here / "pictures" / "ab"[number % 2] / f"{number}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(path)
    job = ["pictures", "mlp", "--data.image-size", "32", "--batch", "4", "--epochs", "40", "--out", "run", "-n", "2"]
    decoding = ["--data.workers", "1", "--set", "data.memory_limit_mib=0", *QUICK]
    training = start("train", *job, *decoding, TMPDIR=str(temporary))
    wait_until(lambda: list(temporary.rglob("pymp-*")) and Path("run/metrics.jsonl").exists(), training)
    _workers_of(training)[0].kill()
    ended = finish(training)
    assert ended.code == 0, ended.err
    assert events("run", "restarted")
    assert not list(temporary.glob("[!t]*"))


def _workers_of(training):
    """The processes that train, by rank."""
    (agent,) = psutil.Process(training.pid).children()
    return sorted(agent.children(), key=lambda one: one.pid)

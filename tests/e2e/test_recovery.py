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
    QUICKLY,
    assert_equal_weights,
    done,
    events,
    final_weights,
    finish,
    inside,
    marked,
    metrics,
    start,
    training,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)
DATA = "train synthetic:1000x1x8x8x10"
JOB = f"{DATA} {NETS}:Killed --batch 50 --epochs 2 {QUICKLY} -n"
LONG = f"{DATA} mlp --batch 50 --epochs 20 {QUICKLY} --out run"


@pytest.fixture
def fault(here):
    """What the environment says of a fault that comes once."""
    return {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}


def recovered(job, processes, fault):
    """A run that the fault hits: all but one had made the update before, and nothing is trained twice."""
    ended = done(job, processes, "--out run", **fault)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert resumed["step"] == again["step"] > 7
    done(job, processes, "--out whole", **fault)
    assert not events("whole", "restarted")
    assert_equal_weights(final_weights("run"), final_weights("whole"))
    return ended, again


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_process_is_replaced_and_costs_no_update(processes, here, fault):
    ended, _ = recovered(JOB, processes, fault)
    assert "WARNING rank 1 was killed by SIGKILL: restarting from step" in ended.err
    assert not marked(str(here))
    # How often to save is weighed anew after the kill.
    weighed, quiet = (events(name, "interval")[-1]["data"] for name in ("run", "whole"))
    assert (weighed["failures"], quiet["failures"]) == (1, 0)
    assert weighed["between_failures_s"] < quiet["between_failures_s"] / 10
    best = best_interval(weighed["save_s"], weighed["between_failures_s"])
    assert weighed["seconds"] == pytest.approx(best, rel=0.01)
    told, *_, last = done("why run", by=inside).out.partition("done: ")
    assert told.startswith("run finished after")
    assert "why:" not in told
    assert re.match(r"restarted .*rank 1 was killed by SIGKILL: restarting from step", last)


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
def test_a_stop_between_two_starts_says_where_the_run_goes_on(here, fault):
    stopped = done(JOB, "2 --out run", program=("-c", STOPPED_BETWEEN), by=start, code=75, **fault)
    assert "stopped while no process was training; the last checkpoint is step" in stopped.err
    assert ": manyhands resume run" in stopped.err
    ended, cause, *_ = done("why ./run", by=inside).out.splitlines()
    assert "run stopped after" in ended
    assert "why: stopped while no process was training" in cause
    assert not marked(str(here))


@pytest.mark.slow
def test_an_exception_that_occurs_once_is_reported_and_costs_no_update(fault):
    _, again = recovered(JOB.replace("Killed", "RaisesOnce"), 2, fault)
    assert "KeyError" in again["message"]


@pytest.mark.slow
def test_what_fails_before_its_first_update_is_not_tried_again():
    done(f"train digits {NETS}:Missing -n 2 --out run", QUICKLY, code=2)
    assert not events("run", "restarted")


def workers_of(process):
    """The processes that train, by rank."""
    (agent,) = psutil.Process(process.pid).children()
    return sorted(agent.children(), key=lambda one: one.pid)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the only process", "the agent"])
def test_what_is_killed_is_replaced_and_goes_on_from_what_was_saved(who):
    with training(LONG, "--set checkpoint.every=10steps -n", 1 if who == "the only process" else 2) as process:
        wait_until(lambda: events("run", "saved"), process)
        before = workers_of(process)
        (before[0] if who == "the only process" else before[0].parent()).kill()
        ended = finish(process)
    assert ended.code == 0, ended.err
    (resumed,) = events("run", "resumed")
    assert resumed["step"] >= 10
    if who == "the agent":
        assert "the agent that watches the processes failed: the agent was killed by SIGKILL: restarting" in ended.err
    assert not any(one.is_running() for one in before)


@pytest.mark.slow
def test_a_stopped_process_is_ended_and_replaced():
    with training(LONG.replace("1000x", "20000x"), "-n 2") as process:
        wait_until(lambda: events("run", "saved"), process)
        stopped = workers_of(process)[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        ended = finish(process)
    assert ended.code == 0, ended.err
    assert re.search(r"WARNING rank 1 on \S+ was stopped for \d+ s and was killed: restarting from step", ended.err)
    assert not stopped.is_running()


@pytest.mark.slow
def test_processes_that_are_killed_leave_nothing_in_the_temporary_folder(request):
    temporary = Path(tempfile.mkdtemp())  # short: sockets lie there
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    for number in range(40):
        path = Path("pictures", "ab"[number % 2], f"{number}.jpeg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(path)
    job = f"train pictures mlp --data.image-size 32 --batch 4 --epochs 40 --out run -n 2 {QUICKLY}"
    decoding = "--data.workers 1 --set data.memory_limit_mib=0"
    with training(job, decoding, by=start, TMPDIR=str(temporary)) as process:
        wait_until(lambda: list(temporary.rglob("pymp-*")) and metrics("run"), process)
        workers_of(process)[0].kill()
        ended = finish(process)
    assert ended.code == 0, ended.err
    assert events("run", "restarted")
    assert not list(temporary.glob("[!t]*"))

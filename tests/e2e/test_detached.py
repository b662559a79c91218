"""A run whose head goes on without its terminal, and whose processes go on without their head."""

import contextlib
import json
import os
import signal

import psutil
import pytest

from tests.e2e.command import (
    QUICKLY,
    done,
    events,
    finish,
    inside,
    marked,
    metrics,
    refused,
    start,
    training,
    wait_until,
)

ENDLESS = f"digits mlp --epochs 100000 --set train.evaluate_every=1000 {QUICKLY}"
WHERE = "--hosts 127.0.0.1:2 --out run"


@pytest.fixture(autouse=True)
def left(here):
    """What a test leaves is ended with it."""
    yield
    for process in marked(str(here)):
        with contextlib.suppress(psutil.Error):
            process.kill()


def detached(*given):
    """The process that goes on once a command has ended."""
    return json.loads(done(*given, "--detach --json", by=start).out)["pid"]


def trains_on(process=None, steps=5):
    before = len(metrics("run"))
    wait_until(lambda: len(metrics("run")) > before + steps, process)


@pytest.mark.slow
def test_it_trains_on_without_its_head_and_obeys_a_stop(here):
    head = detached("launch", ENDLESS, WHERE)
    assert os.getsid(head) == head  # so that no terminal's end comes to it
    assert metrics("run")
    agents = psutil.Process(head).children()
    assert "--out" not in refused("resume run", says="a run is active")
    os.kill(head, signal.SIGKILL)
    trains_on(steps=20)
    assert "manyhands resume run" in done("stop run").out
    assert events("run", "stopped")
    psutil.wait_procs(agents, timeout=60)
    assert not marked(str(here))


@pytest.mark.slow
def test_a_run_whose_agent_stands_still_and_whose_command_was_killed_is_listed_and_stopped(here):
    with training("train", ENDLESS, "-n 2 --out run", by=start) as process:
        wait_until(lambda: metrics("run"), process)
        (agent,) = [one for one in psutil.Process(process.pid).children() if "agents.agent" in " ".join(one.cmdline())]
        agent.suspend()
        process.kill()
        finish(process)
    assert "no launcher" in done("ps", by=inside).out
    assert "is active" in done("why run", by=inside).out
    assert "run has ended here; the last checkpoint" in done("stop run").out
    wait_until(lambda: not marked(str(here)))
    assert done("why run", by=inside).out.startswith("run stopped after")
    assert done("ps", by=inside).out == "no run is active\n"


@pytest.mark.slow
def test_a_run_is_gone_on_with_detached(here):
    done("launch", ENDLESS, WHERE, "--set train.max_steps=20", by=start)
    detached("resume run --set train.max_steps=0")
    done("stop run")
    wait_until(lambda: not marked(str(here)))


@pytest.mark.slow
def test_a_detached_run_without_its_head_is_taken_over_by_a_command_that_waits(here):
    head = detached("launch", ENDLESS, WHERE)
    refused("resume run --no-detach", says="a run is active")
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: events("run", "saved") or len(metrics("run")) > 20)
    with training("resume run --no-detach", by=start) as again:
        wait_until(lambda: events("run", "resumed"), again)
        trains_on(again)
        again.terminate()
        ended = finish(again)
    assert ended.code == 75, ended.err
    assert not marked(str(here))


def test_what_trains_on_this_machine_alone_is_not_detached():
    done("train digits mlp --epochs 1 --out run", QUICKLY)
    refused("resume run --epochs 2 --detach", says="only manyhands launch", where=False)
    refused("launch", ENDLESS, WHERE, "--detach --relay")
    refused("train", ENDLESS, "--cluster.detach=true")


def test_what_fails_before_it_trains_is_said_on_the_terminal(here):
    refused("launch", here / "nothing", "mlp --detach", WHERE, QUICKLY, by=start)
    with training("launch --detach", ENDLESS, WHERE, by=start) as process:
        wait_until(lambda: (here / "run" / "job.toml").is_file(), process)
        process.send_signal(signal.SIGINT)
        assert finish(process).code in {75, 130}
    wait_until(lambda: not marked(str(here)))


# Ctrl-C comes between the two, when the command has become two processes.
AT_ONCE = """
import os, signal, time
from manyhands.run.launch import Background
signal.signal(signal.SIGTERM, lambda *_: os._exit(75 if os.getsid(0) == os.getpid() else 1))
background = Background()
if background.elsewhere:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(background.wait(as_json=False))
time.sleep(60)
"""


def test_a_stop_at_once_reaches_the_process_that_goes_on():
    done(program=("-c", AT_ONCE), by=start, code=75)

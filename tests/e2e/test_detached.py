"""A run whose head goes on without its terminal, and whose processes go on without their head."""

import contextlib
import json
import os
import signal

import psutil
import pytest

from tests.e2e.command import (
    QUICK,
    assert_one_screen,
    end,
    events,
    finish,
    forked,
    marked,
    run,
    running,
    start,
    wait_until,
)

ENDLESS = ("digits", "mlp", "--epochs", "100000", "--set", "train.evaluate_every=1000", *QUICK)
WHERE = ("--hosts", "127.0.0.1:2", "--out", "run", "--detach")


def measured(folder):
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.fixture
def left(here):
    """What a test leaves is ended with it."""
    yield
    for process in marked(str(here)):
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("left")
def test_it_trains_on_without_its_head_and_obeys_a_stop(here):
    begun = run("launch", *ENDLESS, *WHERE, "--json", HERE=str(here))
    assert begun.code == 0, begun.err
    told = json.loads(begun.out)
    assert os.getsid(told["pid"]) == told["pid"]  # so that no terminal's end comes to it
    assert measured(here)
    agents = psutil.Process(told["pid"]).children()
    again = run("resume", "run")
    assert again.code == 2
    assert_one_screen(again.err)
    assert "a run is active" in again.err
    assert "--out" not in again.err
    os.kill(told["pid"], signal.SIGKILL)
    before = measured(here)
    wait_until(lambda: measured(here) > before + 20)
    stopped = run("stop", "run")
    assert stopped.code == 0, stopped.err
    assert "manyhands resume run" in stopped.out
    assert events(here / "run", "stopped")
    psutil.wait_procs(agents, timeout=60)
    assert not marked(str(here))


@pytest.mark.slow
@pytest.mark.usefixtures("left")
def test_a_run_whose_agent_stands_still_and_whose_command_was_killed_is_listed_and_stopped(here):
    process = start("train", *ENDLESS, "-n", "2", "--out", "run", HERE=str(here))
    try:
        wait_until(lambda: measured(here), process)
        (agent,) = [one for one in psutil.Process(process.pid).children() if "agents.agent" in " ".join(one.cmdline())]
        agent.suspend()
    finally:
        process.kill()
        finish(process)
    listed = run("ps")
    assert "no launcher" in listed.out
    assert "is active" in run("why", "run").out
    stopped = run("stop", "run")
    assert stopped.code == 0, stopped.err
    assert "run has ended here; the last checkpoint" in stopped.out
    wait_until(lambda: not marked(str(here)))
    assert run("why", "run").out.startswith("run stopped after")
    assert run("ps").out == "no run is active\n"


@pytest.mark.slow
@pytest.mark.usefixtures("left")
def test_a_run_is_gone_on_with_detached(here):
    short = (*ENDLESS, "--set", "train.max_steps=20")
    assert run("launch", *short, *WHERE[:-1], HERE=str(here)).code == 0
    begun = run("resume", "run", "--set", "train.max_steps=0", "--detach", "--json", HERE=str(here))
    assert begun.code == 0, begun.err
    assert json.loads(begun.out)["status"] == "running"
    assert run("stop", "run").code == 0
    wait_until(lambda: not marked(str(here)))


@pytest.mark.slow
@pytest.mark.usefixtures("left")
def test_a_detached_run_without_its_head_is_taken_over_by_a_command_that_waits(here):
    begun = run("launch", *ENDLESS, *WHERE, "--json", HERE=str(here))
    assert begun.code == 0, begun.err
    refused = run("resume", "run", "--no-detach")
    assert (refused.code, "a run is active" in refused.err) == (2, True)
    os.kill(json.loads(begun.out)["pid"], signal.SIGKILL)
    wait_until(lambda: events(here / "run", "saved") or measured(here) > 20)
    with running("resume", "run", "--no-detach", HERE=str(here)) as again:
        wait_until(lambda: events(here / "run", "resumed"), again)
        before = measured(here)
        wait_until(lambda: measured(here) > before + 5, again)
        again.terminate()
        ended = finish(again)
    assert ended.code == 75, ended.err
    assert not marked(str(here))


def test_what_trains_on_this_machine_alone_is_not_detached(here):
    assert run("train", "digits", "mlp", "--epochs", "1", *QUICK, "--out", "run").code == 0
    ended = run("resume", "run", "--epochs", "2", "--detach")
    assert ended.code == 2
    assert "only manyhands launch" in ended.err


@pytest.mark.usefixtures("left")
def test_what_fails_before_it_trains_is_said_on_the_terminal(here):
    ended = run("launch", str(here / "nothing"), "mlp", *QUICK, *WHERE, HERE=str(here))
    assert ended.code == 2
    assert_one_screen(ended.err)
    process = start("launch", *ENDLESS, *WHERE, HERE=str(here))
    try:
        wait_until(lambda: (here / "run" / "job.toml").is_file(), process)
        process.send_signal(signal.SIGINT)
        assert finish(process).code in {75, 130}
    finally:
        end(process)
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
    assert run(program=("-c", AT_ONCE)).code == 75


def test_what_can_not_be_detached_is_refused(here):
    relayed = finish(forked("launch", *ENDLESS, *WHERE, "--relay"))
    alone = finish(forked("train", *ENDLESS, "--cluster.detach=true"))
    for ended in (relayed, alone):
        assert ended.code == 2
        assert_one_screen(ended.err)

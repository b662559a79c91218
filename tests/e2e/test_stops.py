"""Stops of every kind: what is saved, what is left behind, and that a run goes on exactly where it was."""

import signal

import psutil
import pytest

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
    running,
    wait_until,
)

pytestmark = pytest.mark.timeout(600)
# Longer than any test waits.
ENDLESS = ["synthetic:4000x1x8x8x10", f"{NETS}:Net", "--epochs", "100000", "--batch", "64", *QUICK]


def begun(folder):
    return lambda: events(folder, "first-step")


def family(process):
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_saves_and_says_so(number, here):
    with running("train", *ENDLESS, "-n", "2", "--out", here / "run") as process:
        wait_until(begun("run"), process)
        sockets = [each for member in family(process) for each in member.net_connections("inet")]
        process.send_signal(number)
        ended = finish(process)
    assert ended.code == 75, ended.err
    assert "stopped and saved at step" in ended.err
    (stopped,) = events("run", "stopped")
    assert events("run", "saved")[-1]["step"] == stopped["step"]
    assert not marked(str(here))
    # Nothing that listened while it trained could be reached from another machine.
    listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

    more = run("resume", "run", "--set", f"train.max_steps={stopped['step'] + 10}", "-n", "1", "--json", "-q")
    assert more.code == 0, more.err
    assert events("run", "resumed")[-1]["step"] == stopped["step"]
    assert events("run", "finished")[-1]["step"] == stopped["step"] + 10


def test_a_second_interrupt_kills(here):
    """The network takes its time over the pass in which the first one comes."""
    with running("train", *ENDLESS[:1], f"{NETS}:Sleepy", *ENDLESS[2:], "-n", "2", "--out", here / "run") as process:
        wait_until((here / "asleep").exists, process)
        process.send_signal(signal.SIGINT)
        # The agent passes the first one on before the second comes.
        wait_until((here / "asked").exists, process)
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    assert ended.code == 130, ended.err
    assert_one_screen(ended.err, where=False)
    wait_until(lambda: not marked(str(here)))


@pytest.mark.parametrize("who", ["launcher", "agent"])
def test_nothing_outlives_the_launcher_or_the_agent(who, here):
    with running("train", *ENDLESS, "-n", "2", "--out", here / "run") as process:
        wait_until(begun("run"), process)
        members = family(process)
        (agent,) = (each for each in members if "manyhands.cluster.host" in " ".join(each.cmdline()[:4]) and
                    each.ppid() == process.pid)  # fmt: skip
        assert len(members) >= 4
        (agent if who == "agent" else members[0]).kill()
        ended = finish(process)
        psutil.wait_procs(members[1:], timeout=120)
        assert not [each for each in members[1:] if each.is_running()]
    assert not marked(str(here))
    if who == "agent":
        assert ended.code == 1
        assert_one_screen(ended.err)
        assert "the agent that watches the processes failed: it was killed by SIGKILL" in ended.err


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_worker_is_named_and_the_run_goes_on_to_the_same_bits(processes, here):
    job = ["synthetic:1000x1x8x8x10", f"{NETS}:Killed", "--batch", "50", "--epochs", "2", *QUICK]
    job += ["--set", "checkpoint.every=7steps", "-n", processes]
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}
    ended = run("train", *job, "--out", "run", **fault)
    assert ended.code == 1
    assert_one_screen(ended.err)
    assert "rank 1 was killed by SIGKILL" in ended.err
    assert "memory" in ended.err
    assert "manyhands resume run goes on from the last checkpoint" in ended.err
    assert not marked(str(here))

    # The marker is there, so nothing happens any more; one step into the second epoch the run is stopped once more.
    for limit in ("31", "0"):
        ended = run("resume", "run", "--set", f"train.max_steps={limit}", **fault)
        assert ended.code == 0, ended.err
    assert [event["step"] for event in events("run", "resumed")] == [7, 31]
    ended = run("train", *job, "--out", "whole", **fault)
    assert ended.code == 0, ended.err
    assert_equal_weights(final_weights("run"), final_weights("whole"))

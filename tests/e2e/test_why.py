"""`manyhands why`: for each kind of failure that a test can make, the right rank and cause in the first five lines."""

import json
import math
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from manyhands.config.load import load_job
from manyhands.core.errors import RunError
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.report.read import read_run
from manyhands.run.outcome import note_head
from tests.e2e.command import NETS, QUICK, events, finish, forked, run, start, wait_until

pytestmark = pytest.mark.timeout(300)
LONG = [*QUICK, "--epochs", "3", "--out", "run"]
ENDLESS = ["synthetic:1000x1x8x8x10", "mlp", "--batch", "50", "--epochs", "2000", *QUICK, "--out", "run"]
CONSEQUENCES = ("closed by peer", "reset by peer", "Timed out", "recvBytes")


def why(*flags):
    ended = finish(forked("why", "run", *flags))
    assert ended.code == 0, ended.err
    return ended.out


def named(*words):
    """The words are in the first five lines, and no consequence passes for a cause."""
    headline = why()
    first = "\n".join(headline.splitlines()[:5])
    for word in words:
        assert re.search(word, first), headline
    assert not any(word in headline for word in CONSEQUENCES), headline
    return headline


FAULTS = {
    "Raises": ([], (r"why: rank 1 on \S+ at step \d+ \(train\): KeyError", r"nets\.py:\d+")),
    "Leaves": ([], (r"why: rank 1 on \S+ .*ended with exit code 3",)),
    "NotANumber": ([], (r"why: rank \d .*the loss is not finite: the output of the network is NaN", "the last 3")),
    "Hungry": (["--batch", "128"], (r"64 pictures in a micro-batch", "do: add --set train.micro_batch=16")),
}


@pytest.mark.parametrize("fault", ["Raises", *(pytest.param(one, marks=pytest.mark.slow) for one in [*FAULTS][1:])])
def test_a_run_that_failed_names_rank_and_cause(fault, here):
    words, headline = FAULTS[fault]
    assert run("train", "digits", f"{NETS}:{fault}", "-n", "2", *words, *LONG).code == 1
    named("run failed after", *headline)
    found = json.loads(why("--json"))
    assert found["state"] == "failed"
    assert found["rank"] == (1 if fault in {"Raises", "Leaves"} else found["rank"])
    assert found["host"]


@pytest.mark.slow
def test_a_run_that_goes_on_that_was_stopped_and_that_finished(here):
    training = start("train", *ENDLESS, "-n", "2")
    wait_until(lambda: Path("run/metrics.jsonl").exists(), training)
    headline = named(r"run is active, at step \d+ of 40000; last record \d+s ago")
    assert "why:" not in headline
    training.send_signal(signal.SIGINT)
    finish(training)
    named(
        r"run stopped after .* at step \d+ of 40000; everything is saved",
        "why: the run was asked to",
        "manyhands resume run",
    )
    assert json.loads(why("--json"))["state"] == "stopped"


@pytest.mark.slow
def test_a_run_that_was_started_again_and_finished(here):
    job = ["synthetic:1000x1x8x8x10", f"{NETS}:Killed", "--batch", "50", "--epochs", "3", *QUICK]
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}
    ended = run("train", *job, "-n", "2", "--out", "run", **fault)
    assert ended.code == 0, ended.err
    again = r"done: restarted .*rank 1 was killed by SIGKILL: restarting from step"
    headline = named("run finished after", again)
    assert "why:" not in headline


@pytest.mark.slow
def test_a_run_that_started_again_three_times_names_each(here):
    training = start("train", *ENDLESS, "-n", "2")
    for number in range(3):
        since = len(events("run", "saved"))
        wait_until(lambda since=since: Path("run/metrics.jsonl").exists() and _steps() > 0 and since >= 0, training)
        before = _steps()
        (agent,) = psutil.Process(training.pid).children()
        wait_until(lambda agent=agent: len(agent.children()) == 2, training)
        max(agent.children(), key=lambda one: one.pid).kill()
        wait_until(lambda number=number: len(events("run", "restarted")) > number, training)
        wait_until(lambda before=before: _steps() > before, training)
    named(r"run is active", r"done: restarted")
    assert why().count("done: restarted (") == 3
    training.send_signal(signal.SIGINT)
    finish(training)


def _steps():
    return max(_all_steps(), default=0)


def _all_steps():
    # Without a line that is being written.
    return [line["step"] for line in read_lines(Path("run/metrics.jsonl"))]


@pytest.mark.slow
def test_a_run_that_was_killed_from_outside_has_no_record_of_an_end(here):
    training = start("train", *ENDLESS, "-n", "2")
    # Epochs that are better than all before are saved too, at the beginning.
    wait_until(
        lambda: _steps() > 40 + max((event["step"] for event in events("run", "saved")), default=math.inf), training
    )
    everybody = [psutil.Process(training.pid), *psutil.Process(training.pid).children(recursive=True)]
    for one in everybody:
        one.suspend()
    for one in everybody:
        one.kill()
    finish(training)
    psutil.wait_procs(everybody, timeout=60)  # the system takes a while to end a large process
    named(r"run ended without a record", "why: no process recorded a reason")
    assert "do: resume from step" in why()
    # Gone on with, what was done after the last save is marked as undone, and nobody counts it.
    saved, before = max(event["step"] for event in events("run", "saved")), _steps()
    training = start("resume", "run")
    wait_until(lambda: events("run", "undone"), training)
    wait_until(lambda: any(line > before for line in _all_steps()), training)
    training.send_signal(signal.SIGINT)
    finish(training)
    (undone,) = events("run", "undone")
    assert (undone["step"], undone["data"]) == (saved, {"first": saved + 1, "last": before})
    counted = [record.step for record in read_run(Path("run")).steps]
    assert len(set(_all_steps())) < len(_all_steps()) or saved + 1 == before
    assert counted == sorted(set(counted))
    named("run stopped after")
    assert f"done: steps {saved + 1} to {before} were not saved and are repeated" in why()


@pytest.mark.slow
def test_a_second_ctrl_c_is_told_as_such(here):
    training = start("train", "digits", f"{NETS}:Sleepy", "-n", "2", *LONG, FAULT_MARKER=str(here / "marker"))
    wait_until(lambda: Path("run/metrics.jsonl").exists(), training)
    training.send_signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again" in training.stderr.readline(), training)
    training.send_signal(signal.SIGINT)
    finish(training)
    named("run was ended at once", "why: stopped ")


def test_a_start_that_fails_before_any_process_is_told(here):
    """What was said on the screen then is told later, too: here of what the agent imports before it forks."""
    (here / "broken").mkdir()
    Path("broken/safetensors.py").write_text("raise ImportError('spoilt since')\n")
    assert run("train", "digits", f"{NETS}:Net", "-n", "2", *LONG, PYTHONPATH="broken").code == 1
    headline = named("run failed after", "why: the agent .*spoilt since", "do: ")
    assert max(map(len, headline.splitlines())) < 500
    found = json.loads(why("--json"))
    assert (found["state"], found["rank"]) == ("failed", None)


@pytest.mark.slow
def test_a_machine_that_cannot_be_reached_is_named(here):
    training = start("train", *ENDLESS)
    wait_until(lambda: Path("run/metrics.jsonl").exists(), training)
    training.send_signal(signal.SIGINT)
    assert finish(training).code == 75
    assert run("resume", "run", "--set", 'cluster.hosts=["n7"]', "--set", "cluster.ssh=/bin/false").code == 3
    named(
        r"run failed after .* at step \d+ of",
        "why: .* on n7",
        "do: test the connection",
        r"do: resume from step \d+: manyhands resume run",
    )
    found = json.loads(why("--json"))
    assert (found["host"], found["rank"]) == ("n7", None)


@pytest.mark.slow
def test_a_finished_run_that_could_not_be_begun_again_stays_finished(here):
    assert run("train", "digits", "mlp", *LONG).code == 0
    note_head(load_job({"data.name": "digits"}).job, RunFolder(Path("run")), RunError("the agent on", "n7"))
    named("run finished after")


# The command itself, which its agent and workers follow into a cgroup.
IN_GROUP = """
import os, sys
from pathlib import Path
(Path(os.environ["FAULT_GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
from manyhands.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture
def little_memory():
    """A cgroup (version 2) whose processes may have 4 GiB together."""
    group = Path(f"/sys/fs/cgroup/manyhands-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not (group / "memory.max").exists():
            pytest.skip("needs a cgroup of version 2 that limits memory")
        (group / "memory.max").write_text(str(4 << 30))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield group
        wait_until(lambda: not (group / "cgroup.procs").read_text())
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_process_that_is_killed_for_memory_is_reported_as_such(little_memory, here):
    job = ["synthetic:1000x1x8x8x10", f"{NETS}:Starved", "--batch", "50", "--epochs", "3", *QUICK, "--out", "run"]
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_GROUP": str(little_memory)}
    ended = run("train", *job, "-n", "2", program=("-c", IN_GROUP), **fault)
    assert ended.code == 0, ended.err
    named(r"rank 1 was killed by the kernel, out of memory \(limit 4,096 MiB\): restarting from step")
    (record,) = [json.loads(one.read_text()) for one in Path("run/ranks/failures/start-0").glob("1.json")]
    assert "or reduce train.micro_batch" in record["hints"]

"""A detached run on three hosts that share no disk: it goes on without its head, and obeys the newest."""

import contextlib
import json
import signal
import time

import psutil
import pytest

from manyhands.core.timeouts import SILENT_S
from tests.e2e.command import events, run, wait_until
from tests.network.runs import LONG, PLACE, assert_same_updates, gone, hosts, machines, steps, trains_on, undisturbed
from tests.network.test_replicas import fetch, on, shell

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def first_trains_on(lab):
    """By the records of the first machine."""

    def made():
        lines = shell(lab, 1, f"cat {PLACE}/run/metrics.jsonl").split("\n")[:-1]
        return [line for line in lines if json.loads(line)["kind"] == "step"]

    trains_on(made)


def test_a_head_that_slept_finds_its_run_as_it_was(apart):
    """As on a laptop that was closed: what it hears of its machines after, it hears late."""
    begun = run("launch", *LONG, *hosts(apart, where=PLACE), "--out", "run", "--detach", "--json")
    assert begun.code == 0, begun.err
    head = psutil.Process(json.loads(begun.out)["pid"])
    try:
        head.send_signal(signal.SIGSTOP)
        time.sleep(SILENT_S + 4)  # longer than any machine may be silent
        head.send_signal(signal.SIGCONT)
        time.sleep(SILENT_S / 2)
        first_trains_on(apart)
        assert head.status() != psutil.STATUS_ZOMBIE
        assert not events("run", "restarted")
        stopped = run("stop", "run")
        assert stopped.code == 0, stopped.err
        gone(apart)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            head.kill()
    assert events("run", "stopped")


def test_a_new_head_takes_over_and_the_old_one_is_obeyed_no_more(apart):
    """The old one stands still, with all its connections, and wakes when the run has a new one."""
    saving = ["--set", "checkpoint.every=100steps", "--out", "run", "--detach", "--json"]
    begun = run("launch", *LONG, *hosts(apart, where=PLACE), *saving)
    assert begun.code == 0, begun.err
    head = psutil.Process(json.loads(begun.out)["pid"])
    theirs = [head, *head.children(recursive=True)]
    try:
        for process in theirs:
            process.send_signal(signal.SIGSTOP)
        first_trains_on(apart)
        wait_until(lambda: shell(apart, 2, f"ls {PLACE}/run/job.toml"))
        assert "is active" in on(apart, 2, "why", "run").stdout
        taken = on(apart, 2, "resume", "run", "--json")
        assert taken.returncode == 0, taken.stderr
        assert json.loads(taken.stdout)["status"] == "running"
        for process in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):  # it goes with the head
                process.send_signal(signal.SIGCONT)
        wait_until(lambda: not head.is_running() or head.status() == psutil.STATUS_ZOMBIE)
    finally:
        for process in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    first_trains_on(apart)
    # One that is well makes way too, saved.
    again = on(apart, 1, "resume", "run", "--json")
    assert again.returncode == 0, again.stderr
    first_trains_on(apart)
    stopped = on(apart, 3, "stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    gone(apart)
    folder = fetch(apart, 1)
    made = steps(folder)
    assert made == sorted(set(made)), made
    assert {"n1", "n2", "n3"} == {*machines(fetch(apart, 2))}
    last = events(folder, "stopped")[-1]["step"]
    assert_same_updates(folder, undisturbed(*LONG, "--set", f"train.max_steps={last}"))

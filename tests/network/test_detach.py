"""A detached run on three hosts that share no disk: it goes on without its head, and obeys the newest."""

import contextlib
import json
import signal
import time

import psutil
import pytest

from manyhands.core.timeouts import SILENT_S
from tests.e2e.command import QUICK, events, run, wait_until
from tests.network.test_launch import EXACT, gone
from tests.network.test_replicas import PLACE, apart, as_undisturbed, fetch, hosts, on, shell  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
LONG = ["digits", "mlp", "--epochs", "100000", "--set", "train.evaluate_every=1000", *QUICK, *EXACT]


def steps(lab):
    """What the first machine has recorded."""
    lines = shell(lab, 1, f"cat {PLACE}/run/metrics.jsonl").split("\n")[:-1]
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]


def trains_on(lab):
    before = len(steps(lab))
    wait_until(lambda: len(steps(lab)) > before + 2)


def test_a_head_that_slept_finds_its_run_as_it_was(apart):  # noqa: F811
    """As on a laptop that was closed: what it hears of its machines after, it hears late."""
    begun = run("launch", *LONG, *hosts(apart), "--out", "run", "--detach", "--json")
    assert begun.code == 0, begun.err
    head = psutil.Process(json.loads(begun.out)["pid"])
    try:
        head.send_signal(signal.SIGSTOP)
        time.sleep(SILENT_S + 4)  # longer than any machine may be silent
        head.send_signal(signal.SIGCONT)
        time.sleep(SILENT_S / 2)
        trains_on(apart)
        assert head.status() != psutil.STATUS_ZOMBIE
        assert not events("run", "restarted")
        stopped = run("stop", "run")
        assert stopped.code == 0, stopped.err
        gone(apart)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            head.kill()
    assert events("run", "stopped")


def test_a_new_head_takes_over_and_the_old_one_is_obeyed_no_more(apart):  # noqa: F811
    """The old one stands still, with all its connections, and wakes when the run has a new one."""
    saving = ["--set", "checkpoint.every=100steps", "--out", "run", "--detach", "--json"]
    begun = run("launch", *LONG, *hosts(apart), *saving)
    assert begun.code == 0, begun.err
    head = psutil.Process(json.loads(begun.out)["pid"])
    theirs = [head, *head.children(recursive=True)]
    try:
        for process in theirs:
            process.send_signal(signal.SIGSTOP)
        trains_on(apart)
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
    trains_on(apart)
    # One that is well makes way too, saved.
    again = on(apart, 1, "resume", "run", "--json")
    assert again.returncode == 0, again.stderr
    trains_on(apart)
    stopped = on(apart, 3, "stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    gone(apart)
    folder = fetch(apart, 1)
    made = [
        record["step"]
        for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == "step"
    ]
    assert made == sorted(set(made)), made
    assert {"n1", "n2", "n3"} == {
        entry["host"] for entry in json.loads((fetch(apart, 2) / "machines.json").read_text())
    }
    as_undisturbed(folder, *LONG, "--set", f"train.max_steps={events(folder, 'stopped')[-1]['step']}")

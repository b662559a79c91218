"""Runs on three hosts that share no disk: two hosts hold each checkpoint, and a detached run needs no launcher."""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from manyhands.checkpoint.folders import newest_checkpoint
from manyhands.checkpoint.read import load_checkpoint
from manyhands.core.timeouts import SILENT_S
from tests.e2e.command import PIPES, QUICKLY, done, events, finish, has_ended, training, wait_until, words
from tests.network.runs import (
    EXACT,
    LONG,
    PLACE,
    assert_same_updates,
    gone,
    hosts,
    machines,
    steps,
    trains_on,
    undisturbed,
    workers,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
JOB = f"digits mlp --epochs 30 --set train.evaluate_every=30 {QUICKLY} {EXACT}"
SAVING = "--set checkpoint.every=40steps --out run"


def typed(lab, host, *given):
    """The command for what a user types on a host, in the work folder."""
    line = shlex.join([sys.executable, "-m", "manyhands", *words(given)])
    return [*shlex.split(lab.ssh), lab.name(host), f"cd {PLACE} && exec {line}"]


def on(lab, host, *given):
    """What such a command says, which ends well."""
    return finish(subprocess.Popen(typed(lab, host, *given), **PIPES), code=0)


def shell(lab, host, line):
    return finish(subprocess.Popen([*shlex.split(lab.ssh), lab.name(host), line], **PIPES)).out


def saved_on(lab, host):
    """Steps of the checkpoints that a host's own disk holds."""
    found = shell(lab, host, f"ls {PLACE}/run/checkpoints").split()
    return [int(name.removeprefix("step-")) for name in found if name.startswith("step-")]


def fetch(lab, host):
    """What a host's own disk holds of the run, brought here."""
    copy = ["scp", "-Oqr", *shlex.split(lab.ssh)[1:], f"{lab.name(host)}:{PLACE}/run", f"of-n{host}"]
    subprocess.run(copy, check=True, timeout=60)
    return Path(f"of-n{host}")


@pytest.mark.parametrize("mode", ["data", "fsdp", "semi --pin 1=o@dp --pin 3=i@dp"])
def test_run_whose_first_machine_dies_with_its_disk_resumes_from_the_copy(mode, apart):
    with training("launch", JOB, SAVING, hosts(apart, where=PLACE), "--parallel", mode) as process:
        wait_until(lambda: len(events("run", "saved")) > 1 and saved_on(apart, 2), process)
        for _, worker in workers(apart, [2, 3]):  # so that nobody can save what it has in memory
            worker.kill()
        apart.kill(1)
        says = "each checkpoint is saved on both n1 and n2, because they don't share a disk"
        finish(process, code=0, says=says)
        gone(apart)
    resumed = events("run", "resumed")
    assert resumed
    assert all(event["step"] >= 40 for event in resumed)
    assert_same_updates(fetch(apart, 2), undisturbed(JOB))


def test_who_lost_the_head_and_the_first_machine_resumes_from_the_second(apart):
    launch = typed(apart, 1, "launch", JOB, SAVING, hosts(apart, where=PLACE))
    head = subprocess.Popen(launch, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: saved_on(apart, 2), head)
        apart.kill(1)
        wait_until(lambda: not workers(apart, [2, 3]), head)
    finally:
        head.kill()
        head.wait()
    before = fetch(apart, 2)
    assert (before / "job.toml").is_file()
    assert (before / "plan.json").is_file()
    step = json.loads((newest_checkpoint(before / "checkpoints")[0] / "state.json").read_text())["step"]
    assert load_checkpoint(newest_checkpoint(before / "checkpoints")[0]).state["step"] == step
    again = on(apart, 2, "resume run")
    assert "n1" in again.err
    assert "continuing without this machine" in again.err
    before.rename("before")
    after = fetch(apart, 2)
    assert events(after, "resumed")[-1]["step"] == step
    assert_same_updates(after, undisturbed(JOB))
    gone(apart)


def first_trains_on(lab):
    """By the records of the first machine."""

    def made():
        lines = shell(lab, 1, f"cat {PLACE}/run/metrics.jsonl").split("\n")[:-1]
        return [line for line in lines if json.loads(line)["kind"] == "step"]

    trains_on(made)


def test_a_head_that_slept_finds_its_run_as_it_was(apart):
    """As on a laptop that was closed: what it hears of its machines after, it hears late."""
    begun = done("launch", LONG, hosts(apart, where=PLACE), "--out run --detach --json")
    head = psutil.Process(json.loads(begun.out)["pid"])
    try:
        head.send_signal(signal.SIGSTOP)
        time.sleep(SILENT_S + 4)  # longer than any machine may be silent
        head.send_signal(signal.SIGCONT)
        time.sleep(SILENT_S / 2)
        first_trains_on(apart)
        assert head.status() != psutil.STATUS_ZOMBIE
        assert not events("run", "restarted")
        done("stop run")
        gone(apart)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            head.kill()
    assert events("run", "stopped")


def test_a_new_head_takes_over_and_the_old_one_is_obeyed_no_more(apart):
    """The old one stands still, with all its connections, and wakes when the run has a new one."""
    begun = done("launch", LONG, hosts(apart, where=PLACE), SAVING, "--detach --json")
    head = psutil.Process(json.loads(begun.out)["pid"])
    theirs = [head, *head.children(recursive=True)]
    try:
        for process in theirs:
            process.send_signal(signal.SIGSTOP)
        first_trains_on(apart)
        wait_until(lambda: shell(apart, 2, f"ls {PLACE}/run/job.toml"))
        assert "is active" in on(apart, 2, "why run").out
        assert json.loads(on(apart, 2, "resume run --json").out)["status"] == "running"
        for process in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):  # it goes with the head
                process.send_signal(signal.SIGCONT)
        wait_until(lambda: has_ended(head))
    finally:
        for process in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    first_trains_on(apart)
    # One that is well makes way too, saved.
    on(apart, 1, "resume run --json")
    first_trains_on(apart)
    on(apart, 3, "stop run")
    gone(apart)
    folder = fetch(apart, 1)
    made = steps(folder)
    assert made == sorted(set(made)), made
    assert {"n1", "n2", "n3"} == {*machines(fetch(apart, 2))}
    last = events(folder, "stopped")[-1]["step"]
    assert_same_updates(folder, undisturbed(LONG, f"--set train.max_steps={last}"))

"""This machine's agent is started before the job is known, and is gone where the job wants none."""

import contextlib
import errno
import json
import signal

import psutil
import pytest

from manyhands.cluster.agents.early import EARLY, start_early, take_early
from tests.e2e.command import QUICK, end, finish, running, start, wait_until

JOB = ("digits", "mlp", *QUICK, "--epochs", "1", "--set", "train.max_steps=3", "--device", "cpu")


# A command that goes on once a file is there, after it has started its agent.
WAITS = """
import os, runpy, sys, time
class Waits:
    def find_spec(self, name, *_):
        while name == "cyclopts" and not os.path.exists("go"):
            time.sleep(0.05)
sys.meta_path.insert(0, Waits())
runpy.run_module("manyhands", run_name="__main__")
"""


def early(process):
    """The agents that a command has started before it knew its job."""
    found = []
    for one in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one] if one.cmdline()[-1:] == [EARLY] else []
    return found


def begun(*words):
    """A command that waits, and its agent."""
    process = start("train", *JOB, *words, program=("-c", WAITS))
    (agent,) = wait_until(lambda: early(process), process)
    return process, agent


@pytest.mark.slow
def test_its_workers_have_the_threads_that_the_job_asks_for(here):
    """Though it has imported torch before it hears of them."""
    with running("train", *JOB, "--set", "cluster.threads=2", "--out", "run") as process:
        wait_until(lambda: early(process), process)
        assert finish(process).code == 0
    assert json.loads((here / "run/env.json").read_text())["threads"] == 2


@pytest.mark.slow
def test_it_ends_where_a_job_is_wrong_or_its_head_is_killed(here):
    wrong, agent = begun("--set", "train.lr=-1")
    killed, other = begun("--out", "killed")
    killed.send_signal(signal.SIGKILL)
    (here / "go").touch()
    assert finish(wrong).code == 2
    assert finish(killed).code == -signal.SIGKILL
    wait_until(lambda: not (agent.is_running() or other.is_running()))


def test_it_is_not_kept_where_only_other_machines_take_part(here):
    """It would hold what it has imported for as long as they train."""
    away, agent = begun("--cluster.hosts", '["elsewhere"]', "--cluster.ssh", "sh -c 'sleep 300'", "--out", "run")
    (here / "go").touch()
    wait_until(lambda: not agent.is_running(), away)
    assert away.poll() is None
    end(away)


def test_where_it_cannot_be_started_the_job_is_read_all_the_same(monkeypatch):
    def no_memory(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("subprocess.Popen", no_memory)
    start_early(["train", "digits"])
    assert take_early() is None


def test_where_nothing_of_ours_trains_here_there_is_none(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an agent was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    for words in (["train", "--help"], ["train", "digits", "--dry-run"], ["train", "mine.py", "-n", "2"], ["ps"], []):
        start_early(words)
    monkeypatch.setenv("RANK", "0")
    start_early(["train", "digits"])

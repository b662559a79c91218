"""This machine's agent is started before the job is known, and is gone where the job wants none."""

import json
import signal

import psutil

from manyhands.core.early_agent import EARLY, start_early
from tests.e2e.command import QUICK, finish, running, start, wait_until

JOB = ("digits", "mlp", *QUICK, "--epochs", "1", "--set", "train.max_steps=3", "--device", "cpu")


def early(process):
    """The agents that a command has started before it knew its job."""
    return [one for one in psutil.Process(process.pid).children() if one.cmdline()[-1:] == [EARLY]]


def test_its_workers_have_the_threads_that_the_job_asks_for(here):
    """Though it has imported torch before it hears of them."""
    with running("train", *JOB, "--set", "cluster.threads=2", "--out", "run") as process:
        wait_until(lambda: early(process), process)
        assert finish(process).code == 0
    assert json.loads((here / "run/env.json").read_text())["threads"] == 2


def test_it_ends_where_a_job_is_wrong_or_its_head_is_killed(here):
    wrong = start("train", *JOB, "--set", "train.lr=-1")
    wait_until(lambda: early(wrong), wrong)
    (agent,) = early(wrong)
    assert finish(wrong).code == 2
    wait_until(lambda: not agent.is_running())
    killed = start("train", *JOB, "--out", "killed")
    wait_until(lambda: early(killed), killed)
    (agent,) = early(killed)
    killed.send_signal(signal.SIGKILL)
    assert finish(killed).code == -signal.SIGKILL
    wait_until(lambda: not agent.is_running())


def test_where_nothing_of_ours_trains_here_there_is_none(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an agent was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    for words in (["train", "--help"], ["train", "digits", "--dry-run"], ["train", "mine.py", "-n", "2"], ["ps"], []):
        start_early(words)
    monkeypatch.setenv("RANK", "0")
    start_early(["train", "digits"])

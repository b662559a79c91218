"""A command that a user starts: it loads no torch, its agent is started early, and all import what they need alone."""

import contextlib
import errno
import json
import re
import signal

import psutil
import pytest

from manyhands.cluster.agents.early import EARLY, start_early_agent, take_early_agent
from manyhands.core.errors import EXIT_SAVED
from tests.e2e.command import QUICKLY, done, end, finish, has_ended, read, start, training, wait_until

# Exits with the command's own code, or with 99 where the head has loaded torch.
HEAD = """
import os, sys
from manyhands.__main__ import start
leave = os._exit
os._exit = lambda code: leave(99 if "torch" in sys.modules else code)
start()
"""
JOB = f"digits mlp {QUICKLY} --device cpu"
SHORT = f"{JOB} --epochs 1 --set train.max_steps=3"


def head(*given):
    return done(*given, program=("-c", HEAD), by=start).out


@pytest.mark.slow
def test_launcher_of_runs_and_commands_for_runs_load_no_torch(here):
    """The early agent of the second one has imported torch before it hears of the threads."""
    head("launch --hosts 127.0.0.1:1", SHORT)
    (here / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    head("explain --cluster hosts --write again")
    with training(
        "train", JOB, "--epochs 1000000 --set cluster.threads=2 --out runs/one", by=start, program=("-c", HEAD)
    ) as process:
        wait_until(lambda: early(process), process)
        wait_until(lambda: "step" in head("ps"), process)
        head("logs runs/one")
        head("stop runs/one")
        finish(process, code=EXIT_SAVED)
    assert read("runs/one/env.json")["threads"] == 2
    for command in ("report runs/one", "logs runs/one", "explain runs/one/job.toml"):
        head(command)
    whole = json.loads(head("checkpoint info runs/one --json"))
    assert whole["format"] == "whole"
    assert {entry["dtype"] for entry in whole["model"].values()} == {"float32"}
    weights = max(here.glob("runs/one/checkpoints/*/model.safetensors"))
    assert json.loads(head("checkpoint info --json", weights))["model"] == whole["model"]


# Each takes as long as torch itself, or a third of that.
SLOW = {"torchvision.models", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"}


def imported_by(line, folder):
    """What the agent and the processes of a run import, by log; Python writes it there."""
    done(line, "--set train.max_steps=3 --out run", by=start, PYTHONPROFILEIMPORTTIME="1")
    logs = {path.name: path.read_text() for path in (folder / "run" / "ranks").glob("*.log")}
    return {name: set(re.findall(r"^import time:.*\| +(\S+)$", text, re.MULTILINE)) for name, text in logs.items()}


def test_a_network_and_data_of_ours_need_neither_torchvision_nor_the_compiler(here):
    imported = imported_by("train digits mlp -n 2 --set train.optimizer=adamw", here)
    assert imported.keys() == {"agent.log", "0.log", "1.log"}
    assert "torch" in imported["agent.log"]
    assert not {f"{name}: {slow}" for name, modules in imported.items() for slow in modules & SLOW}


@pytest.mark.slow
def test_what_the_processes_of_torchvisions_networks_need_is_imported_before_they_are_forked(here):
    imported = imported_by("train synthetic:64x3x32x32x4 resnet18 -n 2 --batch 8", here)
    assert {"torchvision.models", "torch._dynamo"} <= imported["agent.log"]
    assert not {"torchvision.models", "torch._dynamo"} & (imported["0.log"] | imported["1.log"])


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
    process = start("train", *SHORT.split(), *words, program=("-c", WAITS))
    (agent,) = wait_until(lambda: early(process), process)
    return process, agent


@pytest.mark.slow
def test_an_early_agent_ends_where_a_job_is_wrong_or_its_head_is_killed(here):
    wrong, agent = begun("--set", "train.lr=-1")
    killed, other = begun("--out", "killed")
    killed.send_signal(signal.SIGKILL)
    (here / "go").touch()
    finish(wrong, code=2)
    assert finish(killed).code == -signal.SIGKILL
    wait_until(lambda: has_ended(agent) and has_ended(other))


def test_an_early_agent_is_not_kept_where_only_other_machines_take_part(here):
    """It would hold what it has imported for as long as they train."""
    away, agent = begun("--cluster.hosts", '["elsewhere"]', "--cluster.ssh", "sh -c 'sleep 300'", "--out", "run")
    (here / "go").touch()
    wait_until(lambda: has_ended(agent), away)
    assert away.poll() is None
    end(away)


def test_an_early_agent_is_started_only_where_it_can_be_and_something_of_ours_trains_here(monkeypatch):
    tried = []

    def no_memory(*given, **_):
        tried.append(given)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("subprocess.Popen", no_memory)
    start_early_agent(["train", "digits"])
    assert take_early_agent() is None
    assert len(tried) == 1
    for words in (["train", "--help"], ["train", "digits", "--dry-run"], ["train", "mine.py", "-n", "2"], ["ps"], []):
        start_early_agent(words)
    monkeypatch.setenv("RANK", "0")
    start_early_agent(["train", "digits"])
    assert len(tried) == 1

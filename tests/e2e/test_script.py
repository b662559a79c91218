"""The user's own training script, started by our agents as torchrun would start it."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.command import assert_one_screen, finish, run, start, wait_until

SCRIPT = """\
import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

import beside

parser = argparse.ArgumentParser()
parser.add_argument("--fail", type=int, default=-1)
parser.add_argument("--sleep", action="store_true")
parser.add_argument("words", nargs="*")
given = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
print(__name__, beside.WORD, rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], *given.words)
if given.sleep:
    time.sleep(600)
if rank == given.fail:
    raise ValueError("the loss is gone")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item())
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(SCRIPT)
    (tmp_path / "own" / "beside.py").write_text("WORD = 'found'\n")
    return tmp_path


def log(rank, folder="run"):
    return Path(folder, "ranks", f"{rank}.log").read_text()


@pytest.mark.slow
def test_a_script_runs_as_under_torchrun(here):
    words = ["--", "--fail=-1", "--", "a b", "${local_rank}", "$$1", "--train.lr"]
    # As clusters' shells do; on one machine nobody else is to be reached.
    named = {"GLOO_SOCKET_IFNAME": "eth7"}
    ended = run("train", "own/train.py", "-n", "2", "--out", "run", "--json", *words, **named)
    assert ended.code == 0, ended.err
    first = "__main__ found 0 0 2 a b 0 $$1 --train.lr\nsum 2.0\n"
    assert log(0) == first
    assert log(1) == "__main__ found 1 1 2 a b 1 $$1 --train.lr\nsum 2.0\n"
    assert ended.out.startswith(first)
    assert json.loads(ended.out.splitlines()[-1]) == {"run": "run", "status": "finished", "exit_code": 0}


@pytest.mark.slow
def test_the_first_cause_is_told(here):
    ended = run("train", "own/train.py", "-n", "2", "--out", "run", "-q", "--", "--fail", "1")
    assert ended.code == 1
    assert "manyhands: ValueError: the loss is gone" in ended.err
    assert "where: rank 1 on" in ended.err
    assert 'raise ValueError("the loss is gone")' in ended.err
    assert "worker/script" not in ended.err
    assert "Traceback" in log(1)


@pytest.mark.slow
def test_what_the_script_itself_refuses_is_in_its_log_and_told(here):
    ended = run("train", "own/train.py", "-n", "1", "--out", "run", "--", "--nonsense")
    assert ended.code == 1
    assert "rank 0 ended with exit code 2" in ended.err
    assert "unrecognized arguments: --nonsense" in ended.err


@pytest.mark.slow
def test_a_debug_rank_beyond_the_last_is_refused(here):
    ended = run("train", here / "own" / "train.py", "-n", "2", "--debug-rank", "2")
    assert ended.code == 2
    assert "there is no rank 2 to debug: the ranks are 0 … 1" in ended.err


def test_ctrl_c_ends_all_of_it(here):
    process = start("train", "own/train.py", "-n", "2", "--out", "run", "--", "--sleep")
    wait_until(lambda: all(Path(f"run/ranks/{rank}.log").is_file() and log(rank) for rank in (0, 1)), process)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended.err
    assert "own/train.py was stopped" in ended.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["launch", "own/train.py", "--on", "slurm"], "a script of your own can't be submitted to slurm"),
        (["own/none.py"], "there is no script own/none.py"),
        (["own/train.py", "--epochs", "3"], "train.epochs has no effect on a script of your own"),
        (["digits", "mlp", "more"], 'unexpected argument "more"'),
    ],
)
def test_mistakes_are_one_screen(here, words, what):
    ended = run(*([] if words[0] == "launch" else ["train"]), *words)
    assert ended.code == 2
    assert what in ended.err
    assert_one_screen(ended.err)
    assert not Path("runs").exists()


def test_under_a_launcher_the_script_itself_is_to_be_started(here):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    ended = run("train", "own/train.py", **variables)
    assert "this process is already rank 0 of 2" in ended.err
    assert_one_screen(ended.err)

"""The user's own training script on three hosts, over real ssh."""

import pytest

from tests.e2e.command import run
from tests.network.test_launch import gone, here, hosts  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
SCRIPT = """\
import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print(os.uname().nodename, os.environ["RANK"], os.environ["GROUP_RANK"], *sys.argv[1:], int(total), flush=True)
if sys.argv[1:] == ["fail"] and rank == 2:
    raise ValueError("no more pictures")
dist.barrier()
"""


def test_three_hosts_run_the_script(lab, here):  # noqa: F811
    (here / "train.py").write_text(SCRIPT)
    ended = run("launch", "train.py", *hosts(lab), "--out", "run", "--", "--lr", "0.1")
    assert ended.code == 0, ended.err
    # n1 is another machine than the head: what rank 0 writes comes from there.
    assert ended.out.splitlines()[-1] == "n1 0 0 --lr 0.1 3"
    logs = run("logs", "run")
    assert "n3 2 2 --lr 0.1 3" in logs.out, logs
    gone(lab)


def test_the_first_cause_on_another_machine_is_told(lab, here):  # noqa: F811
    (here / "train.py").write_text(SCRIPT)
    ended = run("launch", "train.py", *hosts(lab), "--sync-code", "--out", "run", "--", "fail")
    assert ended.code == 1
    assert "manyhands: ValueError: no more pictures" in ended.err
    assert "where: rank 2 on n3" in ended.err
    gone(lab)

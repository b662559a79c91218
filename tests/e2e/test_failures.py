"""Runs that fail: the first cause, on the right rank, with the user's own lines and nobody else's."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import manyhands
from manyhands.core.errors import UserError
from manyhands.report import summary
from manyhands.report.read import read_run
from tests.e2e.command import NETS, QUICK, assert_one_screen, events, final_weights, finish, run, start

pytestmark = pytest.mark.timeout(300)
LONG = [*QUICK, "--epochs", "3"]


def test_too_small_a_batch_leaves_no_folder():
    ended = run("train", "digits", "mlp", "--batch", "1", "-n", "2", *LONG)
    assert ended.code == 2, ended.err
    assert_one_screen(ended.err)
    assert "set --batch 2 or higher" in ended.err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_module_that_raises_on_one_rank():
    ended = run("train", "digits", f"{NETS}:Raises", "-n", "2", "--out", "run", *LONG)
    assert ended.code == 1, ended.err
    assert_one_screen(ended.err)
    assert 'KeyError: "the user\'s own mistake"' in ended.err
    assert "rank 1 on" in ended.err
    assert "nets.py" in ended.err
    assert "in act" in ended.err
    for word in ("closed by peer", "Timed out", "reset by peer"):
        assert word not in ended.err, ended.err
    assert "torch/nn/modules" in Path("run/ranks/1.log").read_text()
    (failed,) = events("run", "failed")
    assert failed["rank"] == 1


@pytest.mark.slow
def test_a_process_that_leaves_without_a_word():
    ended = run("train", "digits", f"{NETS}:Leaves", "-n", "2", "--out", "run", *LONG)
    assert ended.code == 1
    assert_one_screen(ended.err)
    assert "rank 1 ended with exit code 3" in ended.err
    assert "about to leave" in ended.err
    assert Path("run/ranks/failures/1.json").exists()


def test_a_loss_that_is_not_a_number_names_rank_step_and_tensor():
    ended = run("train", "digits", f"{NETS}:NotANumber", "-n", "2", "--out", "run", *LONG)
    assert ended.code == 1
    assert_one_screen(ended.err)
    assert "the output of the network is NaN" in ended.err
    assert "rank 1, step 7" in ended.err
    # The two before it cost nothing but themselves.
    assert [one["step"] for one in events("run", "left-out")] == [6, 7]
    assert not events("run", "restarted")
    # What was trained before is saved, and is well.
    assert all(tensor.isfinite().all() for tensor in final_weights("run").values())


@pytest.mark.slow
def test_out_of_memory_says_what_fits_and_that_is_right():
    ended = run("train", "digits", f"{NETS}:Hungry", "-n", "2", "--batch", "128", "--out", "run", *LONG)
    assert ended.code == 1
    assert_one_screen(ended.err)
    assert "\nmanyhands: out of memory with 64 pictures in a micro-batch: CUDA out of memory" in ended.err
    assert ended.err.index("manyhands: out of memory") < ended.err.index("Traceback")
    assert "add --set train.micro_batch=16; the global batch stays 128" in ended.err
    assert "--set train.norm_group=16" in ended.err
    fitting = ["--set", "train.micro_batch=16", "--set", "train.norm_group=16", "--set", "train.evaluate_batch=128"]
    ended = run("train", "digits", f"{NETS}:Hungry", "-n", "2", "--batch", "128", "--out", "run2", *LONG, *fitting)
    assert ended.code == 0, ended.err


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.name != "posix" or os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_the_checkpoints_and_not_the_run(small_disk):
    big = ["--set", "model.arguments={hidden = 4000}"]
    ended = run("train", "digits", "mlp", "--out", small_disk / "run", *LONG, *big)
    # It trained to its end, and says that the end could not be kept.
    assert ended.code == 1, ended.err
    assert "step 69 could not be saved" in ended.err
    assert ended.err.count("evaluated=360") == 3
    assert "the disk is full" in ended.err
    warnings = [event["message"] for event in events(small_disk / "run", "warning")]
    assert any("the checkpoint was not saved at step" in text for text in warnings)
    assert not list((small_disk / "run" / "checkpoints").glob("*"))


LOOP = """
import json
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhands

data = TensorDataset(torch.zeros(24, 5), torch.arange(24) % 2)
net = nn.Linear(5, 2)
with manyhands.session(**json.loads(sys.argv[1])) as here:
    model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.2), data, batch=6)
    for epoch in here.epochs(2):
        for step, (x, y) in enumerate(batches):
            if (epoch, step, here.rank) == (1, 2, here.size - 1):
                raise KeyError("the user's own mistake")
            here.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kept"), [(2, {"out": "run", "run__report": False}), pytest.param(3, {}, marks=pytest.mark.slow)]
)
def test_in_a_loop_of_ones_own_all_say_the_first_cause(processes, kept, tmp_path):
    Path("loop.py").write_text(LOOP)
    place = {"cluster__init": f"file://{tmp_path}/meet", "cluster__world_size": processes}
    words = [json.dumps({**place, **kept, "cluster__rank": rank}) for rank in range(processes)]
    ended = [finish(one) for one in [start("loop.py", word, program=()) for word in words]]
    assert [one.code for one in ended] == [1] * processes
    *others, failed = [one.err for one in ended]
    assert 'raise KeyError("the user\'s own mistake")' in failed
    assert "RunError" not in failed
    for told in others:
        assert re.search(rf"RunError: rank {processes - 1} on \S+ failed first: KeyError: \"the user's", told)
        assert "gloo" not in told
        assert "closed by peer" not in told
    if kept:
        failures = [json.loads(Path(f"run/ranks/failures/{rank}.json").read_text()) for rank in range(processes)]
        assert [one["consequence"] for one in failures] == [True] * (processes - 1) + [False]
        assert summary.status(read_run(Path("run"))) == "failed"


@pytest.mark.slow
def test_a_loop_of_ones_own_that_an_agent_has_started_says_it_too():
    Path("loop.py").write_text(LOOP)
    ended = run("train", "loop.py", "-n", 2, "--", "{}")
    assert ended.code == 1
    assert_one_screen(ended.err)
    assert 'manyhands: KeyError: "the user\'s own mistake"' in ended.err
    assert "rank 1 on" in ended.err


def test_a_session_without_with_is_refused():
    with pytest.raises(UserError, match="the session is not open") as refused:
        manyhands.session().prepare(None, None, None, batch=1)
    assert refused.value.where == "session.prepare"
    assert refused.value.hints == ("open it: with manyhands.session() as here: …",)

"""Runs that fail: the first cause, on the right rank, with the user's own lines alone; `why` says it later."""

import json
import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from tests.e2e import command
from tests.e2e.command import NETS, QUICKLY, done, events, finish, read, start, stop, training, wait_until

pytestmark = pytest.mark.timeout(300)
LONG = f"{QUICKLY} --epochs 3 --out run"
CONSEQUENCES = ("closed by peer", "reset by peer", "Timed out", "recvBytes", "gloo")


def why(*flags):
    return done("why run", *flags, by=command.inside).out


def named(*causes):
    """What `why` says: the words are in the first five lines, and no consequence passes for a cause."""
    headline = why()
    first = "\n".join(headline.splitlines()[:5])
    for cause in causes:
        assert re.search(cause, first), headline
    assert not any(word in headline for word in CONSEQUENCES), headline
    return headline


def failed(fault, *more):
    """A run on two processes whose network fails."""
    ended = done(f"train digits {NETS}:{fault} -n 2", *more, LONG, code=1)
    command.assert_one_screen(ended.err)
    assert not any(word in ended.err for word in CONSEQUENCES), ended.err
    found = json.loads(why("--json"))
    assert found["state"] == "failed"
    assert found["host"]
    return ended.err, found["rank"]


def test_an_error_that_comes_every_time_is_of_one_rank_and_ends_the_run_after_the_second():
    err, rank = failed("Raises")
    assert rank == 1
    assert all(text in err for text in ('KeyError: "the user\'s own mistake"', "rank 1 on", "nets.py", "in act")), err
    assert "torch/nn/modules" in Path("run/ranks/1.log").read_text()
    assert [event["rank"] for event in events("run", "failed")] == [1]
    named("run failed after", r"why: rank 1 on \S+ at step \d+ \(train\): KeyError", r"nets\.py:\d+")
    assert len(events("run", "restarted")) == 1
    reported, _, screen = err.partition("manyhands: ")
    assert "the same error twice within 20 updates" in reported
    assert screen.count("Traceback") == 1
    assert Path("run/ranks/failures/start-0/1.json").exists()


def test_a_loss_that_is_not_a_number_names_rank_step_and_tensor():
    err, _ = failed("NotANumber")
    assert all(text in err for text in ("the output of the network is NaN", "rank 1, step 7", "reduce train.lr")), err
    # The two before it cost nothing but themselves.
    assert [one["step"] for one in events("run", "left-out")] == [6, 7]
    assert not events("run", "restarted")
    # What was trained before is saved, and is well.
    assert all(tensor.isfinite().all() for tensor in command.final_weights("run").values())
    cause = r"why: rank \d .*the loss is not finite: the output of the network is NaN"
    named("run failed after", cause, "the last 3")
    forward = "def forward(self, x): return float('nan') * super().forward(x.flatten(1))"
    Path("net.py").write_text(f"from torch import nn\nclass Nan(nn.Linear):\n    {forward}\nnet = Nan(64, 10)\n")
    ended = done("train digits net.py:net --out other", code=1, says="no update was possible: check the network")
    assert "reduce train.lr" not in ended.err
    assert "before its first update" not in done("why other").out


@pytest.mark.slow
def test_out_of_memory_says_what_fits_and_that_is_right():
    err, _ = failed("Hungry", "--batch 128")
    assert "\nmanyhands: out of memory with 64 pictures in a micro-batch: CUDA out of memory" in err
    assert err.index("manyhands: out of memory") < err.index("Traceback")
    assert "add --set train.micro_batch=16; the global batch stays 128" in err
    assert "--set train.norm_group=16" in err
    named("run failed after", r"64 pictures in a micro-batch", "do: add --set train.micro_batch=16")
    fitting = "--set train.micro_batch=16 --set train.norm_group=16 --set train.evaluate_batch=128"
    done(f"train digits {NETS}:Hungry -n 2 --batch 128 --epochs 1 {QUICKLY} --out run2", fitting)


# Of many samples, so that what is recorded of each epoch doesn't fill the disk by itself.
UNTIL_FULL = f"train synthetic:60000x1x8x8x10 mlp --epochs 100000 --set train.evaluate_every=0 {QUICKLY}"


@pytest.mark.slow
def test_run_continues_on_a_full_disk_and_its_records_are_complete_afterwards(small_disk, fill):
    folder = small_disk / "run"
    with training(UNTIL_FULL, "--set checkpoint.every=20steps -n 1 --out", folder) as process:
        wait_until(lambda: events(folder, "saved"), process)
        filler = fill(small_disk)
        for line in process.stderr:
            if "is full: training continues" in line:
                break
        filler.unlink()
        wait_until(lambda: "was not saved at step" in str(events(folder, "warning")), process)
        step = events(folder, "warning")[0]["step"]
        wait_until(lambda: events(folder, "saved")[-1]["step"] > step, process)
        stop(process)
    assert events(folder, "stopped")[-1]["step"] == events(folder, "saved")[-1]["step"]


def test_a_start_on_a_full_disk_is_one_screen(small_disk, fill):
    fill(small_disk)
    command.refused(UNTIL_FULL, "--out", small_disk / "run", says="No space left")


def loop(options, processes):
    sys.stderr = Path(f"{options['cluster__rank']}.err").open("w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    data = TensorDataset(torch.zeros(24, 5), torch.arange(24) % 2)
    net = nn.Linear(5, 2)
    with manyhands.session(**options, cluster__world_size=processes, cluster__init=f"file://{Path.cwd()}/meet") as here:
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.2), data, batch=6)
        for epoch in here.epochs(2):
            for step, (x, y) in enumerate(batches):
                if (epoch, step, here.rank) == (1, 2, here.size - 1):
                    raise KeyError("the user's own mistake")
                here.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [{"out": "run", "run__report": False}, {}])
def test_all_ranks_of_a_session_report_the_first_cause(kept):
    processes = 3
    fork = multiprocessing.get_context("fork").Process
    given = [({**kept, "cluster__rank": rank}, processes) for rank in range(processes)]
    started = [fork(target=loop, args=each, daemon=True) for each in given]
    for one in started:
        one.start()
    for one in started:
        one.join(command.PATIENCE_S)
    assert [one.exitcode for one in started] == [1] * processes
    *others, failed = [Path(f"{rank}.err").read_text() for rank in range(processes)]
    assert 'raise KeyError("the user\'s own mistake")' in failed
    assert "RunError" not in failed
    for reported in others:
        assert re.search(rf"RunError: rank {processes - 1} on \S+ failed first: KeyError: \"the user's", reported)
        assert not any(word in reported for word in CONSEQUENCES)
    if kept:
        failures = [read(f"run/ranks/failures/{rank}.json") for rank in range(processes)]
        assert [one["consequence"] for one in failures] == [True] * (processes - 1) + [False]
        assert json.loads(why("--json"))["state"] == "failed"


def test_start_that_fails_before_any_process_is_reported(here):
    """What was said on the screen then is told later, too: here of what the agent imports before it forks."""
    (here / "broken").mkdir()
    Path("broken/safetensors.py").write_text("raise ImportError('spoilt since')\n")
    done(f"train digits {NETS}:Net -n 2", LONG, by=start, PYTHONPATH="broken", code=1)
    headline = named("run failed after", "why: the agent .*spoilt since", "do: ")
    assert max(map(len, headline.splitlines())) < 500
    found = json.loads(why("--json"))
    assert (found["state"], found["rank"]) == ("failed", None)


@pytest.fixture
def little_memory():
    """A cgroup (version 2) whose processes may have 4 GiB together."""
    group = Path(f"/sys/fs/cgroup/manyhands-test-{os.getpid()}")
    try:
        group.mkdir()
        for limit, size in {"memory.max": 4 << 30, "memory.swap.max": 0}.items():
            with (group / limit).open("r+") as file:  # never made by this, where there is none
                file.write(str(size))
        yield group
        wait_until(lambda: not (group / "cgroup.procs").read_text())
    except OSError as error:
        pytest.skip(f"needs a cgroup of version 2 that limits memory: {error}")
    finally:
        if group.exists():
            group.rmdir()


@pytest.mark.slow
def test_a_process_that_is_killed_for_memory_is_reported_as_such(little_memory, here):
    job = f"train synthetic:1000x1x8x8x10 {NETS}:Starved --batch 50 --epochs 3 -n 2 --out run {QUICKLY}"
    # Agent and workers follow the command into the cgroup.
    line = f"echo $$ >{little_memory}/cgroup.procs && exec manyhands {job}"
    finish(command.shell(line, FAULT_MARKER=str(here / "marker"), FAULT_CALL="12"), code=0)
    named(r"rank 1 was killed by the kernel, out of memory \(limit 4,096 MiB\): restarting from step")
    assert "or reduce train.micro_batch" in read("run/ranks/failures/start-0/1.json")["hints"]

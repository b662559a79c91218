"""Processes started by hand or by other launchers meet; who is missing, there twice or not ours is named."""

import contextlib
import json
import os
import re
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from manyhands.config.load import load_job
from manyhands.core.world import World
from manyhands.parallel.group import rendezvous as meet
from manyhands.parallel.group.join import JoinedGroup
from manyhands.worker.member import shared_options
from tests.e2e import command
from tests.e2e.command import NETS, QUICK, QUICKLY, done, finish, free_port, refused, start, training, wait_until

pytestmark = pytest.mark.timeout(400)
SOON = f"train digits mlp --set cluster.join_warn_s=1 --set cluster.join_timeout_s=4 --epochs 2 {QUICKLY}"
# For those who must wait for slow starters.
LATE = f"--set cluster.join_warn_s=100 --set cluster.join_timeout_s=200 --epochs 2 {QUICKLY}"


def place(address, size, rank):
    return f"--init {address} --world-size {size} --rank {rank}"


def by_hand(address, size, rank, more="", model="mlp"):
    return f"train digits {model} {LATE} {place(address, size, rank)} {more}"


def together(*lines):
    """Commands that run at the same time, to their ends."""
    return [finish(process) for process in [command.forked(*line.split()) for line in lines]]


def assert_refused(ended, *says, code=2, most=15):
    """Each of several commands ends in one screen that has these words."""
    for each in ended:
        assert each.code == code, each.err
        command.assert_one_screen(each.err, most=most)
        assert all(text in each.err for text in says), each.err


def local():
    return f"tcp://127.0.0.1:{free_port()}"


def test_a_busy_port_names_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        says = f"port {port} is in use by process {os.getpid()}"
        refused(SOON, place(f"tcp://127.0.0.1:{port}", 2, 0), says=says)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("address", "rank", "says"),
    [
        ("tcp://192.0.2.77:23456", 0, "192.0.2.77 is not an address of this machine"),
        ("tcp://no.such.host.invalid:23456", 0, "the name no.such.host.invalid has no address"),
        ("tcp://no.such.host.invalid:23456", 1, "the name no.such.host.invalid has no address"),
        ("tcp://127.0.0.1", 0, "needs an address and a port"),
        ("tcp://0.0.0.0:23456", 1, "other ranks can't connect to 0.0.0.0"),
        ("file:///no/such/folder/meet", 0, "there is no folder /no/such/folder"),
        ("tcp://127.0.0.1:23456", 2, "--rank 2 is out of range for --world-size 2"),
        ("smb://there", 0, "cluster.init"),
    ],
)
def test_an_address_that_cannot_be(address, rank, says):
    refused(SOON, place(address, 2, rank), says=says)
    assert not any(Path().iterdir())


@pytest.mark.slow
def test_nobody_listens_or_a_listener_that_says_nothing():
    refused(SOON, place(local(), 2, 1), code=1, says=("still waiting for rank 0", "rank 1 can't reach rank 0"))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        says = f"the program listening at 127.0.0.1:{port} is not rank 0 of a run: no answer"
        refused(SOON, place(f"tcp://127.0.0.1:{port}", 2, 1), code=1, says=says)
    assert not any(Path().iterdir())


@pytest.mark.slow
def test_an_earlier_runs_init_file():
    """Its rank 0 has ended: both a new rank 0 and a new rank 1 are told."""
    rendezvous = Path.cwd() / "meet"
    names = dist.PrefixStore("present/0", dist.FileStore(str(rendezvous), 2))
    names.add("count/0", 1)
    names.set("0", json.dumps({"host": "here", "machine": meet.machine_id(), "pid": 2**22 + 1, "size": 2}))
    for rank, text in ((0, "already has a rank 0"), (1, "is from an earlier run")):
        refused(SOON, place(f"file://{rendezvous}", 2, rank), says=(text, f"rm {rendezvous}"))


def test_an_init_file_is_removed_after_the_last_rank_has_used_it(tmp_path):
    path = tmp_path / "meet"
    first, second = [JoinedGroup(World(rank, 2), dist.FileStore(str(path), 2), path) for rank in (0, 1)]
    leaves = threading.Thread(target=first.leave)
    leaves.start()
    leaves.join(0.2)
    second.store.set("late", "used")
    second.leave()
    leaves.join()
    assert not path.exists()


@pytest.mark.slow
def test_a_missing_rank_is_named():
    joined = "1 of 3 processes have joined; missing: rank 1-2"
    refused(
        SOON,
        place(local(), 3, 0),
        code=1,
        says=(f"{joined}; still waiting, up to 4 s in total", f"{joined}, after 4 s"),
    )


def test_one_rank_twice():
    address = local()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(training(by_hand(address, 3, rank))) for rank in (0, 1, 1)]
        wait_until(lambda: any(process.poll() is not None for process in processes[1:]))
        ended = [finish(process) for process in processes]
    assert_refused(ended)
    errors = [each.err for each in ended]
    # Rank 2 would never come, which is said at once: by the second one of rank 1, and to all that wait.
    (refused,) = [err for err in errors if "rank 1 is taken by process" in err]
    named = {re.search(r"rank 1 was given twice: to process (\d+) on", err)[1] for err in errors if err != refused}
    assert len(named) == 1
    assert f"rank 1 is taken by process {named.pop()} " not in refused


def test_a_rank_outside_ends_those_that_wait():
    """They would wait for rank 1 in vain; tests/parallel/test_said.py has what the others report."""
    address = f"file://{Path.cwd()}/meet"
    with training(by_hand(address, 2, 0)) as zero:
        names = dist.PrefixStore("present/0", dist.FileStore(f"{Path.cwd()}/meet"))
        wait_until(lambda: names.check(["0"]), zero)
        outside = done(by_hand(address, 2, 5), code=2)
        ended = finish(zero)
    assert_refused((outside, ended), "--rank 5 is out of range for --world-size 2")
    assert "can't join: " in ended.err


def test_world_sizes_or_jobs_that_differ():
    address = local()
    assert_refused(together(*(by_hand(address, 2 + rank, rank) for rank in (0, 1))), "differ in --world-size: ")
    address = local()
    lines = [by_hand(address, 2, rank, f"--lr {0.5 + rank}") for rank in (0, 1)]
    assert_refused(together(*lines), "differ in the job (flags or job.toml): train.lr (")
    assert not any(Path().iterdir())


def test_options_that_differ_are_named_with_their_numbers():
    def options(**flags):
        return shared_options(load_job({"data.name": "synthetic:20x1x8x8x3", **flags}, environment={}).job)

    one = options(**{"train.epochs": 3, "model.name": "mlp"})
    other = options(**{"train.epochs": 4, "model.name": "cnn"})
    assert meet._option_diff(one, other) == ": model.name, train.epochs (3 here, 4 there)"
    assert meet._option_diff(one, options(**{"train.epochs": 3, "model.name": "mlp", "run.out": "elsewhere"})) == ""
    # What another machine sent is never shown but as a number.
    assert meet._option_diff("train.epochs=3", "train.epochs=4\x1b[31m do:rm") == ": train.epochs"


def test_every_process_reports_the_first_cause():
    address = local()
    ended = together(*(by_hand(address, 2, rank, model=f"{NETS}:RaisesOnRank0") for rank in (0, 1)))
    assert_refused(ended, 'KeyError: "the user\'s own mistake"', code=1, most=20)
    assert ["failed first" in each.err for each in ended] == [False, True]
    assert not any("closed by peer" in each.err for each in ended)


def test_two_ranks_started_by_hand_clean_up_and_resume_the_run_of_rank_0():
    rendezvous = Path.cwd() / "meet"
    lines = [by_hand(f"file://{rendezvous}", 2, rank, "--out first --set train.max_steps=23") for rank in (0, 1)]
    first, second = together(*lines)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "top-1" in first.out
    assert second.out == ""
    assert not rendezvous.exists()
    assert {path.name for path in Path().iterdir()} == {"first"}
    address, own = local(), ("first", "no/such/run")
    ended = together(*(by_hand(address, 2, rank, f"--out more --resume {own[rank]}") for rank in (0, 1)))
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    assert "--resume no/such/run of rank 1 is ignored: all ranks use rank 0's --resume first" in ended[1].err
    (resumed,) = command.events("more", "resumed")
    assert resumed["step"] == 23


@pytest.mark.slow
def test_two_processes_of_torchs_launchers_are_one_run():
    """The first launcher passes --local-rank."""
    line = "-m manyhands train digits mlp --epochs 2 --out run --json"
    ended = done(line, QUICK, program=[*command.LAUNCH, "--master-port", str(free_port())], by=start)
    (line,) = ended.out.splitlines()
    assert json.loads(line)["run"].endswith("run")
    assert command.processes_of("run") == 2
    assert ended.err.count("evaluated=360") == 2
    assert ended.err.count("itself listens on every interface, port ") == 1
    (line,) = done("-m manyhands eval run --json", program=command.TORCHRUN, by=start).out.splitlines()
    assert json.loads(line)["count"] == 360

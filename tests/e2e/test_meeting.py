"""Processes that meet by hand: who is missing, there twice, of another job, or not ours at all is named."""

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from manyhands.config.load import load_job
from manyhands.parallel.group import rendezvous as meet
from manyhands.worker.member import shared_options
from tests.e2e.command import (
    NETS,
    QUICKLY,
    assert_one_screen,
    done,
    events,
    finish,
    forked,
    free_port,
    refused,
    start,
    training,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)
SOON = f"train digits mlp --set cluster.join_warn_s=1 --set cluster.join_timeout_s=4 --epochs 2 {QUICKLY}"
# For those who must wait for slow starters.
LATE = f"--set cluster.join_warn_s=100 --set cluster.join_timeout_s=200 --epochs 2 {QUICKLY}"


def place(address, size, rank):
    return f"--init {address} --world-size {size} --rank {rank}"


def by_hand(address, size, rank, more="", model="mlp"):
    return f"train digits {model} {LATE} {place(address, size, rank)} {more}"


def together(*lines, by=forked):
    """Commands that run at the same time, to their ends."""
    return [finish(process) for process in [by(*line.split()) for line in lines]]


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
    unanswered = ("still waiting for rank 0", "rank 1 can't reach rank 0")
    refused(SOON, place(local(), 2, 1), code=1, says=unanswered)
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
    names.set("0", json.dumps({"host": "here", "machine": meet.this_machine(), "pid": 2**22 + 1, "size": 2}))
    for rank, text in ((0, "already has a rank 0"), (1, "is from an earlier run")):
        refused(SOON, place(f"file://{rendezvous}", 2, rank), says=(text, f"rm {rendezvous}"))


@pytest.mark.slow
def test_a_missing_rank_is_named():
    joined = "1 of 3 processes have joined; missing: rank 1-2"
    refused(SOON, place(local(), 3, 0), code=1, says=(f"{joined}; giving up after 4 s", f"{joined}, after 4 s"))


def test_one_rank_twice():
    address = local()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(training(by_hand(address, 3, rank))) for rank in (0, 1, 1)]
        wait_until(lambda: any(process.poll() is not None for process in processes[1:]))
        ended = {process.pid: finish(process) for process in processes}
    for each in ended.values():
        assert each.code == 2, each.err
        assert_one_screen(each.err)
    # Rank 2 would never come, which is said at once: by the second one of rank 1, and to all that wait.
    (refused,) = [pid for pid, each in ended.items() if "rank 1 is taken by process" in each.err]
    told = [each.err for pid, each in ended.items() if pid != refused]
    assert all(f"rank 1 was given twice: to process {refused} on" in err for err in told)


def names_at(address, first):
    """What processes that meet there write of themselves."""
    kind, _, place = address.partition("://")
    if kind == "file":
        return dist.PrefixStore("present/0", dist.FileStore(place))
    host, _, port = place.partition(":")

    def listens():
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            return True

    wait_until(listens, first)
    return dist.PrefixStore("present/0", dist.TCPStore(host, int(port), is_master=False))


@pytest.mark.parametrize("kind", ["tcp", pytest.param("file", marks=pytest.mark.slow)])
def test_a_rank_outside_ends_all_that_wait(kind):
    """Rank 1 never comes then, which those that wait needn't find out by waiting."""
    address = local() if kind == "tcp" else f"file://{Path.cwd()}/meet"
    with training(by_hand(address, 3, 0)) as zero, training(by_hand(address, 3, 2)) as two:
        names = names_at(address, zero)
        wait_until(lambda: names.check(["0"]) and names.check(["2"]), two)
        outside = done(by_hand(address, 3, 5), code=2)
        ended = [finish(process) for process in (zero, two)]
    for each in (outside, *ended):
        assert each.code == 2, each.err
        assert_one_screen(each.err)
        assert "--rank 5 is out of range for --world-size 3" in each.err
    assert all("can't join: " in each.err for each in ended)


@pytest.mark.parametrize("differs", ["size", pytest.param("job", marks=pytest.mark.slow)])
def test_world_sizes_or_jobs_that_differ(differs):
    address = local()
    if differs == "size":
        lines, says = [by_hand(address, 2 + rank, rank) for rank in (0, 1)], "differ in --world-size: "
    else:
        lines = [by_hand(address, 2, rank, f"--lr {0.5 + rank}") for rank in (0, 1)]
        says = "differ in the job (flags or job.toml): train.lr ("
    for ended in together(*lines):
        assert ended.code == 2, ended.err
        assert_one_screen(ended.err)
        assert says in ended.err
    assert not any(Path().iterdir())


def test_options_that_differ_are_named_with_their_numbers():
    def options(**flags):
        return shared_options(load_job({"data.name": "synthetic:20x1x8x8x3", **flags}, environment={}).job)

    one = options(**{"train.epochs": 3, "model.name": "mlp"})
    other = options(**{"train.epochs": 4, "model.name": "cnn"})
    assert meet._options(one, other) == ": model.name, train.epochs (3 here, 4 there)"
    assert meet._options(one, options(**{"train.epochs": 3, "model.name": "mlp", "run.out": "elsewhere"})) == ""
    # What another machine sent is never shown but as a number.
    assert meet._options("train.epochs=3", "train.epochs=4\x1b[31m do:rm") == ": train.epochs"


@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_process_hears_the_first_cause(culprit):
    address, model = local(), f"{NETS}:Raises{'OnRank0' if culprit == 0 else ''}"
    ended = together(*(by_hand(address, 2, rank, model=model) for rank in (0, 1)))
    for rank, each in enumerate(ended):
        assert each.code == 1, each.err
        assert_one_screen(each.err, most=20)
        assert 'KeyError: "the user\'s own mistake"' in each.err
        assert ("failed first" in each.err) == (rank != culprit)
        assert "closed by peer" not in each.err


def test_two_by_hand_train_and_tidy_up():
    rendezvous = Path.cwd() / "meet"
    first, second = together(*(by_hand(f"file://{rendezvous}", 2, rank, "--out run") for rank in (0, 1)), by=start)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "top-1" in first.out
    assert second.out == ""
    assert not rendezvous.exists()
    assert {path.name for path in Path().iterdir()} == {"run"}


@pytest.mark.slow
def test_what_rank_0_resumes_counts_for_all():
    done(f"train digits mlp --epochs 1 {QUICKLY} --out first")
    address, own = local(), ("first", "no/such/run")
    ended = together(*(by_hand(address, 2, rank, f"--out more --resume {own[rank]}") for rank in (0, 1)))
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    assert "--resume no/such/run of rank 1 is ignored: all ranks use rank 0's --resume first" in ended[1].err
    (resumed,) = events("more", "resumed")
    assert resumed["step"] == 23

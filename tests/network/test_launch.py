"""One job on three hosts, over real ssh: what it learns, how it ends, and what it leaves behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.command import (
    QUICKLY,
    assert_equal_weights,
    done,
    events,
    final_weights,
    finish,
    forked,
    messages,
    metrics,
    read,
    refused,
    stop,
    training,
    wait_until,
)
from tests.e2e.test_hard_places import assert_alike
from tests.network import runs
from tests.network.lab import Lab

pytestmark = pytest.mark.timeout(400)
# Shared memory, or two levels, add numbers up in another order than processes of several machines by gloo.
BY_GLOO = "--set parallel.shared_memory=false"
FORTY = f"digits mlp --epochs 40 --set train.evaluate_every=40 {QUICKLY} {runs.EXACT}"


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False], ids=["started"])
def test_three_hosts_do_what_three_processes_here_do(lab, here):
    """Also where the head may pass on what they send each other: they reach each other."""
    ended = done("launch", runs.SHORT, runs.hosts(lab), "--relay --out far --json")
    assert json.loads(ended.out)["status"] == "finished"
    places = [f"n{host} {lab.address(host)} (eth0)" for host in lab.hosts]
    listens = "each process listens on free ports of its machine's address"
    for words in ("3 processes on n1, n2, n3", *places, listens, "unencrypted"):
        assert words in ended.err
    assert [entry["ranks"] for entry in read("far", "machines.json")] == [[0, 1], [1, 1], [2, 1]]
    averages = read("far", "plan.json")["averages"]
    assert averages == "gradients are averaged by gloo: the processes are on several machines"
    assert_equal_weights(final_weights("far"), runs.undisturbed(runs.SHORT, "-n 3", BY_GLOO))
    runs.gone(lab)


@pytest.mark.slow
def test_two_heads_do_not_share_a_run_folder_elsewhere(lab, here):
    """The lock lies on the machine that holds the folder; what a stopped run saved stays its own."""
    place, (one, two) = here / "far", (here / "one", here / "two")
    for folder in (place, one, two):
        folder.mkdir()
    names = f"root@{lab.address(1)},n2"  # both machines share the folder, and neither is the head's
    where = ["--hosts", names, "--cluster.ssh", lab.ssh, "--cluster.workdir", place, "--out", "run"]
    second = {"by": forked, "cwd": two, "where": False}
    with training("launch", runs.ENDLESS, where, cwd=one) as process:
        wait_until(runs.begun(one / "run"), process)
        refused("launch", runs.SHORT, where, says=f"a run is active in {lab.address(1)}:{place}/run", **second)
        stop(process, signal.SIGINT)
    other = f"the folder {place}/run on {lab.address(1)} belongs to a different run than run"
    refused("launch", runs.SHORT, where, says=(other, f"scp -r root@{lab.address(1)}:{place}/run run"), **second)


@pytest.mark.slow
def test_unequal_machines_without_a_shared_disk(apart):
    """The hosts' work folders are their own; records come to the head, checkpoints stay, and a resumed run goes on."""
    done("launch", runs.SHORT, runs.hosts(apart, 2, 1, where=runs.PLACE), "--out run --set train.max_steps=30", BY_GLOO)
    assert not Path("run/checkpoints").exists()
    assert not (runs.PLACE / "run").exists()
    assert Path("run/env.json").is_file()
    assert events("run", "finished")
    assert not done("logs run --rank 2").err
    done("eval run", code=2, says=f"scp -r n1:{runs.PLACE}/run/checkpoints run/")
    done("resume run --set train.max_steps=0")
    assert [event["step"] for event in events("run", "resumed")] == [30]
    runs.undisturbed(runs.SHORT, "-n 3", BY_GLOO)
    assert metrics("run", "evaluation")[-1]["loss"] == metrics("whole", "evaluation")[-1]["loss"]
    runs.own_disk(apart, 1)
    done("resume run --epochs 5")  # the second host has a copy of each checkpoint
    for host in apart.hosts:
        runs.own_disk(apart, host)
    lost = ("n1 has no checkpoint of", "the last checkpoint was saved at step")
    done("resume run --epochs 7", code=2, says=lost)
    runs.gone(apart)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_the_launcher_ends_all(number, lab, here):
    with training("launch", runs.ENDLESS, runs.hosts(lab), "--out run") as process:
        wait_until(runs.begun(), process)
        assert len(runs.agents(lab)) >= 9  # on each host: the agent, its worker, and the process that waits for both
        stop(process, number, code=-9 if number == signal.SIGKILL else 75)
    runs.gone(lab)
    # The workers were asked to save in each case, and had the time to.
    assert events("run", "saved")


# Started, each host's processes have a seed of hashes of their own, as the processes of users have.
LOST = {
    "kill-1": ("kill", 1, "", True),
    "down-2": ("down", 2, "", True),
    "fsdp": ("agent", 2, "--parallel fsdp", True),
    "semi": ("agent", 2, "--parallel semi", True),
    "auto": ("agent", 2, "--parallel auto", False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "host", "mode", "forks"), LOST.values(), ids=LOST)
def test_run_continues_on_the_remaining_machines(how, host, mode, lab, here):
    """Split over them anew where the network is split."""
    with training("launch", FORTY, "--set checkpoint.every=20steps", mode, runs.hosts(lab), "--out run") as process:
        wait_until(runs.begun(kind="saved"), process)
        if mode:
            lab.end_sshd(host)  # it doesn't come back
        runs.strike(lab, host, how)
        finish(process, code=0, says=f"WARNING n{host} is lost" if not mode else ())
        runs.gone(lab)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert again["step"] == resumed["step"]
    assert len(runs.machines()) == 2
    if mode:
        assert_alike(final_weights("run"), runs.undisturbed(FORTY))
    else:
        runs.assert_same_updates("run", runs.undisturbed(FORTY))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "way"), [(3, ""), (0, "--interface ssh")], ids=["plain", "through ssh"])
def test_a_killed_process_among_two_on_each_host_is_heard_of_by_all(rank, way, lab, here):
    """Also where only ssh joins the hosts; from its last whole update on the run makes the updates of one process."""
    with training(
        "launch", FORTY, "--set checkpoint.every=40steps", runs.hosts(lab, 2, 2), way, "--out run"
    ) as process:
        wait_until(runs.begun(kind="saved"), process)
        os.kill(read("run", "env.json")["ranks"][rank]["pid"], signal.SIGKILL)
        finish(process, code=0)
        runs.gone(lab)
    assert len(events("run", "restarted")) == 1
    one, other = messages("run", "averaging")
    assert one == other == read("run", "plan.json")["averages"]
    assert one.startswith("gradients are averaged in two levels")
    runs.assert_same_updates("run", runs.undisturbed(FORTY))


@pytest.mark.slow
def test_lost_machine_is_named_and_the_run_resumes_later(lab, here):
    with training(
        "launch", runs.ENDLESS, "--set checkpoint.every=20steps", runs.hosts(lab), "--elastic off --out run"
    ) as process:
        wait_until(runs.begun(kind="saved"), process)
        lab.down(3)
        finish(process, code=1, says=("n3 is lost", "manyhands resume run"))
        runs.gone(lab)
    done("resume run", code=3, says="n3 can't be reached")
    assert "why: n3 can't be reached" in done("why run").out
    lab.up(3)
    saved = events("run", "saved")[-1]["step"]
    done(f"resume run --set train.max_steps={saved + 30}")
    assert events("run", "resumed")[-1]["step"] == saved


@pytest.mark.slow
def test_a_network_of_ipv6_alone(here):
    with Lab(hosts=2, ipv6_only=True) as lab:
        done("launch", runs.SHORT, runs.hosts(lab), "--out run", says=lab.address(1))


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False], ids=["started"])
def test_code_travels_when_asked(lab, here):
    """The user's own network, from a folder that the other machines don't have."""
    (here / "mine.py").write_text("from torch import nn\n\nnet = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n")
    for host in lab.hosts:
        runs.own_disk(lab, host, environment={"MANYHANDS_CACHE": str(runs.PLACE / "cache")})
    done("launch digits mine.py:net --epochs 1 --out run --sync-code", QUICKLY, runs.hosts(lab, where=runs.PLACE))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("program", "ssh-of-mine can't be started"),
        ("file", ("mine.py is missing in", "--sync-code")),
        pytest.param("python", ("n1 has no Python with manyhands", "--cluster.python"), marks=pytest.mark.slow),
        pytest.param("firewall", "n2", marks=pytest.mark.slow),
    ],
)
def test_a_machine_that_cannot_take_part_is_named_before_anything_starts(fault, says, lab, here):
    given = runs.hosts(lab)
    if fault == "program":
        given = [*given[:2], "--cluster.ssh", "ssh-of-mine"]
    elif fault == "python":
        bare = here / "bare-python"
        bare.write_text('#!/bin/sh\nexec env -u PYTHONPATH /usr/bin/python3 -S "$@"\n')
        bare.chmod(0o755)
        given = ["--hosts", "n1", *given[2:], "--cluster.python", bare]
    elif fault == "firewall":
        given += ["--interface", "eth0"]  # where none is named, they are joined through ssh
        accepted = f"ip saddr {lab.address(254)} accept; ct state established,related accept"
        lab.nft(2, f"table inet t {{ chain c {{ type filter hook input priority 0; {accepted}; drop; }}; }}\n")
    job = runs.SHORT.replace("mlp", "mine.py:net") if fault == "file" else runs.SHORT
    refused("launch", job, given, "--out run", says=says, code=2 if fault == "program" else 3, by=forked)
    runs.gone(lab)


OWN_SCRIPT = """\
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


@pytest.mark.slow
def test_three_hosts_run_a_script_and_the_first_cause_is_reported(lab, here):
    (here / "train.py").write_text(OWN_SCRIPT)
    ended = done("launch train.py", runs.hosts(lab), "--out run -- --lr 0.1")
    # n1 is another machine than the head: what rank 0 writes comes from there.
    assert ended.out.splitlines()[-1] == "n1 0 0 --lr 0.1 3"
    assert "n3 2 2 --lr 0.1 3" in done("logs run").out
    runs.gone(lab)
    cause = ("manyhands: ValueError: no more pictures", "where: rank 2 on n3")
    done("launch train.py", runs.hosts(lab), "--sync-code --out more -- fail", code=1, says=cause)
    runs.gone(lab)

"""One job on three hosts, over real ssh: what it learns, how it ends, and what it leaves behind."""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import (
    NETS,
    QUICK,
    assert_equal_weights,
    assert_one_screen,
    events,
    final_weights,
    finish,
    metrics,
    read,
    wait_until,
)
from tests.network.lab import Lab
from tests.network.runs import (
    ENDLESS,
    EXACT,
    SHORT,
    agents,
    assert_same_updates,
    begun,
    gone,
    hosts,
    machines,
    run,
    running,
    strike,
    undisturbed,
)

pytestmark = pytest.mark.timeout(400)


def SLOW(*values):  # noqa: N802 - it stands where a mark would
    return pytest.param(*values, marks=pytest.mark.slow)


def last_evaluation(folder):
    return metrics(folder, "evaluation")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False], ids=["started"])
def test_three_hosts_do_what_three_processes_here_do(lab, here):
    """Also where the head may pass on what they send each other: they reach each other."""
    ended = run("launch", *SHORT, *hosts(lab), "--relay", "--out", "far", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["status"] == "finished"
    assert "3 processes on n1, n2, n3" in ended.err
    for host in lab.hosts:
        assert f"n{host} {lab.address(host)} (eth0)" in ended.err
    assert "each process listens on free ports of its machine's address" in ended.err
    assert "unencrypted" in ended.err
    assert [entry["ranks"] for entry in read("far", "machines.json")] == [[0, 1], [1, 1], [2, 1]]
    averages = read("far", "plan.json")["averages"]
    assert averages == "gradients are averaged by gloo: the processes are on several machines"
    # Shared memory adds three numbers up in another order.
    assert_equal_weights(final_weights("far"), undisturbed(*SHORT, "-n", "3", "--set", "parallel.shared_memory=false"))
    gone(lab)


@pytest.mark.slow
def test_two_processes_on_each_of_two_hosts_do_what_one_does(lab, here):
    job = [*SHORT, *EXACT]
    ended = run("launch", *job, *hosts(lab, 2, 2), "--out", "far", "--set", "train.max_steps=30")
    assert ended.code == 0, ended.err
    (told,) = events("far", "averaging")
    assert told["message"].startswith("gradients are averaged in two levels")
    assert read("far", "plan.json")["averages"] == told["message"]
    resumed = run("resume", "far", "--set", "train.max_steps=0")
    assert resumed.code == 0, resumed.err
    assert events("far", "averaging")[-1]["message"] == told["message"]
    assert_same_updates("far", undisturbed(*job, "-n", "1"))
    gone(lab)


def lose_checkpoints(lab, host, place):
    """Another disk than the one that the host had."""
    lab.start(host, prepare=f"mount -t tmpfs none {place}")


@pytest.mark.slow
def test_two_heads_do_not_share_a_run_folder_elsewhere(lab, here):
    """The lock lies on the machine that holds the folder; what a stopped run saved stays its own."""
    place, (one, two) = here / "far", (here / "one", here / "two")
    for folder in (place, one, two):
        folder.mkdir()
    names = [f"root@{lab.address(1)}", "n2"]  # both machines share the folder, and neither is the head's
    where = ["--hosts", ",".join(names), "--cluster.ssh", lab.ssh, "--cluster.workdir", place, "--out", "run"]
    with running("launch", *ENDLESS, *where, cwd=one) as process:
        wait_until(begun(one / "run"), process)
        second = run("launch", *SHORT, *where, cwd=two)
        assert second.code == 2, second.err
        assert f"a run is active in {lab.address(1)}:{place}/run" in second.err
        assert_one_screen(second.err)
        process.send_signal(signal.SIGINT)
        assert finish(process).code == 75
    third = run("launch", *SHORT, *where, cwd=two)
    assert third.code == 2, third.err
    assert f"the folder {place}/run on {lab.address(1)} belongs to a different run than run" in third.err
    assert f"scp -r root@{lab.address(1)}:{place}/run run" in third.err
    assert_one_screen(third.err)


@pytest.mark.slow
def test_unequal_machines_without_a_shared_disk(lab, here):
    """The hosts' work folders are their own; records come to the head, checkpoints stay, and a resumed run goes on."""
    place = Path("/srv/manyhands-test")
    place.mkdir(parents=True, exist_ok=True)
    for host in lab.hosts:
        lab.start(host, prepare=f"mount -t tmpfs none {place}")
    where = [*hosts(lab, 2, 1), "--cluster.workdir", place]
    # Two levels add numbers up in another order than one machine's processes by gloo, which this is compared with.
    by_gloo = ["--set", "parallel.shared_memory=false"]
    first = run("launch", *SHORT, *where, "--out", "run", "--set", "train.max_steps=30", *by_gloo)
    assert first.code == 0, first.err
    assert not Path("run/checkpoints").exists()
    assert not (place / "run").exists()
    assert Path("run/env.json").is_file()
    assert events("run", "finished")
    shown = run("logs", "run", "--rank", "2")
    assert shown.code == 0, shown.err
    assert not shown.err
    evaluated = run("eval", "run")
    assert evaluated.code == 2
    assert f"scp -r n1:{place}/run/checkpoints run/" in evaluated.err
    second = run("resume", "run", "--set", "train.max_steps=0")
    assert second.code == 0, second.err
    assert [event["step"] for event in events("run", "resumed")] == [30]
    # Gradients that several machines average are added up in another order than those of one.
    undisturbed(*SHORT, "-n", "3", *by_gloo)
    for name in ("metrics", "events"):
        assert Path(f"run/{name}.jsonl").read_text().count("\n") > 3
    evaluated = last_evaluation("run")
    lose_checkpoints(lab, 1, place)
    beyond = run("resume", "run", "--epochs", "5")  # the second host has a copy of each checkpoint
    assert beyond.code == 0, beyond.err
    for host in lab.hosts:
        lose_checkpoints(lab, host, place)
    lost = run("resume", "run", "--epochs", "7")
    assert lost.code == 2
    assert "n1 has no checkpoint of" in lost.err
    assert "the last checkpoint was saved at step" in lost.err
    whole = last_evaluation("whole")
    assert evaluated["loss"] == whole["loss"]
    gone(lab)
    shutil.rmtree(place)


@pytest.mark.slow
def test_the_failing_ranks_own_error_is_shown_from_whichever_machine(lab, here):
    ended = run("launch", "digits", f"{NETS}:Raises", "--epochs", "50", *QUICK, *hosts(lab), "--out", "run")
    assert ended.code == 1
    assert 'KeyError: "the user\'s own mistake"' in ended.err
    assert "rank 1 on n2" in ended.err
    assert_one_screen("\n".join(line for line in ended.err.splitlines() if "rror" not in line or "manyhands" in line),
                      most=30)  # fmt: skip
    gone(lab)


@pytest.mark.parametrize("number", [SLOW(signal.SIGUSR1), SLOW(signal.SIGHUP), SLOW(signal.SIGKILL)])
def test_whatever_ends_the_launcher_ends_all(number, lab, here):
    with running("launch", *ENDLESS, *hosts(lab), "--out", "run") as process:
        wait_until(begun(), process)
        assert len(agents(lab)) >= 9  # on each host: the agent, its worker, and the process that waits for both
        process.send_signal(number)
        ended = finish(process)
    gone(lab)
    assert ended.code == (-9 if number == signal.SIGKILL else 75), ended.err
    # The workers were asked to save in each case, and had the time to.
    assert events("run", "saved")


def loads_torch(lab):
    """True while an agent in some host imports torch."""
    for pid in [pid for host in lab.hosts for pid in lab.processes(host)]:
        with contextlib.suppress(psutil.Error, OSError):
            if any("libtorch" in entry.path for entry in psutil.Process(pid).memory_maps()):
                return True
    return False


@pytest.mark.slow
def test_machines_hear_of_a_stop_while_they_import_torch(here):
    with Lab(hosts=2) as lab, running("launch", *ENDLESS, *hosts(lab), "--out", "run") as process:
        wait_until(lambda: loads_torch(lab), process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
        gone(lab)
    assert ended.code == 130, ended.err
    assert "stopping before training has begun" in ended.err
    assert "stopped before anything was saved" in ended.err


@pytest.mark.parametrize(("how", "host"), [SLOW("kill", 1), SLOW("down", 2)])
def test_run_continues_on_the_remaining_machines(how, host, lab, here):
    job = ["digits", "mlp", "--epochs", "40", "--set", "train.evaluate_every=40", *QUICK, *EXACT]
    with running("launch", *job, "--set", "checkpoint.every=40steps", *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        strike(lab, host, how)
        ended = finish(process)
        gone(lab)
    assert ended.code == 0, ended.err
    assert f"WARNING n{host} is lost" in ended.err
    (again,) = events("run", "restarted")
    (resumed,) = events("run", "resumed")
    assert again["step"] == resumed["step"]
    assert len(machines()) == 2
    assert_same_updates("run", undisturbed(*job))


@pytest.mark.parametrize(("rank", "way"), [SLOW(3, ()), SLOW(0, ("--interface", "ssh"))], ids=["plain", "through ssh"])
def test_a_killed_process_among_two_on_each_host_is_heard_of_by_all(rank, way, lab, here):
    """Also where only ssh joins the hosts; from its last whole update on the run makes the updates of one process."""
    job = ["digits", "mlp", "--epochs", "40", "--set", "train.evaluate_every=40", *QUICK, *EXACT]
    with running(
        "launch", *job, "--set", "checkpoint.every=40steps", *hosts(lab, 2, 2), *way, "--out", "run"
    ) as process:
        wait_until(begun(kind="saved"), process)
        os.kill(read("run", "env.json")["ranks"][rank]["pid"], signal.SIGKILL)
        ended = finish(process)
        gone(lab)
    assert ended.code == 0, ended.err
    assert len(events("run", "restarted")) == 1
    assert len(events("run", "averaging")) == 2
    assert_same_updates("run", undisturbed(*job))


@pytest.mark.parametrize("how", [SLOW("kill"), SLOW("down"), SLOW("agent")])
def test_lost_machine_is_named_and_the_run_resumes_later(how, lab, here):
    job = [*ENDLESS, "--set", "checkpoint.every=20steps", *hosts(lab), "--elastic", "off"]
    with running("launch", *job, "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        strike(lab, 3, how)
        ended = finish(process)
        gone(lab)
    assert ended.code == 1
    assert "n3 is lost" in ended.err
    assert "manyhands resume run" in ended.err
    assert_one_screen(ended.err)
    if how != "agent":
        lab.up(3)
    if how == "kill":
        lab.start(3)
    saved = events("run", "saved")[-1]["step"]
    again = run("resume", "run", "--set", f"train.max_steps={saved + 30}")
    assert again.code == 0, again.err
    assert events("run", "resumed")[-1]["step"] == saved


@pytest.mark.slow
def test_ssh_on_ports_of_their_own(lab, here):
    """Rented machines: a port in the address, one in ~/.ssh/config, and one that is asked about."""
    lab.start(1, port=31234)
    lab.start(2, port=2222)
    with lab.ssh_config.open("r+") as config:
        usual = config.read()
        config.seek(0)
        config.write(f"Host box\n  HostName {lab.address(2)}\n  Port 2222\n{usual}")
    job = [*SHORT, "--set", "train.max_steps=3", "--cluster.ssh", lab.ssh]
    asked = run("launch", *job, "--hosts", f"root@{lab.address(1)}:31234,box", "--out", "run")
    assert asked.code == 2
    assert f"root@{lab.address(1)}:31234 is ambiguous: 31234 may be an ssh port or a number of processes" in asked.err
    assert f"ssh://root@{lab.address(1)}:31234" in asked.err
    assert_one_screen(asked.err)
    ended = run("launch", *job, "--hosts", f"ssh://root@{lab.address(1)}:31234,box", "--out", "run")
    assert ended.code == 0, ended.err
    assert f"2 processes on {lab.address(1)}:31234, box" in ended.err
    assert [entry["port"] for entry in read("run", "machines.json")] == [31234, 0]


@pytest.mark.slow
def test_misleading_names_and_interfaces_do_no_harm(lab, here):
    """A name on loopback as Debian has it, a container bridge that all have, and a default route that leads nowhere."""
    for host in lab.hosts:
        lab.add_dummy(host, "docker0", "172.17.0.1/16", default=True)
        names = "\n".join(f"{lab.address(other)} n{other}" for other in lab.hosts if other != host)
        lab.set_names(host, f"127.0.0.1 localhost\n127.0.1.1 n{host}\n{names}\n")
    ended = run("launch", *SHORT, *hosts(lab), "--out", "run")
    assert ended.code == 0, ended.err
    assert "docker0" not in next(line for line in ended.err.splitlines() if "network: " in line)


@pytest.mark.slow
def test_a_network_of_ipv6_alone(here):
    with Lab(hosts=2, ipv6_only=True) as lab:
        ended = run("launch", *SHORT, *hosts(lab), "--out", "run")
        assert ended.code == 0, ended.err
        assert lab.address(1) in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False], ids=["started"])
def test_code_travels_when_asked(lab, here):
    """The user's own network, from a folder that the other machines don't have."""
    place = Path("/srv/manyhands-code")
    place.mkdir(parents=True, exist_ok=True)
    (here / "mine.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    for host in lab.hosts:
        lab.start(host, prepare=f"mount -t tmpfs none {place}", environment={"MANYHANDS_CACHE": str(place / "cache")})
    job = ["digits", "mine.py:net", "--epochs", "1", *QUICK, *hosts(lab), "--cluster.workdir", place]
    ended = run("launch", *job, "--out", "run", "--sync-code")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        SLOW("down", ["n2 can't be reached"]),
        ("program", ["ssh-of-mine can't be started"]),
        ("file", ["mine.py is missing in", "--sync-code"]),
        SLOW("unknown", ["nowhere can't be resolved to an address"]),
        SLOW("python", ["n1 has no Python with manyhands", "--cluster.python"]),
        SLOW("firewall", ["n2"]),
    ],
)
def test_a_machine_that_cannot_take_part_is_named_before_anything_starts(fault, wanted, lab, here):
    given = hosts(lab)
    if fault == "down":
        lab.down(2)
    elif fault == "program":
        given = [*given[:2], "--cluster.ssh", "ssh-of-mine"]
    elif fault == "unknown":
        given[1] += ",nowhere"
    elif fault == "python":
        bare = here / "bare-python"
        bare.write_text('#!/bin/sh\nexec env -u PYTHONPATH /usr/bin/python3 -S "$@"\n')
        bare.chmod(0o755)
        given = ["--hosts", "n1", *given[2:], "--cluster.python", bare]
    elif fault == "firewall":
        given += ["--interface", "eth0"]  # where none is named, they are joined through ssh
        accepted = f"ip saddr {lab.address(254)} accept; ct state established,related accept"
        lab.nft(2, f"table inet t {{ chain c {{ type filter hook input priority 0; {accepted}; drop; }}; }}\n")
    job = ["digits", "mine.py:net", *SHORT[2:]] if fault == "file" else SHORT
    ended = run("launch", *job, *given, "--out", "run")
    assert ended.code == (2 if fault == "program" else 3), ended.err
    assert_one_screen(ended.err)
    for words in wanted:
        assert words in ended.err
    gone(lab)


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
def test_three_hosts_run_the_script(lab, here):
    (here / "train.py").write_text(OWN_SCRIPT)
    ended = run("launch", "train.py", *hosts(lab), "--out", "run", "--", "--lr", "0.1")
    assert ended.code == 0, ended.err
    # n1 is another machine than the head: what rank 0 writes comes from there.
    assert ended.out.splitlines()[-1] == "n1 0 0 --lr 0.1 3"
    logs = run("logs", "run")
    assert "n3 2 2 --lr 0.1 3" in logs.out, logs
    gone(lab)


@pytest.mark.slow
def test_first_cause_on_another_machine_is_reported(lab, here):
    (here / "train.py").write_text(OWN_SCRIPT)
    ended = run("launch", "train.py", *hosts(lab), "--sync-code", "--out", "run", "--", "fail")
    assert ended.code == 1
    assert "manyhands: ValueError: no more pictures" in ended.err
    assert "where: rank 2 on n3" in ended.err
    gone(lab)

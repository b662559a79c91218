"""Machines that only ssh reaches: joined straight, by way of one of them, or by way of the head."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from filelock import FileLock, Timeout

from manyhands.core.scratch import ALIVE
from tests.e2e.command import assert_equal_weights, done, events, final_weights, finish, read, training, wait_until
from tests.network.lab import Lab
from tests.network.runs import ENDLESS, LONG, SHORT, begun, gone, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PORT = 31234


# What three processes here do that average by gloo, as those of several machines do.
ALONE = "-n 3 --set parallel.shared_memory=false"


@pytest.fixture(scope="module")
def rented():
    """Three hosts whose sshd listens on an odd port, and that let nothing else in."""
    with Lab(3) as lab:
        for host in lab.hosts:
            lab.start(host, port=PORT)
        yield lab


def let_in(lab, host, others):
    """Only these may log in; 254 is the laptop."""
    rules = "".join(f"ip saddr {lab.address(other)} tcp dport {PORT} accept\n" for other in others)
    lab.nft(
        host,
        "flush ruleset\ntable inet walls { chain input { type filter hook input priority 0; policy drop;\n"
        f"iifname lo accept\ntcp sport {PORT} accept\n{rules}}}\n}}\n",
    )


def hosts(lab):
    return ["--hosts", ",".join(f"ssh://{name}:{PORT}" for name in lab.names), "--cluster.ssh", lab.ssh]


def nothing_left(lab):
    gone(lab)
    wait_until(lambda: not any(map(is_abandoned, Path(tempfile.gettempdir()).glob("manyhands-way-*"))), patience=30)


def is_abandoned(folder):
    """Returns True if no process has locked the folder. The folders of concurrent tests are locked."""
    with contextlib.suppress(OSError, Timeout):
        if (folder / ALIVE).exists():
            with FileLock(folder / ALIVE, timeout=0):
                pass
        return folder.exists()
    return False


def test_launcher_relays_if_requested(rented, here):
    for host in rented.hosts:
        let_in(rented, host, [254])
    done("launch", SHORT, hosts(rented), "--out refused", code=2, says="--relay")
    done("launch", SHORT, hosts(rented), "--relay --out far", says="through this machine")
    assert_equal_weights(final_weights("far"), undisturbed(SHORT, ALONE))
    assert [entry["port"] for entry in read("far", "machines.json")] == [PORT] * 3
    nothing_left(rented)


def laptop_bytes(lab):
    """What the laptop itself has sent and received; what the bridge hands on from host to host isn't among it."""
    counters = psutil.net_io_counters(pernic=True)[f"{lab.prefix}br"]
    return counters.bytes_sent + counters.bytes_recv


def test_machines_that_let_each_other_in_need_no_head_between(rented, here):
    """With a network of some size, so that its gradients are nearly all that goes from anywhere to anywhere."""
    for host in rented.hosts:
        let_in(rented, host, [254, *rented.hosts])
    before = laptop_bytes(rented), sum(map(rented.sent_bytes, rented.hosts))
    large = "--set model.arguments={hidden=2048,depth=2} --set train.max_steps=30"
    tunnels = "ssh tunnels between machines: n1:31234–n2:31234, n1:31234–n3:31234, n2:31234–n3:31234 directly"
    done("launch", SHORT, large, hosts(rented), "--out far", says=("trying ssh between the machines", tunnels))
    carried, sent = laptop_bytes(rented) - before[0], sum(map(rented.sent_bytes, rented.hosts)) - before[1]
    assert carried < 0.01 * sent, (carried, sent)
    nothing_left(rented)


def tunnels(lab, host):
    """Processes that hold one, on a host."""
    found = []
    for pid in lab.processes(host):
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(pid).cmdline()
            if Path(words[0] if words else "").name == "ssh":
                found.append(pid)
    return found


def test_a_machine_of_the_run_passes_on_and_a_lost_tunnel_is_dug_anew(rented, here):
    """Only n2 lets the others in; to the weights of a run that nothing happened to."""
    let_in(rented, 1, [254])
    let_in(rented, 2, [254, 1, 3])
    let_in(rented, 3, [254])
    steps = "--set train.max_steps=200 --set checkpoint.every=50steps"
    with training("launch", LONG, steps, hosts(rented), "--out far") as process:
        wait_until(begun("far"), process)
        os.kill(tunnels(rented, 1)[0], signal.SIGKILL)
        finish(process, code=0, says="n1:31234–n3:31234 through n2:31234")
    (again,) = events("far", "restarted")
    assert "tunnel" in again["message"]
    nothing_left(rented)
    assert_equal_weights(final_weights("far"), undisturbed(LONG, steps, ALONE))


def test_a_head_that_is_killed_leaves_no_tunnel(rented, here):
    for host in rented.hosts:
        let_in(rented, host, [254, *rented.hosts])
    with training("launch", ENDLESS, hosts(rented), "--interface ssh --out far") as process:
        wait_until(begun("far"), process)
        process.kill()
        finish(process)
    nothing_left(rented)

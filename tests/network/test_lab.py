"""The hosts that other tests stand on are what they say, and nothing of them is left behind."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.network.lab import Lab

SEND = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0)); print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept(); received = 0
while part := connection.recv(65536): received += len(part)
connection.sendall(b"%d" % received)
"""


def over_ssh(lab, host, command, **options):
    return subprocess.run(
        [*shlex.split(lab.ssh), lab.name(host), command], capture_output=True, text=True, timeout=120, **options
    )


def test_each_host_has_its_own_name_address_and_interfaces(calm_lab):
    for host in calm_lab.hosts:
        said = over_ssh(calm_lab, host, "hostname; ip -br -4 addr show eth0; echo $SSH_CONNECTION", check=True).stdout
        assert said.splitlines()[0] == f"n{host}"
        assert f"{calm_lab.address(host)}/24" in said.splitlines()[1]
        assert said.splitlines()[2].startswith(f"{calm_lab.address(254)} ")


def test_hosts_find_each_other_by_name_and_have_their_own_ssh(calm_lab):
    inner = f"python -c 'import socket; print(socket.gethostbyname(\"n2\"))'; {calm_lab.ssh} n2 hostname"
    said = over_ssh(calm_lab, 1, inner, check=True).stdout
    assert said.splitlines() == [calm_lab.address(2), "n2"]


def test_a_session_finds_this_checkout(calm_lab):
    command = "import manyhands, os; print(manyhands.__file__, os.environ['OMP_NUM_THREADS'])"
    said = over_ssh(calm_lab, 3, f'{calm_lab.python} -c "{command}"', check=True).stdout
    assert said.split() == [str(Path(__file__).parents[2] / "src/manyhands/__init__.py"), "1"]


def test_processes_started_in_a_host_have_its_name(calm_lab):
    assert calm_lab.run(2, ["uname", "-n"]) == "n2\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sent", "received"])
def test_a_rate_limits_only_the_way_it_is_set_for(lab, way):
    lab.rate(1, "1mbit", ways=(way,))
    limited, other = ((1, 2), (2, 1)) if way == "sent" else ((2, 1), (1, 2))
    assert seconds_of(lab, *limited, 250_000) > 5 * seconds_of(lab, *other, 250_000)
    lab.rate(1, None)
    assert lab.run(1, ["tc", "qdisc", "show", "dev", "eth0"]).find("tbf") == -1


def seconds_of(lab, sender, receiver, count):
    """How long a transfer takes until its last byte is acknowledged; also checks the counters."""
    before = lab.sent_bytes(sender), lab.received_bytes(receiver)
    listener = lab.exec(
        receiver, [sys.executable, "-c", SEND, lab.address(receiver)], stdout=subprocess.PIPE, text=True
    )
    port = listener.stdout.readline().strip()
    program = (
        "import socket, sys, time; c = socket.create_connection((sys.argv[1], int(sys.argv[2]))); t = time.monotonic();"
        f"c.sendall(bytes({count})); c.shutdown(1); n = c.recv(99); print(int(n), time.monotonic() - t)"
    )
    received, seconds = lab.run(sender, [sys.executable, "-c", program, lab.address(receiver), port]).split()
    listener.communicate()
    assert int(received) == count
    assert lab.sent_bytes(sender) - before[0] >= count
    assert lab.received_bytes(receiver) - before[1] >= count
    return float(seconds)


@pytest.mark.slow
def test_a_pulled_cable_a_firewall_and_a_death(lab):
    lab.down(1)
    assert not answers(lab, 2, 1)
    lab.up(1)
    assert answers(lab, 2, 1)
    lab.nft(1, "table inet t { chain c { type filter hook input priority 0; tcp dport 22 reject with tcp reset; }; }\n")
    assert not answers(lab, 2, 1)
    sleeper = lab.exec(3, ["sleep", "1000"])
    lab.kill(3)
    assert sleeper.wait(60) == -9
    assert lab.processes(3) == []
    assert not answers(lab, 2, 3)
    lab.up(3)
    lab.start(3)
    assert answers(lab, 2, 3)


def answers(lab, asking, host):
    program = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1.5).recv(4)"
    asked = lab.exec(asking, [sys.executable, "-c", program, lab.address(host)], stderr=subprocess.DEVNULL)
    return asked.wait(20) == 0


def test_names_interfaces_and_mounts_can_be_planted(lab):
    lab.set_names(1, "127.0.1.1 n1\n")
    assert "127.0.1.1" in over_ssh(lab, 1, "getent hosts n1", check=True).stdout
    lab.add_dummy(1, "docker0", "172.17.0.1/16", default=True)
    assert "dev docker0" in over_ssh(lab, 1, "ip route show default", check=True).stdout
    lab.start(2, prepare="mount -t tmpfs -o size=1M tmpfs /mnt", environment={"COLOUR": "blue with spaces"})
    assert over_ssh(lab, 2, "df --output=size /mnt; echo $COLOUR", check=True).stdout.split() == [
        "1K-blocks", "1024", "blue", "with", "spaces",
    ]  # fmt: skip
    assert "1024" not in over_ssh(lab, 1, "df --output=size /mnt", check=True).stdout


def test_a_lab_without_ipv4():
    with Lab(hosts=2, ipv6_only=True) as lab:
        assert over_ssh(lab, 1, "ip -br -4 addr show eth0", check=True).stdout == ""
        assert over_ssh(lab, 1, f"{lab.ssh} n2 hostname", check=True).stdout == "n2\n"


def test_two_labs_at_once_are_apart_and_leave_nothing():
    interfaces, namespaces = listed_interfaces(), listed_namespaces()
    with Lab(hosts=2) as one, Lab(hosts=2) as other:
        assert one.prefix != other.prefix
        assert {over_ssh(lab, 1, "hostname", check=True).stdout for lab in (one, other)} == {"n1\n"}
        prefixes, folders = (one.prefix, other.prefix), (one.folder, other.folder)
        # A process that has left its session and ignores polite signals must go too.
        stubborn = "trap '' TERM HUP INT; setsid sleep 1000 & wait"
        shell = one.exec(1, ["sh", "-c", stubborn])
        wait_until(lambda: any("sleep" in name_of(pid) for pid in one.processes(1)))
        pids = one.processes(1) + other.processes(2)
        assert len(pids) > 2
    assert shell.wait(20) == -9
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not {name for name in listed_interfaces() - interfaces if name.startswith(prefixes)}
    assert not {name for name in listed_namespaces() - namespaces if name.startswith(prefixes)}
    assert not [path for path in Path("/etc/netns").iterdir() if path.name.startswith(prefixes)]
    assert not [folder for folder in folders if folder.exists()]


def test_a_lab_that_breaks_while_it_is_made_leaves_nothing(monkeypatch):
    made = []
    monkeypatch.setattr(Lab, "_wait_for_sshd", lambda self, _host: made.append(self.prefix) or 1 / 0)
    with pytest.raises(ZeroDivisionError), Lab(hosts=1):
        pass
    assert made
    assert not [name for name in [*listed_interfaces(), *listed_namespaces()] if name.startswith(made[0])]


def test_the_next_lab_removes_that_of_a_process_that_was_killed():
    program = [sys.executable, "-m", "tests.network.lab", "--hosts", "1"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as owner:
        folder = Path(owner.stdout.readline().split()[2]).parent
        owner.kill()
    assert folder.exists()
    before = listed_interfaces()
    with Lab(hosts=1):
        assert not folder.exists()
    gone = before - listed_interfaces()
    assert {name[6:] for name in gone} >= {"br", "v1"}


def name_of(pid):
    """Empty where it has ended since it was listed."""
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""


def listed_interfaces():
    return {path.name for path in Path("/sys/class/net").iterdir()}


def listed_namespaces():
    return {line.split()[0] for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()}


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""What a process that joins takes: its interface, device and neighbors; and what it says of them."""

import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group import join as group
from manyhands.parallel.group import ports
from manyhands.parallel.group.join import _with_local_rank

LOOPBACK = ports.loopback_interface()
HERE, THERE = {"machine": "a", "addresses": ["192.0.2.1"]}, {"machine": "b", "addresses": ["192.0.2.2"]}


@pytest.fixture
def shell(monkeypatch):
    for name in (*group.IFNAMES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_processes_of_one_machine_listen_on_loopback_whatever_the_shell_names(shell):
    for name in group.IFNAMES:
        shell.setenv(name, "eth7")
    process_info = ProcessInfo(0, 2, init="env://")
    assert group.choose_interface(process_info, {0: HERE, 1: HERE}) == LOOPBACK
    assert {group.os.environ[name] for name in group.IFNAMES} == {LOOPBACK}
    assert not group.describe_open_ports(process_info, LOOPBACK)


def test_between_machines_the_shells_word_counts(shell):
    shell.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    process_info = ProcessInfo(0, 2, init="tcp://127.0.0.1:1", started_by="--init")
    assert group.choose_interface(process_info, {0: HERE, 1: THERE}) == LOOPBACK
    shell.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(UserError, match='GLOO_SOCKET_IFNAME names "eth7", but this machine has'):
        group.choose_interface(process_info, {0: HERE, 1: THERE})


@pytest.mark.parametrize("started_by", ["--init", "met", "environment"])
def test_each_machine_says_what_its_processes_have_open(started_by):
    interfaces = {name: entries for name, entries in psutil.net_if_addrs().items() if name != LOOPBACK}
    if not interfaces:
        pytest.skip("this machine has no interface but loopback")
    for name, entries in interfaces.items():
        (line,) = group.describe_open_ports(ProcessInfo(1, 2, init="file:///x", started_by=started_by), name)
        assert f"listen on free ports of {name}" in line
        assert all(entry.address in line for entry in entries if entry.family == socket.AF_INET)
    assert not group.describe_open_ports(ProcessInfo(1, 2, local_rank=1, started_by=started_by), name)


@pytest.mark.parametrize(("rank", "wanted"), [(0, (0, 2)), (1, (0, 1)), (2, (1, 2))])
def test_processes_that_met_by_hand_count_their_neighbors(rank, wanted):
    machines = enumerate(["here", "there", "here"])
    present = {number: {"machine": machine} for number, machine in machines}
    found = _with_local_rank(ProcessInfo(rank=rank, size=3), present)
    assert (found.local_rank, found.local_size) == wanted


NO_LOCKS = "import sys; sys.modules['fcntl'] = None\n"


@pytest.mark.parametrize(
    "code",
    [
        "from manyhands.cli.main import main\nmain(['train'])",
        "from manyhands.cli.main import main\nmain(['--help'])",
        "import manyhands\ntry:\n    manyhands.fit\nexcept manyhands.UserError as error:\n"
        "    sys.exit('manyhands: ' + str(error))",
    ],
)
def test_a_system_without_locks_of_files_is_one_line(code):
    """As on Windows, where Python has no fcntl."""
    done = subprocess.run([sys.executable, "-c", NO_LOCKS + code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("manyhands: manyhands runs on Linux, macOS and WSL2 on Windows")
    assert len(done.stderr.splitlines()) <= 3


def with_apples_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="mps"))


@pytest.mark.parametrize("kind", ["mps", "mps:0", "mps:1"])
def test_a_machine_without_apples_gpu_says_so(kind, monkeypatch):
    if kind == "mps:1":
        with_apples_gpu(monkeypatch)
    with pytest.raises(UserError, match="there is no mps:1" if kind == "mps:1" else "this machine has no mps device"):
        group.join(ProcessInfo(device=kind), "", 60, print)


def test_apples_gpu_is_for_one_process(monkeypatch):
    """Read, not run: nobody here has such a computer; what is decided for one is."""
    with_apples_gpu(monkeypatch)
    assert (
        group._choose_device(ProcessInfo(device="mps:0")) == group._choose_device(ProcessInfo(device="auto")) == "mps"
    )
    pair = ProcessInfo(size=2, local_size=2, device="mps")
    with pytest.raises(UserError, match="2 processes can't communicate on mps"):
        group._choose_device(pair)
    assert group._choose_device(ProcessInfo(size=2, local_size=2, device="auto")) == "cpu"

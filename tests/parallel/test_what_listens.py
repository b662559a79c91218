"""What a process that joins takes: its interface, device and neighbors; what it says of them, and to whom it listens.

Listeners refuse new connections once all ranks have connected, and drop connections of strangers.
"""

import contextlib
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
from manyhands.parallel.group.listeners import block_listeners_on_exit, close_rendezvous
from manyhands.run.doctor import describe_public_addresses

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
    assert group.set_collective_interface(process_info, {0: HERE, 1: HERE}) == LOOPBACK
    assert {group.os.environ[name] for name in group.IFNAMES} == {LOOPBACK}
    assert not group.describe_open_ports(process_info, LOOPBACK)


def test_between_machines_the_shells_word_counts(shell):
    shell.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    process_info = ProcessInfo(0, 2, init="tcp://127.0.0.1:1", started_by="--init")
    assert group.set_collective_interface(process_info, {0: HERE, 1: THERE}) == LOOPBACK
    shell.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(UserError, match='GLOO_SOCKET_IFNAME names "eth7", but this machine has'):
        group.set_collective_interface(process_info, {0: HERE, 1: THERE})


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


def test_processes_that_met_by_hand_count_their_neighbors():
    present = {number: {"machine": machine} for number, machine in enumerate(["here", "there", "here"])}
    found = [_with_local_rank(ProcessInfo(rank=rank, size=3), present) for rank in range(3)]
    assert [(one.local_rank, one.local_size) for one in found] == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize(
    "code",
    [
        "from manyhands.cli.main import main\nmain(['train'])",
        "import manyhands\ntry:\n    manyhands.fit\nexcept manyhands.UserError as error:\n"
        "    sys.exit('manyhands: ' + str(error))",
    ],
)
def test_a_system_without_locks_of_files_is_one_line(code):
    """As on Windows, where Python has no fcntl."""
    code = "import sys; sys.modules['fcntl'] = None\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("manyhands: manyhands runs on Linux, macOS and WSL2 on Windows")
    assert len(done.stderr.splitlines()) <= 3


def test_apples_gpu_is_for_one_process_and_a_machine_without_it_says_so(monkeypatch):
    """Read, not run: nobody here has such a computer; what is decided for one is."""
    with pytest.raises(UserError, match="this machine has no mps device"):
        group.join(ProcessInfo(device="mps:0"), "", 60, print)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="mps"))
    assert [group._choose_device(ProcessInfo(device=one)) for one in ("mps:0", "auto")] == ["mps", "mps"]
    with pytest.raises(UserError, match="there is no mps:1"):
        group.join(ProcessInfo(device="mps:1"), "", 60, print)
    with pytest.raises(UserError, match="2 processes can't communicate on mps"):
        group._choose_device(ProcessInfo(size=2, local_size=2, device="mps"))
    assert group._choose_device(ProcessInfo(size=2, local_size=2, device="auto")) == "cpu"


FILTERED = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters on sockets")


def listener():
    return socket.create_server(("127.0.0.1", 0))


def lets_in(one):
    with contextlib.suppress(TimeoutError):
        socket.create_connection(one.getsockname(), timeout=0.3).close()
        return True
    return False


@FILTERED
def test_what_a_group_of_gloo_listens_on_is_closed_and_nothing_else():
    with listener() as before, contextlib.ExitStack() as stack:
        with block_listeners_on_exit("gloo"):
            group = stack.enter_context(listener())
            member = stack.enter_context(socket.create_connection(group.getsockname()))
            other = stack.enter_context(group.accept()[0])
        assert not lets_in(group)
        assert lets_in(before)
        member.sendall(b"gradients")
        assert other.recv(9) == b"gradients"


@FILTERED
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_what_connects_later_stays_open(backend):
    with contextlib.ExitStack() as stack:
        with block_listeners_on_exit(backend):
            group = stack.enter_context(listener())
        assert lets_in(group)


def connected(store, own):
    one = socket.create_connection(store.getsockname(), source_address=(own, 0))
    return one, store.accept()[0]


@FILTERED
@pytest.mark.parametrize(("members", "leaves"), [([], True), ([["127.0.0.3"]], True), ([["198.51.100.1"]], False)])
def test_who_does_not_belong_goes_where_all_who_do_are_seen(members, leaves):
    """A member behind another address can't be distinguished from a stranger, so no connection is dropped."""
    with listener() as store, contextlib.ExitStack() as stack:
        own, member, stranger = [
            [stack.enter_context(end) for end in connected(store, address)]
            for address in ("127.0.0.1", "127.0.0.3", "127.0.0.2")
        ]
        close_rendezvous(store.getsockname()[1], [*members, *([["127.0.0.3"]] if leaves else [])])
        assert not lets_in(store)
        stranger[0].settimeout(0.3)
        if leaves:
            assert stranger[0].recv(1) == b""
        else:
            with pytest.raises(TimeoutError):
                stranger[0].recv(1)
        for one, other in (own, member):
            one.sendall(b"x")
            assert other.recv(1) == b"x"


def test_public_addresses_are_distinguished_from_private_ones():
    private = ["10.0.0.1", "192.168.1.4", "172.20.1.1", "100.64.3.2", "fd00::1", "127.0.0.1"]
    assert not describe_public_addresses({str(n): ("eth0", address) for n, address in enumerate(private)})
    for address in ("8.8.8.8", "2001:4860:4860::8888"):
        assert f"n2 at {address}" in describe_public_addresses({"n1": ("eth0", "10.0.0.1"), "n2": ("eth0", address)})

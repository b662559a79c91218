"""Which interface collectives listen on, and what is said of it."""

import socket

import psutil
import pytest

from manyhands.core.errors import UserError
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group import join as group
from manyhands.parallel.group import ports

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
    assert not group.what_listens(process_info, LOOPBACK)


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
        (line,) = group.what_listens(ProcessInfo(1, 2, init="file:///x", started_by=started_by), name)
        assert f"listen on free ports of {name}" in line
        assert all(entry.address in line for entry in entries if entry.family == socket.AF_INET)
    assert not group.what_listens(ProcessInfo(1, 2, local_rank=1, started_by=started_by), name)

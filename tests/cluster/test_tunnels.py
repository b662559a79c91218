"""Switchboards and tunnels, with commands of our own in the place of ssh: what goes in comes out where it should."""

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from manyhands.cluster.agents import tunnel
from manyhands.cluster.agents.switchboard import READY
from manyhands.cluster.agents.tunnel import ChildProcesses, MachineTunnels
from manyhands.core.errors import RunError
from manyhands.parallel.group.tunnel_ends import request_tunnel
from tests.e2e.command import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on loopback")

ONE, TWO = "127.77.3.1", "127.77.3.2"


@pytest.fixture
def ends():
    with contextlib.closing(MachineTunnels()) as tunnels:
        tunnels.open(ONE)
        yield tunnels.ends


def echo_backwards(listener):
    """Takes one connection, and answers what it has read to the end; in a thread that no failure waits for."""

    def serve():
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as come:
            connection.sendall(come.read()[::-1])

    threading.Thread(target=serve, daemon=True).start()


def exchange(connection, sent):
    """Sends all, says that this is all, and gives what comes meanwhile and after."""
    threading.Thread(
        target=lambda: (connection.sendall(sent), connection.shutdown(socket.SHUT_WR)), daemon=True
    ).start()
    with connection.makefile("rb") as come:
        return come.read()


def test_what_listens_on_every_address_of_a_machine_is_not_reached_from_another(ends):
    with socket.create_server(("", 0)) as listener, socket.socket(socket.AF_UNIX) as tunnel:
        echo_backwards(listener)
        tunnel.settimeout(60)
        tunnel.connect(ends.in_socket)
        tunnel.sendall(listener.getsockname()[1].to_bytes(2))
        assert tunnel.recv(1) == b""
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 60) as here:
            assert exchange(here, b"let me in") == b"ni em tel"


def test_more_connections_than_files_may_be_open_close_the_door_only_for_a_while(ends):
    (board,) = (one for one in psutil.Process().children() if ends.folder in one.cmdline())
    usual = resource.prlimit(board.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(board.pid, resource.RLIMIT_NOFILE, (board.num_fds() + 4, usual[1]))
    sent = os.urandom(5_000_000)
    with contextlib.ExitStack() as held:
        for _ in range(8):
            held.enter_context(socket.socket(socket.AF_UNIX)).connect(ends.in_socket)
        time.sleep(1)
    resource.prlimit(board.pid, resource.RLIMIT_NOFILE, usual)
    with socket.create_server((ONE, 0)) as listener:
        echo_backwards(listener)
        with socket.socket(socket.AF_UNIX) as tunnel:
            tunnel.settimeout(60)
            tunnel.connect(ends.in_socket)
            assert exchange(tunnel, listener.getsockname()[1].to_bytes(2) + sent) == sent[::-1]


def test_what_goes_to_another_machines_address_enters_its_tunnel_behind_the_port(ends):
    with socket.socket(socket.AF_UNIX) as ssh:
        ssh.bind(ends.socket_to(TWO))
        ssh.listen()
        echo_backwards(ssh)
        with socket.create_server((TWO, 0)) as free:
            port = free.getsockname()[1]
        request_tunnel(ends, TWO, port)
        request_tunnel(ends, TWO, port)  # asked by a second process
        request_tunnel(ends, ONE, 1)  # its own machine needs nothing
        sent = os.urandom(5_000_000)
        with socket.create_connection((TWO, port), timeout=60) as connection:
            assert exchange(connection, sent) == (port.to_bytes(2) + sent)[::-1]


@pytest.mark.parametrize("address", ["127.77.3.9", "10.0.0.1", "../../etc", "localhost", TWO + "/.."])
def test_nothing_leads_where_no_tunnel_does(ends, address):
    with pytest.raises(RunError, match=r"can't reach .* through ssh"):
        request_tunnel(ends, address, 4711)


def test_two_tunnels_to_one_machine_are_both_watched_and_leave_nothing():
    """One for what two machines send each other, and one for what the other passes on."""
    before = set(psutil.Process().children())
    tunnels = MachineTunnels()
    folder = Path(tunnels.open(""))
    reported = []  # machines would take the silence of a head that waits for its own tunnels for its end
    stays = ["sh", "-c", f'echo hello; echo "{READY}"; exec cat']
    refused = ["sh", "-c", "echo no such host >&2; exit 255"]
    assert not tunnels.start({"n2": stays}, 10.0)
    failed = tunnels.start({"n2": stays, "n3": refused, "n4": ["cat"]}, 1.5, lambda: reported.append(time.monotonic()))
    assert failed == {"n3": "no such host", "n4": ""}
    assert reported[-1] - reported[0] > 0.5
    assert not tunnels.ended()
    min(set(psutil.Process().children()) - before, key=lambda child: child.create_time()).kill()
    assert "the ssh tunnel to n2 ended" in wait_until(tunnels.ended)
    tunnels.close()
    assert not folder.exists()
    assert set(psutil.Process().children()) == before


def test_connection_that_does_not_end_on_request_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tunnel, "TUNNEL_CLOSE_S", 0.3)
    before, tunnels = set(psutil.Process().children()), ChildProcesses(tmp_path)
    deaf = ["sh", "-c", f"trap '' TERM; echo {READY}; while :; do sleep 0.1; done"]
    assert not tunnels.start({"n1": deaf, "n2": deaf}, 10.0)
    began = time.monotonic()
    tunnels.close()
    assert time.monotonic() - began < 10
    assert set(psutil.Process().children()) == before

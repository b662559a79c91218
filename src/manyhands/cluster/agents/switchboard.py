"""A process that passes connections between a machine's workers and the ssh tunnels to other machines.

Started as `python -m manyhands.cluster.agents.switchboard ADDRESS FOLDER`; see `parallel.group.tunnel_ends`. Only this
user can open the sockets in FOLDER. The process connects only to ADDRESS.
"""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from manyhands.core.terminal import show
from manyhands.parallel.group.tunnel_ends import TunnelEnds

READY = "this tunnel of manyhands is open"  # printed by this process, and by the remote end of an open tunnel
BUFFER, BACKLOG = 1 << 18, 1024
AGAIN_S = 0.1  # pause after a connection that could not be accepted


class Switchboard:
    """Forwards connections between one machine's workers and the ssh tunnels to other machines."""

    def __init__(self, ends: TunnelEnds) -> None:
        self._ends = ends
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._asking = threading.Lock()
        _serve(_unix_listener(ends.in_socket), self._handle_tunnel)
        _serve(_unix_listener(ends.request_socket), self._answer)

    def _handle_tunnel(self, tunnel: socket.socket) -> None:
        """Handles a connection from another machine, whose first 2 bytes are the port to connect to."""
        port = int.from_bytes(tunnel.recv(2, socket.MSG_WAITALL))
        if not listens_at(self._ends.address, port):
            raise ConnectionRefusedError(f"no process of the run listens on port {port}")
        _forward(tunnel, socket.create_connection((self._ends.address, port)))

    def _open_outgoing(self, connection: socket.socket, address: str, port: int) -> None:
        tunnel = socket.socket(socket.AF_UNIX)
        tunnel.connect(self._ends.socket_to(address))
        tunnel.sendall(port.to_bytes(2))
        _forward(connection, tunnel)

    def _answer(self, asking: socket.socket) -> None:
        """Handles a worker's request to open a local port that leads to an address and port of another machine."""
        with asking, asking.makefile("rw") as lines:
            try:
                self._listen_for(lines.readline(64))
                lines.write("ok\n")
            except (OSError, ValueError) as error:
                lines.write(f"{error}\n")

    def _listen_for(self, asked: str) -> None:
        address, _, port = asked.strip().partition(" ")
        if not ipaddress.ip_address(address).is_loopback or not Path(self._ends.socket_to(address)).is_socket():
            raise ValueError("there is no ssh tunnel to this address")
        with self._asking:
            if (address, int(port)) not in self._listeners:
                listener = socket.create_server((address, int(port)), backlog=BACKLOG)
                self._listeners[address, int(port)] = listener
                _serve(listener, lambda connection: self._open_outgoing(connection, address, int(port)))


def listens_at(address: str, port: int) -> bool:
    """Returns True if a socket listens on exactly this address, because sockets on 0.0.0.0 don't belong to the run."""
    table = Path("/proc/net/tcp")
    if not table.exists():  # not Linux
        return True
    wanted = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return any(row[1] == wanted and row[3] == "0A" for row in rows)  # the kernel's TCP_LISTEN


def _unix_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def _serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Accepts connections in a thread, and handles each connection in a thread of its own."""

    def handled(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the peer sees the connection end
            handle(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # too many open files, a temporary error
                time.sleep(AGAIN_S)
                continue
            threading.Thread(target=handled, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _forward(one: socket.socket, other: socket.socket) -> None:
    """Copies data in both directions until both directions have ended."""
    with other:
        for end in (one, other):
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(other, one), daemon=True)
        back.start()
        _copy(one, other)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copies data from `source` to `sink`. After an error, shuts down both sockets, so that no peer waits."""
    buffer = memoryview(bytearray(BUFFER))
    try:
        while count := source.recv_into(buffer):
            sink.sendall(buffer[:count])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    Switchboard(TunnelEnds(*sys.argv[1:]))
    show(READY)
    sys.stdin.read()  # until the parent process ends
    os._exit(0)

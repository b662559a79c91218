"""Tests connections between machines and measures their bandwidth; lists the open ports of manyhands.

A listener answers only peers that know its token. So an answer can't come from another program, or from another machine
with the same address. A listener only echoes or counts bytes, and closes after a time limit.
"""

import contextlib
import errno
import hmac
import os
import re
import secrets
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from manyhands.cluster.doctor.findings import Attempt, Reached
from manyhands.cluster.messages import remote
from manyhands.parallel.group.ports import port_holder

TOKEN_BYTES = 16
ECHO, COUNT = b"E", b"C"
READY = b"manyhands\n"
BLOCK_BYTES = 256 * 1024
SEND_BUFFER_BYTES = 512 * 1024  # small, because bytes in flight at the end don't count (slow links)
WARM_UP = 0.25  # share of the time before bytes count: TCP starts slowly, and rate-limited links with a burst
PEER_PATIENCE_S, CONNECT_S = 5.0, 3.0
OPEN_AT_ONCE = 64


@dataclass(frozen=True)
class Listener:
    """A listening port of a machine, or the reason why listening failed."""

    address: str  # of that machine
    port: int = 0  # of the listener
    token: str = ""  # a peer that does not know it gets no answer
    error: str = ""  # the reason why nothing listens; empty if it listens


@dataclass(frozen=True)
class OpenPort:
    """A port on which a process of manyhands listens."""

    address: str  # of this machine; 0.0.0.0 or :: for all of them
    port: int
    pid: int
    lets_in: bool  # True if a connection to it was accepted just now


def _answer_peer(connection: socket.socket, token: bytes) -> None:
    connection.settimeout(PEER_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_receive_exactly(connection, TOKEN_BYTES), token):
        return
    connection.sendall(READY)
    asked = _receive_exactly(connection, 1)
    if asked == ECHO:
        while part := connection.recv(64):
            connection.sendall(part)
    elif asked == COUNT:
        (seconds,) = struct.unpack("!d", _receive_exactly(connection, 8))
        connection.sendall(struct.pack("!dd", *_count_bytes(connection, min(max(seconds, 0.01), 10.0))))
        # Closing with unread bytes would send a reset, which may overtake the answer on its way through ssh.
        while connection.recv(BLOCK_BYTES):
            pass


def _count_bytes(connection: socket.socket, seconds: float) -> tuple[float, float]:
    """Returns (bytes received after a warm-up, seconds that these bytes took)."""
    place, count, since = memoryview(bytearray(BLOCK_BYTES)), 0, 0.0
    start = last = time.monotonic()
    while last - start < seconds or not count:  # on a busy machine the time may be over before
        if not (received := connection.recv_into(place)):
            break
        last = time.monotonic()
        if since:
            count += received
        elif last - start >= seconds * WARM_UP:
            since = last
    return float(count), last - since if since else 0.0


def _connect(target: Listener, timeout_s: float) -> Attempt:
    """Tries to reach a listener and measures the latency of small messages; `timeout_s` limits each answer."""
    local, latency_ms, times = "", None, list[float]()
    result: Reached = "ok"
    try:
        with _open_connection(target, timeout_s) as connection:
            local = connection.getsockname()[0]
            connection.sendall(ECHO)
            for _ in range(5):
                start = time.perf_counter()
                connection.sendall(b".")
                _receive_exactly(connection, 1)
                times.append(time.perf_counter() - start)
            latency_ms = 1000 * statistics.median(times)
    except _WrongPeerError:
        result = "other"
    except OSError as error:
        refused = isinstance(error, (ConnectionRefusedError, ConnectionResetError))
        result = "timeout" if isinstance(error, TimeoutError) else "refused" if refused else "unreachable"
    return Attempt(target.address, result, local, latency_ms, target.port)


class _WrongPeerError(Exception):
    """Raised if the peer that answers does not know the token."""


@contextlib.contextmanager
def _open_connection(target: Listener, timeout_s: float) -> Generator[socket.socket]:
    with socket.create_connection((target.address, target.port), timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.sendall(bytes.fromhex(target.token))
            known = _receive_exactly(connection, len(READY)) == READY
        except ConnectionError:
            known = False
        if not known:
            raise _WrongPeerError
        yield connection


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        if not (part := connection.recv(count - len(parts))):
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        parts += part
    return parts


def _accepts_connections(address: str, port: int) -> bool:
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # a wildcard includes loopback
    try:
        socket.create_connection((own, port), timeout=0.5).close()
    except OSError:
        return False
    return True


class Probe:
    """Base class of the agent: methods that test a machine's connections. Listeners stay open between calls."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []
        self._busy = threading.BoundedSemaphore(OPEN_AT_ONCE)

    @remote
    def listen(self, addresses: tuple[str, ...], port: int = 0, seconds: float = 60.0) -> tuple[Listener, ...]:
        """Listens on exactly these addresses for at most `seconds`; port 0 selects a free port."""
        return tuple(self._listen(address, port, time.monotonic() + seconds) for address in addresses)

    def _listen(self, address: str, port: int, until: float) -> Listener:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=OPEN_AT_ONCE)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            holder = port_holder(port) if error.errno == errno.EADDRINUSE else ""
            return Listener(address, error=f"{reason}, by {holder}" if holder else reason)
        self._listening.append(listener)
        token = secrets.token_bytes(TOKEN_BYTES)
        threading.Thread(target=self._accept_peers, args=(listener, token, until), daemon=True).start()
        return Listener(address, listener.getsockname()[1], token.hex())

    def _accept_peers(self, listener: socket.socket, token: bytes, until: float) -> None:
        with listener, contextlib.suppress(OSError):  # closed, or its time is over
            while True:
                listener.settimeout(max(until - time.monotonic(), 0.001))
                connection, _ = listener.accept()
                if self._busy.acquire(blocking=False):
                    threading.Thread(target=self._serve_peer, args=(connection, token), daemon=True).start()
                else:
                    connection.close()

    def _serve_peer(self, connection: socket.socket, token: bytes) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # the peer reports the failure
                _answer_peer(connection, token)
        finally:
            self._busy.release()

    @remote
    def unlisten(self) -> None:
        while self._listening:
            listener = self._listening.pop()
            try:
                # Wakes the thread that waits in accept, which then closes the listener. Closing the listener here would
                # free its file descriptor for another file, while that thread may still use it.
                listener.shutdown(socket.SHUT_RDWR)
            except OSError:  # not every system allows it on a listener
                listener.close()

    @remote
    def connect(
        self, targets: dict[str, tuple[Listener, ...]], timeout_s: float = CONNECT_S
    ) -> dict[str, tuple[Attempt, ...]]:
        """Tries to connect to other machines' listeners, in parallel. Returns one attempt per listener, by machine."""
        with ThreadPoolExecutor(min(sum(map(len, targets.values())), OPEN_AT_ONCE) or 1) as pool:
            tries = {name: pool.map(lambda one: _connect(one, timeout_s), found) for name, found in targets.items()}
            return {name: tuple(attempts) for name, attempts in tries.items()}

    @remote
    def measure(self, target: Listener, seconds: float) -> float | None:
        """Sends bytes to a listener for about `seconds`. Returns the bandwidth in Mbit/s; None if the test failed."""
        try:
            with _open_connection(target, PEER_PATIENCE_S) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                connection.sendall(COUNT + struct.pack("!d", seconds))
                block, deadline = memoryview(bytes(BLOCK_BYTES)), time.monotonic() + seconds + PEER_PATIENCE_S
                connection.setblocking(False)
                readable = False  # the receiver answers when its time is up
                while not readable and time.monotonic() < deadline:
                    readable, writable, _ = select.select([connection], [connection], [], 0.5)
                    if writable and not readable:
                        with contextlib.suppress(BlockingIOError):
                            connection.send(block)
                connection.settimeout(PEER_PATIENCE_S)
                count, taken = struct.unpack("!dd", _receive_exactly(connection, 16))
                # Drop what is still in the buffer.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (_WrongPeerError, OSError):
            return None
        return count * 8 / taken / 1e6 if count and taken else None

    @remote
    def clock(self) -> float:
        return time.time()

    @remote
    def open_ports(self) -> tuple[OpenPort, ...]:
        """Returns the listening ports of manyhands processes and their children that this user is allowed to see."""
        ours: dict[int, psutil.Process] = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(re.fullmatch(r"(.*/)?manyhands|manyhands\..*", word, re.DOTALL) for word in words):
                with contextlib.suppress(psutil.Error):  # the process has ended
                    ours |= {each.pid: each for each in (process, *process.children(recursive=True))}
        found: dict[tuple[str, int], OpenPort] = {}
        for pid, process in ours.items():
            with contextlib.suppress(psutil.Error):  # the process has ended, or is another user's
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        ip, port = each.laddr.ip, each.laddr.port
                        found[ip, port] = OpenPort(ip, port, pid, _accepts_connections(ip, port))
        return tuple(found[place] for place in sorted(found))

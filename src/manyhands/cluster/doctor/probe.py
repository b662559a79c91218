"""What a machine does when it is asked to be reached, to reach others, and to measure the way to one of them.

A listener answers only who knows its own token, so that another program, or another machine with the same address,
is not taken for the one that was meant. It only counts bytes, and is closed after a while if nobody closes it.
"""

import contextlib
import errno
import hmac
import secrets
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from manyhands.cluster.doctor.exposure import OpenPort, open_ports
from manyhands.cluster.doctor.findings import Attempt, Reached
from manyhands.cluster.messages import remote
from manyhands.parallel.ports import holder_of

TOKEN_BYTES = 16
ECHO, COUNT = b"E", b"C"
READY = b"manyhands\n"
EXCHANGES = 5
BLOCK_BYTES = 256 * 1024
# What is in flight when the time is up is thrown away; a small buffer keeps it little on slow links.
SEND_BUFFER_BYTES = 512 * 1024
# Of a measurement's time, before its bytes count: connections start slowly, and shaped links with a burst.
WARM_UP = 0.25
PEER_PATIENCE_S = 5.0
OPEN_AT_ONCE = 64


@dataclass(frozen=True)
class Listener:
    """Where a machine listens, or why it can't."""

    address: str  # its own
    port: int = 0  # of the listener
    token: str = ""  # a peer that does not know it gets no answer
    error: str = ""  # why nothing listens there; empty where something does
    holder: str = ""  # the process that holds the port, if that is why

    @property
    def trouble(self) -> str:
        """The error and the process to blame; empty where it listens."""
        return self.error + (f", by {self.holder}" if self.holder else "")


@dataclass(frozen=True)
class Measured:
    """The bandwidth to a listener; None where it couldn't be measured."""

    mbps: float | None = None
    error: str = ""


class Listeners:
    """This machine's open ears, until `close`, or for `seconds` at most."""

    def __init__(self, addresses: Sequence[str], port: int = 0, *, seconds: float = 60.0) -> None:
        """Listens on exactly these addresses, on one port (0: any), for some seconds; `opened`: where, or why not."""
        self._sockets: list[socket.socket] = []
        self._busy = threading.BoundedSemaphore(OPEN_AT_ONCE)
        self.opened = tuple(self._open(address, port) for address in addresses)
        self._timer = threading.Timer(seconds, self.close)
        self._timer.daemon = True
        self._timer.start()

    def _open(self, address: str, port: int) -> Listener:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(OPEN_AT_ONCE)
        except OSError as error:
            listener.close()
            holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
            return Listener(address, error=error.strerror or str(error), holder=holder)
        self._sockets.append(listener)
        token = secrets.token_bytes(TOKEN_BYTES)
        threading.Thread(target=self._accept, args=(listener, token), daemon=True).start()
        return Listener(address, listener.getsockname()[1], token.hex())

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # it was closed
            if not self._busy.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, token), daemon=True).start()

    def _serve(self, connection: socket.socket, token: bytes) -> None:
        try:
            # A peer that breaks off or never speaks is the peer's measurement that fails, and it says so itself.
            with connection, contextlib.suppress(OSError):
                _answer(connection, token)
        finally:
            self._busy.release()

    def close(self) -> None:
        self._timer.cancel()
        for listener in self._sockets:
            # shutdown wakes the thread that waits in accept; not every system allows it on a listener.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _answer(connection: socket.socket, token: bytes) -> None:
    connection.settimeout(PEER_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_exactly(connection, TOKEN_BYTES), token):
        return
    connection.sendall(READY)
    asked = _exactly(connection, 1)
    if asked == ECHO:
        while part := connection.recv(64):
            connection.sendall(part)
    elif asked == COUNT:
        (seconds,) = struct.unpack("!d", _exactly(connection, 8))
        connection.sendall(struct.pack("!dd", *_count(connection, min(max(seconds, 0.01), 10.0))))
        # What is still under way is taken until the sender has read that and breaks off: an end with bytes unread would
        # be a reset, which on its way through ssh may overtake the answer.
        place = bytearray(BLOCK_BYTES)
        while connection.recv_into(place):
            pass


def _count(connection: socket.socket, seconds: float) -> tuple[float, float]:
    """Bytes that arrive, and in what time, after a warm-up."""
    place = memoryview(bytearray(BLOCK_BYTES))
    start = time.monotonic()
    count, since, last = 0, 0.0, start
    # On a busy machine the time may be over before anything is counted.
    while last - start < seconds or not count:
        received = connection.recv_into(place)
        if not received:
            break
        last = time.monotonic()
        if since:
            count += received
        elif last - start >= seconds * WARM_UP:
            since = last
    return float(count), last - since if since else 0.0


def _connect(target: Listener, timeout_s: float) -> Attempt:
    """Tries to reach one listener and measures the time of small messages; `timeout_s` is for each answer."""
    local, latency_ms, result = "", None, "ok"
    try:
        with _open_connection(target, timeout_s) as connection:
            local = connection.getsockname()[0]
            connection.sendall(ECHO)
            latency_ms = 1000 * statistics.median([_exchange(connection) for _ in range(EXCHANGES)])
    except _OtherError:
        result = "other"
    except OSError as error:
        result = _kind(error)
    return Attempt(target.address, result, local, latency_ms, target.port)


def _pour(connection: socket.socket, seconds: float) -> None:
    """Sends until the receiver has something to say."""
    block, deadline = memoryview(bytes(BLOCK_BYTES)), time.monotonic() + seconds
    connection.setblocking(False)
    while time.monotonic() < deadline:
        readable, writable, _ = select.select([connection], [connection], [], 0.5)
        if readable:
            break
        if writable:
            with contextlib.suppress(BlockingIOError):
                connection.send(block)
    connection.settimeout(PEER_PATIENCE_S)


class _OtherError(Exception):
    """Something answers that doesn't know the token."""


def _open_connection(target: Listener, timeout_s: float, send_buffer: int = 0) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET)
    try:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        connection.connect((target.address, target.port))
        _greet(connection, bytes.fromhex(target.token))
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: socket.socket, token: bytes) -> None:
    try:
        connection.sendall(token)
        if _exactly(connection, len(READY)) != READY:
            raise _OtherError
    except ConnectionError:
        raise _OtherError from None


def _exchange(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(b".")
    _exactly(connection, 1)
    return time.perf_counter() - start


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        parts += part
    return bytes(parts)


def _kind(error: OSError) -> Reached:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "timeout"
    return "refused" if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET) else "unreachable"


class Probe:
    """What a launcher can have a machine try; keeps its listeners between calls."""

    def __init__(self) -> None:
        self._open: list[Listeners] = []

    @remote
    def listen(self, addresses: tuple[str, ...], port: int = 0, seconds: float = 60.0) -> tuple[Listener, ...]:
        """Listens on exactly these addresses, for so long at most; port 0 is any free one."""
        self._open.append(Listeners(addresses, port, seconds=seconds))
        return self._open[-1].opened

    @remote
    def unlisten(self) -> None:
        """Closes all listeners."""
        while self._open:
            self._open.pop().close()

    @remote
    def connect(self, targets: tuple[Listener, ...], timeout_s: float) -> tuple[Attempt, ...]:
        """Connects to other machines' listeners, all at once; returns the attempts in the order of the targets."""
        with ThreadPoolExecutor(min(len(targets), OPEN_AT_ONCE) or 1) as pool:
            return tuple(pool.map(lambda target: _connect(target, timeout_s), targets))

    @remote
    def measure(self, target: Listener, seconds: float) -> Measured:
        """Sends to a listener for about so long, as fast as possible."""
        try:
            with _open_connection(target, PEER_PATIENCE_S, SEND_BUFFER_BYTES) as connection:
                connection.sendall(COUNT + struct.pack("!d", seconds))
                _pour(connection, seconds + PEER_PATIENCE_S)
                count, taken = struct.unpack("!dd", _exactly(connection, 16))
                # What is still in the buffer is not sent any more.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except _OtherError:
            return Measured(error="another program answered")
        except OSError as error:
            return Measured(error=error.strerror or str(error))
        if not (count and taken):
            return Measured(error="not enough data was received")
        return Measured(count * 8 / taken / 1e6)

    @remote
    def clock(self) -> float:
        """Returns the time of this machine's clock."""
        return time.time()

    @remote
    def open_ports(self) -> tuple[OpenPort, ...]:
        """Returns the ports that manyhands has open on this machine."""
        return open_ports()

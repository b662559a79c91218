"""The agent's end of its connection to the launcher. Starts no thread, since workers are forked.

A lost connection is replaced through a Unix socket: `python -m manyhands.cluster.agents.wire SOCKET RECEIVED`, run over
ssh, passes its own standard streams to the agent.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path

from manyhands.cluster.agents.connection import NO_AGENT
from manyhands.cluster.agents.protocol import Alive, Reconnected
from manyhands.cluster.messages import Lines, Message, Misunderstood, Unacknowledged, encode
from manyhands.core.timeouts import SILENT_S

# Limit for receiving the streams of a new connection.
PASS_ON_S = 2.0
# The second direction of a lost connection may end a moment after the first.
ENDED_MS = 200
# A closed pipe hangs up; of sshd's socket only one direction is closed.
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Wire:
    """Reads requests from standard input and writes answers to `output`.

    Attributes:
        open: False once the launcher has closed its end or has been silent for too long.
        connected: False while a lost connection can be replaced.
        last_received: time of the last message, or of the loss of a connection, by the monotonic clock.
        remote: True where the launcher is on another machine, so that its silence means something.
        patient: True where a silent launcher may return, because the run does not depend on it.
    """

    def __init__(self, output: int) -> None:
        self._output, self._lines = output, Lines()
        self._received: deque[tuple[int, Message]] = deque()
        self._unacknowledged = Unacknowledged()
        self._listener: socket.socket | None = None
        self._passed_by: socket.socket | None = None  # to the process that passed the connection on; ends it
        self.open = self.connected = True
        self.last_received = time.monotonic()
        self.remote = self.patient = False

    @property
    def silent(self) -> bool:
        """True where the launcher has sent nothing for too long; sshd may take hours to notice a dead client."""
        return self.remote and time.monotonic() - self.last_received > SILENT_S

    def _lost(self) -> bool:
        """Whether a connection that has ended can be replaced: a launcher that leaves closes one direction only."""
        poll = select.poll()
        poll.register(self._output, 0)
        return bool(self._listener and self.remote and poll.poll(ENDED_MS))

    @contextlib.contextmanager
    def watched(self, clean_up: Callable[[], None]) -> Generator[None]:
        """Ends this process when the launcher closes the connection, or does not replace one that was lost.

        For a block that reads nothing, such as an import of torch. Workers can be forked after it: its thread has
        ended. `clean_up` is called before the process ends.
        """
        ours, over = socket.socketpair()

        def watch() -> None:
            poll = select.poll()
            poll.register(0, _ENDED)
            poll.register(over, select.POLLIN)
            if over.fileno() in dict(poll.poll()):
                return
            listener = self._listener
            if listener and self._lost() and select.select([listener, over], [], [], SILENT_S)[0]:
                return  # the new connection is accepted after the block
            clean_up()
            os._exit(1)

        thread = threading.Thread(target=watch, name="watches the launcher", daemon=True)
        with ours, over:
            thread.start()
            try:
                yield
            finally:
                ours.send(b".")
                thread.join()

    def listen(self, folder: Path) -> str:
        """Accepts new connections of the same launcher at a socket in a private folder; returns its path."""
        path = str(folder / "agent")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        self._listener = listener
        # A worker that held them would keep a connection's process alive, and a dead agent's socket open.
        os.register_at_fork(after_in_child=self._close_sockets)
        return path

    def _close_sockets(self) -> None:
        for each in (self._listener, self._passed_by):
            if each:
                each.close()

    def send(self, message: Message, number: int = 0) -> None:
        """Sends a message; an answer has its request's number. Does nothing once the launcher is gone."""
        line = encode(message, number)
        if self._listener and not isinstance(message, Alive):
            self._unacknowledged.add(line)
        if self.connected:
            self._write(line)

    def _write(self, line: bytes) -> None:
        data = memoryview(line)
        with contextlib.suppress(BrokenPipeError):
            while data and self._has_room():
                data = data[os.write(self._output, data[: select.PIPE_BUF]) :]

    def _has_room(self) -> bool:
        """Waits until the launcher can take more; a remote one that takes nothing for too long is gone."""
        while self.open and not select.select([], [self._output], [], SILENT_S)[1]:
            self.open = not self.remote
        return self.open

    def wait(self) -> tuple[int, Message] | None:
        """Returns the next request and its number, or None once the launcher is gone."""
        while self.open:
            request = self._next()
            if request is not None:
                return request
            self._fill(1.0)
        return None

    def poll(self) -> list[Message]:
        """Returns the messages received so far, without waiting."""
        self._fill(0)
        found: list[Message] = []
        while (request := self._next()) is not None:
            found.append(request[1])
        return found

    def _next(self) -> tuple[int, Message] | None:
        while self._received:
            number, message = self._received.popleft()
            if isinstance(message, Misunderstood):
                self.send(message, number)
            elif isinstance(message, Alive):
                self._unacknowledged.acknowledge(message.received)
                self.send(Alive(self._unacknowledged.received))
            else:
                return number, message
        return None

    def _fill(self, patience_s: float) -> None:
        inputs = [self._listener] if self._listener else []
        while self.open and (ready := select.select([0, *inputs] if self.connected else inputs, [], [], patience_s)[0]):
            patience_s = 0
            if self._listener in ready:
                self._reconnect(self._listener)
                continue
            received = b""
            with contextlib.suppress(ConnectionResetError):
                received = os.read(0, 1 << 16)
            if not received:
                self._disconnect()
                continue
            messages = self._lines.take(received)
            self._unacknowledged.received += sum(not isinstance(message, Alive) for _, message in messages)
            self._received += messages
            self.last_received = time.monotonic()
        if self.silent and not self.patient:
            self.open = False

    def _disconnect(self) -> None:
        self.connected, self.open = False, self._lost()
        if self.open:  # nothing was read while this agent imported torch
            self.last_received = time.monotonic()
        if self._passed_by:
            self._passed_by.close()

    def _reconnect(self, listener: socket.socket) -> None:
        """Accepts a new connection, and sends again what the launcher has not received."""
        passed_by, _ = listener.accept()
        passed_by.settimeout(PASS_ON_S)
        with contextlib.suppress(OSError, ValueError):
            count, descriptors, _, _ = socket.recv_fds(passed_by, 16, 3)
            for descriptor, own in zip(descriptors, (0, self._output, 2), strict=True):
                os.dup2(descriptor, own)
                os.close(descriptor)
            if self._passed_by:
                self._passed_by.close()
            self._passed_by, self._lines, self.connected = passed_by, Lines(), True
            self.last_received = time.monotonic()
            self._unacknowledged.acknowledge(int(count))
            self._write(encode(Reconnected(self._unacknowledged.received)) + self._unacknowledged.lines())


def pass_on(path: str, received: str) -> int:
    """Passes this process's standard streams to the agent at `path`, and waits until the agent closes them."""
    with socket.socket(socket.AF_UNIX) as agent:
        try:
            agent.connect(path)
            socket.send_fds(agent, [received.encode()], [0, 1, 2])
            agent.recv(1)
        except OSError:
            os.write(2, b"its agent has ended\n")
            return NO_AGENT
    return 0


if __name__ == "__main__":
    sys.exit(pass_on(*sys.argv[1:]))

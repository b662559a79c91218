"""A machine's end of the conversation; read without waiting and without a thread, since workers are forked.

Where the connection ends and the head may still be there, a new one comes through a Unix socket: started as
`python -m manyhands.cluster.agents.wire SOCKET RECEIVED` over ssh, this module hands its own standard streams over.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path

from manyhands.cluster.agents.connection import NO_AGENT, SILENT_S
from manyhands.cluster.agents.protocol import Alive, Reconnected
from manyhands.cluster.messages import Lines, Message, Misunderstood, Unacknowledged, encode

# What passes a connection on has sent it by then.
HAND_OVER_S = 2.0
# The second direction of a connection may end a moment after the first.
ENDED_MS = 200


class Wire:
    """Standard input, and what takes the answers."""

    def __init__(self, output: int) -> None:
        self._output, self._lines = output, Lines()
        self._come: deque[tuple[int, Message]] = deque()
        self._kept = Unacknowledged()
        self._listener: socket.socket | None = None
        self._passed_on: socket.socket | None = None  # to who has passed the connection on, and ends with it
        self.open = True  # False once the head has closed its end, or has been silent for too long
        self.connected = True  # False where the connection has ended, and the head may come over another
        self.heard = time.monotonic()  # when the head was last heard of
        self.remote = False  # True where the head is on another machine, so that its silence means something
        self.patient = False  # a head that is silent may come back; nothing waits for it meanwhile

    @property
    def silent(self) -> bool:
        """True where the head hasn't been heard of for too long; sshd may not notice for hours that it has gone."""
        return self.remote and time.monotonic() - self.heard > SILENT_S

    def listen(self, folder: Path) -> str:
        """Lets new connections of the same head come in, by a socket in a folder of this user alone; gives its path."""
        path = str(folder / "agent")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        self._listener = listener
        return path

    def tell(self, message: Message, number: int = 0) -> None:
        """Sends a message, an answer with its request's number; a head that is gone hears nothing."""
        line = encode(message, number)
        if self._listener and not isinstance(message, Alive):
            self._kept.add(line)
        if self.connected:
            self._write(line)

    def _write(self, line: bytes) -> None:
        data = memoryview(line)
        with contextlib.suppress(BrokenPipeError):
            while data and self._has_room():
                data = data[os.write(self._output, data[: select.PIPE_BUF]) :]

    def _has_room(self) -> bool:
        """Waits until the head takes something; one that is elsewhere and takes nothing for too long is gone."""
        while self.open and not select.select([], [self._output], [], SILENT_S)[1]:
            self.open = not self.remote
        return self.open

    def wait(self) -> tuple[int, Message] | None:
        """The next request and its number, or None when the head is gone."""
        while self.open:
            request = self._next()
            if request is not None:
                return request
            self._fill(1.0)
        return None

    def poll(self) -> list[Message]:
        """What has come, without waiting."""
        self._fill(0)
        found: list[Message] = []
        while (request := self._next()) is not None:
            found.append(request[1])
        return found

    def _next(self) -> tuple[int, Message] | None:
        while self._come:
            number, message = self._come.popleft()
            if isinstance(message, Misunderstood):
                self.tell(message, number)
            elif isinstance(message, Alive):
                self._kept.acknowledge(message.received)
                self.tell(Alive(self._kept.received))
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
            come = self._lines.take(received)
            self._kept.received += sum(not isinstance(message, Alive) for _, message in come)
            self._come += come
            self.heard = time.monotonic()
        if self.silent and not self.patient:
            self.open = False

    def _disconnect(self) -> None:
        """A head that leaves closes one direction; where both have ended the connection has."""
        poll = select.poll()
        poll.register(self._output, 0)
        self.connected = self.open = False
        if self._listener and self.remote and poll.poll(ENDED_MS):
            self.open = True
        if self._passed_on:
            self._passed_on.close()

    def _reconnect(self, listener: socket.socket) -> None:
        """Takes a connection over, and sends again what the head hasn't received."""
        passed_on, _ = listener.accept()
        passed_on.settimeout(HAND_OVER_S)
        with contextlib.suppress(OSError, ValueError):
            count, descriptors, _, _ = socket.recv_fds(passed_on, 16, 3)
            for descriptor, own in zip(descriptors, (0, self._output, 2), strict=True):
                os.dup2(descriptor, own)
                os.close(descriptor)
            if self._passed_on:
                self._passed_on.close()
            self._passed_on, self._lines, self.connected, self.heard = passed_on, Lines(), True, time.monotonic()
            self._kept.acknowledge(int(count))
            self._write(encode(Reconnected(self._kept.received)) + self._kept.lines())


def pass_on(path: str, received: str) -> int:
    """Hands this process's standard streams to the agent that listens there, and waits until it is done with them."""
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

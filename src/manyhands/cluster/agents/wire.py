"""A machine's end of the conversation; read without waiting and without a thread, since workers are forked."""

import contextlib
import os
import select
import time
from collections import deque

from manyhands.cluster.agents.connection import SILENT_S
from manyhands.cluster.agents.protocol import Alive
from manyhands.cluster.messages import Lines, Message, Misunderstood, encode


class Wire:
    """Standard input, and what takes the answers."""

    def __init__(self, output: int) -> None:
        self._output, self._lines = output, Lines()
        self._come: deque[tuple[int, Message]] = deque()
        self.open = True  # False once the head has closed its end, or has been silent for too long
        self.heard = time.monotonic()  # when the head was last heard of
        self.remote = False  # True where the head is on another machine, so that its silence means something
        self.patient = False  # a head that is silent may come back; nothing waits for it meanwhile

    @property
    def silent(self) -> bool:
        """True where the head hasn't been heard of for too long; sshd may not notice for hours that it has gone."""
        return self.remote and time.monotonic() - self.heard > SILENT_S

    def tell(self, message: Message, number: int = 0) -> None:
        """Sends a message, an answer with its request's number; a head that is gone hears nothing."""
        data = memoryview(encode(message, number))
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
                self.tell(message)
            else:
                return number, message
        return None

    def _fill(self, patience_s: float) -> None:
        while self.open and select.select([0], [], [], patience_s)[0]:
            received = os.read(0, 1 << 16)
            self.open = bool(received)
            self._come += self._lines.take(received)
            self.heard = time.monotonic()
            patience_s = 0
        if self.silent and not self.patient:
            self.open = False

"""The launcher's end of its connection to the agent of one machine, over a pipe or over ssh.

The agent answers each request under its number, and reports events under the number 0. No port is opened.
"""

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import cast

from manyhands.cluster.agents.early import SAFE
from manyhands.cluster.agents.protocol import Alive, Greeting, Reconnected
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import (
    A,
    Lines,
    Message,
    Misunderstood,
    Request,
    RequestFailed,
    Unacknowledged,
    encode,
)
from manyhands.core.errors import RunError, UserError
from manyhands.core.timeouts import HEARTBEAT_S, RECONNECT_S, SILENT_S

# Passes a new connection on to a running agent; its exit code where the agent has ended.
RECONNECT, NO_AGENT = "manyhands.cluster.agents.wire", 3
# Limit for the exit code of the last connection's ssh.
ENDED_S = 0.5
SSH_FAILED = 255


class LinkClosed(RunError):  # noqa: N818 - a state that callers ask for, as often as an error
    """The machine's agent, or the connection to it, has ended."""


class MisunderstoodError(RunError):
    """The agent is of another version."""


class AgentConnection:
    """A connection to one machine's agent. Reconnects where the connection is lost and the agent still runs.

    Attributes:
        machine: the machine.
        here: True for this machine.
        process: the agent itself, or the ssh that leads to it.
        log: the file that its standard error goes to.
        last_received: time of the last message, or of the loss of a connection, by the monotonic clock.
        closed: True once nothing more can be received.
        connected: False from the loss of a connection until the agent answers over another.
        unsent: bytes to send once the machine can take them, so that a slow one does not delay the others.
        connect_again: starts another ssh to the machine, with these arguments for Python there; None where nothing
            can.
    """

    def __init__(
        self, machine: Machine, process: subprocess.Popen[bytes], log: Path, *, here: bool, log_start: int = 0
    ) -> None:
        self.machine, self.process, self.log, self.here = machine, process, log, here
        self.last_received, self.closed = time.monotonic(), False
        self.unsent = bytearray()
        self.connect_again: Callable[[Sequence[str]], subprocess.Popen[bytes]] | None = None
        self._lines, self._unacknowledged, self._socket = Lines(), Unacknowledged(), ""
        self.connected = True
        self._reconnect_at = 0.0  # time of the next attempt, where the last connection was lost
        self._asked, self._log_start, self._heartbeat_at = 0, log_start, 0.0
        _unblock(process)

    def fileno(self) -> int:
        """The descriptor of the agent's output, for a selector."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, message: Message, number: int = 0) -> None:
        """Sends a message without waiting."""
        line = encode(message, number)
        if not isinstance(message, Alive):
            self._unacknowledged.add(line)
        if self.connected:
            self.unsent += line
            self.flush()

    def heartbeat(self) -> None:
        """Sends a heartbeat or reconnects, where one is due."""
        now = time.monotonic()
        if self._reconnect_at and not self.closed and now > self._reconnect_at:
            self._reconnect()
        if not self.closed and now > self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            self.send(Alive(self._unacknowledged.received))

    def flush(self) -> None:
        """Sends as much of `unsent` as the machine can take now."""
        assert self.process.stdin is not None
        try:
            while self.unsent and not self.process.stdin.closed:
                sent = os.write(self.process.stdin.fileno(), self.unsent[: 1 << 16])
                del self.unsent[:sent]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent.clear()

    def read(self) -> list[tuple[int, Message]]:
        """Returns the messages received so far with their numbers, without waiting; sets `closed` at the end."""
        messages: list[tuple[int, Message]] = []
        with contextlib.suppress(BlockingIOError):
            while self.readable:
                received = os.read(self.fileno(), 1 << 16)
                if not received or self._lines.too_long:
                    self._disconnect()
                    break
                self.last_received = time.monotonic()
                for number, message in self._lines.take(received):
                    self._take(message)
                    if not isinstance(message, Alive):
                        messages.append((number, message))
        return messages

    @property
    def readable(self) -> bool:
        """Whether there is a connection to read from."""
        return not (self.closed or self._reconnect_at)

    def _take(self, message: Message) -> None:
        """Counts a message; sends unacknowledged ones again over a new connection."""
        if not isinstance(message, Alive):
            self._unacknowledged.received += 1
            if isinstance(message, Greeting):
                self._socket = message.socket
            return
        self._unacknowledged.acknowledge(message.received)
        if isinstance(message, Reconnected):
            self.connected = True
            self.unsent += self._unacknowledged.lines()
            self.flush()

    def _disconnect(self) -> None:
        """Schedules another connection, unless the agent itself has ended or the attempts have taken too long."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(ENDED_S)
        now, by_itself = time.monotonic(), code is not None and 0 <= code != SSH_FAILED
        if self.connected:  # an agent that imports torch has been silent until now
            self.last_received = now
        late = now - self.last_received > SILENT_S
        self.closed = by_itself or late or self._lines.too_long or not (self._socket and self.connect_again)
        if not self.closed:
            self._reconnect_at = now + (0.0 if self.connected else RECONNECT_S)
            self.connected, self._lines = False, Lines()
            self.unsent.clear()

    def _reconnect(self) -> None:
        assert self.connect_again
        self.close(0.0)
        try:
            self.process = self.connect_again((SAFE, "-m", RECONNECT, self._socket, str(self._unacknowledged.received)))
        except (UserError, OSError):  # such as no memory for a process
            self._disconnect()
            return
        _unblock(self.process)
        self.closed, self._reconnect_at = False, 0.0

    def ask(self, request: Request[A], timeout_s: float, others: Collection["AgentConnection"] = ()) -> A:
        """Sends a request and waits for its answer; the others receive heartbeats meanwhile.

        Raises:
            LinkClosed: the machine is gone or silent.
            RunError: the request failed there.
        """
        (answer,) = ask_all([self], [request], timeout_s, others)
        if isinstance(answer, RunError):
            raise answer
        return answer

    def post(self, request: Message) -> int:
        """Sends a request and returns its number, which the answer repeats."""
        self._asked += 1
        self.send(request, self._asked)
        return self._asked

    def log_tail(self, last_lines: int = 8) -> str:
        """Returns the last lines of its standard error."""
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
            return "\n".join(text.splitlines()[-last_lines:])
        return ""

    def hang_up(self) -> None:
        """Closes this end, which ends the other."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, patience_s: float = 5.0) -> int:
        """Closes this end, which ends the other; what doesn't end in time is killed. Returns the exit code."""
        assert self.process.stdout is not None
        self.hang_up()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.closed = True
        return self.process.returncode


def close_all(links: Sequence[AgentConnection], patience_s: float = 5.0) -> None:
    """Closes several links at once; all together may take the patience."""
    for link in links:
        link.hang_up()
    until = time.monotonic() + patience_s
    for link in links:
        link.close(max(0.0, until - time.monotonic()))


def _unblock(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)


def ask_all(
    links: Sequence[AgentConnection],
    requests: Sequence[Request[A]],
    timeout_s: float,
    others: Collection[AgentConnection] = (),
) -> list[A | RunError]:
    """Asks several machines at once, each its own question.

    Args:
        links: to the machines that are asked.
        requests: one for each of them.
        timeout_s: for all answers together.
        others: machines that receive heartbeats meanwhile.

    Returns:
        For each link its answer, or an error: LinkClosed where the machine is gone or silent, RunError where the
        request failed there.
    """
    asked = {link: (link.post(request), request) for link, request in zip(links, requests, strict=True)}
    answers: dict[AgentConnection, A | RunError] = {}
    until = time.monotonic() + timeout_s
    kept = {*links, *others}
    while len(answers) < len(links) and time.monotonic() < until:
        for link in kept:
            link.heartbeat()
        waiting = [link for link in links if link not in answers]
        for link in [*stir(waiting, 0.2), *(link for link in waiting if link.closed)]:
            answer = answer_to(link, *asked[link])
            if answer is not None:
                answers[link] = answer
    silent = f"did not answer within {timeout_s:.0f} s"
    return [answers.get(link, _closed(link, f"{link.machine.name} {silent}")) for link in links]


def stir(links: Sequence[AgentConnection], patience_s: float) -> list[AgentConnection]:
    """Waits until a link can be read or written; writes, and returns the links that can be read."""
    with selectors.DefaultSelector() as selector:
        for link in links:
            if link.readable:
                selector.register(link, selectors.EVENT_READ, link)
            if link.unsent and link.process.stdin and not link.process.stdin.closed:
                selector.register(link.process.stdin, selectors.EVENT_WRITE, link)
        events = selector.select(patience_s)
    for key, event in events:
        if event & selectors.EVENT_WRITE:
            key.data.flush()
    return [key.data for key, event in events if event & selectors.EVENT_READ]


def _gone(link: AgentConnection) -> LinkClosed:
    tail = link.log_tail(1).strip()
    return _closed(link, f"{link.machine.name} is lost{tail and f': {tail}'}")


def _closed(link: AgentConnection, what: str) -> LinkClosed:
    name = link.machine.name
    return LinkClosed(what, name, (f"check that {name} is running and reachable: manyhands doctor --hosts …",))


def answer_to(link: AgentConnection, number: int, request: Request[A]) -> A | RunError | None:
    """Returns the answer to a request, or an error, without waiting; None while neither has been received."""
    for answered, message in link.read():
        if answered == number and isinstance(message, request.answer):
            return cast(A, message)
        if isinstance(message, Misunderstood) or (answered == number and isinstance(message, RequestFailed)):
            return _failed(link, message)
    return _gone(link) if link.closed else None


def _failed(link: AgentConnection, failed: RequestFailed) -> RunError:
    name = link.machine.name
    if isinstance(failed, Misunderstood):
        return MisunderstoodError(f"{name}: {failed.what}", name, failed.hints)
    error = RunError(failed.what, name, failed.hints)
    if failed.traceback:
        error.add_note(failed.traceback)
    return error

"""The head's end of a conversation with the agent of one machine, over a pipe or over ssh.

The head sends requests; the agent answers each, under its number, and tells of its own what happens. No port is opened
for it.
"""

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import cast

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
from manyhands.core.early_agent import SAFE
from manyhands.core.errors import RunError, UserError

# The other end is told so often that its head is there.
PULSE_S = 1.0
# Who is silent for so long is given up. After a break of 8 s TCP sends anew after 12.6 s; the last word was up to a
# pulse before the break, and busy machines take their time.
SILENT_S = 16.0
# Passes a new connection on to the agent that is there; ends with this code where there is none any more.
RECONNECT, NO_AGENT = "manyhands.cluster.agents.wire", 3
# Between two attempts at a new connection; and so long ssh has to say how the last one ended.
RECONNECT_S, ENDED_S = 1.0, 0.5
SSH_FAILED = 255


class LinkClosed(RunError):  # noqa: N818 - a state that callers ask for, as often as an error
    """The machine's agent, or the connection to it, has ended."""


class MisunderstoodError(RunError):
    """What one end says is not what the other expects: they are of two versions."""


class AgentConnection:
    """A conversation with one machine, over a new connection where the last one ends and the agent doesn't.

    Attributes:
        machine: who is there.
        here: True for this machine.
        process: the agent itself, or the ssh that leads to it.
        log: the file that its standard error goes to.
        heard: when the last sign of it came, by the monotonic clock.
        closed: True once nothing more can come.
        connected: False from the end of a connection until the agent answers over another.
        unsent: what waits until the machine takes it; one that is slow must not keep the head from the others.
        connect_again: starts what leads to the machine anew, and runs these words of Python there; None where
            nothing can.
    """

    def __init__(
        self, machine: Machine, process: subprocess.Popen[bytes], log: Path, *, here: bool, log_start: int = 0
    ) -> None:
        self.machine, self.process, self.log, self.here = machine, process, log, here
        self.heard, self.closed = time.monotonic(), False
        self.unsent = bytearray()
        self.connect_again: Callable[[Sequence[str]], subprocess.Popen[bytes]] | None = None
        self._lines, self._kept, self._socket = Lines(), Unacknowledged(), ""
        self.connected = True
        self._reconnect_at = 0.0  # the next attempt, where the last connection has ended
        self._asked, self._log_start, self._pulse_at = 0, log_start, 0.0
        _unblock(process)

    def fileno(self) -> int:
        """Of what comes from the machine, for a selector."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, message: Message, number: int = 0) -> None:
        """Sends a message, without waiting; one that can't be sent is noticed when nothing comes back."""
        line = encode(message, number)
        if not isinstance(message, Alive):
            self._kept.add(line)
        if self.connected:
            self.unsent += line
            self.flush()

    def pulse(self) -> None:
        """Lets the machine know that its head is there, where it is time to; connects again, too."""
        now = time.monotonic()
        if self._reconnect_at and not self.closed and now > self._reconnect_at:
            self._reconnect()
        if not self.closed and now > self._pulse_at:
            self._pulse_at = now + PULSE_S
            self.send(Alive(self._kept.received))

    def flush(self) -> None:
        """Sends what waits, as far as the machine takes it now."""
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
        """What has come, with its numbers, without waiting; sets `closed` at the end."""
        messages: list[tuple[int, Message]] = []
        with contextlib.suppress(BlockingIOError):
            while self.readable:
                received = os.read(self.fileno(), 1 << 16)
                if not received or self._lines.too_long:
                    self._disconnect()
                    break
                self.heard = time.monotonic()
                for number, message in self._lines.take(received):
                    self._take(message)
                    if not isinstance(message, Alive):
                        messages.append((number, message))
        return messages

    @property
    def readable(self) -> bool:
        """Whether anything can come just now."""
        return not (self.closed or self._reconnect_at)

    def _take(self, message: Message) -> None:
        """Keeps the account of what has come and what is to be sent again."""
        if not isinstance(message, Alive):
            self._kept.received += 1
            if isinstance(message, Greeting):
                self._socket = message.socket
            return
        self._kept.acknowledge(message.received)
        if isinstance(message, Reconnected):
            self.connected = True
            self.unsent += self._kept.lines()
            self.flush()

    def _disconnect(self) -> None:
        """The connection has ended; tries another one, unless the agent itself has ended or it is too late."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(ENDED_S)
        by_itself = code is not None and 0 <= code != SSH_FAILED
        late = time.monotonic() - self.heard > SILENT_S
        self.closed = by_itself or late or self._lines.too_long or not (self._socket and self.connect_again)
        if not self.closed:
            self._reconnect_at = time.monotonic() + (0.0 if self.connected else RECONNECT_S)
            self.connected, self._lines = False, Lines()
            self.unsent.clear()

    def _reconnect(self) -> None:
        assert self.connect_again
        self.close(0.0)
        try:
            self.process = self.connect_again((SAFE, "-m", RECONNECT, self._socket, str(self._kept.received)))
        except (UserError, OSError):  # no memory for a process, or no folder for its log, perhaps
            self._disconnect()
            return
        _unblock(self.process)
        self.closed, self._reconnect_at = False, 0.0

    def ask(self, request: Request[A], timeout_s: float, others: Collection["AgentConnection"] = ()) -> A:
        """Sends a request and waits for its answer; other machines are told meanwhile that their head is there.

        Raises:
            LinkClosed: the machine is gone or silent.
            RunError: the request failed there.
        """
        (answer,) = ask_all([self], [request], timeout_s, others)
        if isinstance(answer, RunError):
            raise answer
        return answer

    def post(self, request: Message) -> int:
        """Sends a request and returns its number, which the answer bears."""
        self._asked += 1
        self.send(request, self._asked)
        return self._asked

    def said(self, last_lines: int = 8) -> str:
        """The end of what it wrote to its standard error."""
        with contextlib.suppress(OSError):
            said = self.log.read_bytes()[self._log_start :].decode(errors="replace")
            return "\n".join(said.splitlines()[-last_lines:])
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
        others: machines that aren't asked now, and must not take their head's silence for its end.

    Returns:
        For each link its answer, or the error that stands in its place: LinkClosed where the machine is gone or
        silent, RunError where the request failed there.
    """
    asked = {link: (link.post(request), request) for link, request in zip(links, requests, strict=True)}
    answers: dict[AgentConnection, A | RunError] = {}
    until = time.monotonic() + timeout_s
    kept = {*links, *others}
    while len(answers) < len(links) and time.monotonic() < until:
        for link in kept:
            link.pulse()
        waiting = [link for link in links if link not in answers]
        for link in [*stir(waiting, 0.2), *(link for link in waiting if link.closed)]:
            answer = answer_to(link, *asked[link])
            if answer is not None:
                answers[link] = answer
    silent = f"did not answer within {timeout_s:.0f} s"
    return [answers.get(link, _closed(link, f"{link.machine.name} {silent}")) for link in links]


def stir(links: Sequence[AgentConnection], patience_s: float) -> list[AgentConnection]:
    """Waits until there is something to read or room to send; sends, and gives the links that can be read."""
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
    said = link.said(1).strip()
    return _closed(link, f"{link.machine.name} is lost{said and f': {said}'}")


def _closed(link: AgentConnection, what: str) -> LinkClosed:
    name = link.machine.name
    return LinkClosed(what, name, (f"is {name} switched on and on the network? manyhands doctor --hosts … says more",))


def answer_to(link: AgentConnection, number: int, request: Request[A]) -> A | RunError | None:
    """What has come as a request's answer, or the error in its place, without waiting; None while nothing has."""
    for answered, message in link.read():
        if answered == number and isinstance(message, request.answer):
            return cast(A, message)
        if isinstance(message, Misunderstood) or (answered == number and isinstance(message, RequestFailed)):
            return _failed(link, message)
    return _gone(link) if link.closed else None


def _failed(link: AgentConnection, failed: RequestFailed) -> RunError:
    name = link.machine.name
    if isinstance(failed, Misunderstood):
        return MisunderstoodError(f"{name}: {failed.what}", name, failed.mend)
    error = RunError(failed.what, name, failed.mend)
    if failed.traceback:
        error.add_note(failed.traceback)
    return error

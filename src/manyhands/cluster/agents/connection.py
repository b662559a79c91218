"""Both ends of the connection between a launcher and the agent of one machine, over a pipe or over ssh.

The agent answers each call with the id of the call, and sends events with id 0. No port is opened.
A lost connection is replaced through a Unix socket: `python -m manyhands.cluster.agents.connection SOCKET RECEIVED`,
run over ssh, passes its standard streams to the agent.
"""

import contextlib
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.cluster import messages
from manyhands.cluster.agents.early import SAFE
from manyhands.cluster.agents.protocol import Reachable
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import Message, MessageStream, Misunderstood, R, Request, RequestFailed
from manyhands.core.errors import RunError, UserError
from manyhands.core.timeouts import HEARTBEAT_S, RECONNECT_S, SILENT_S

# Module that passes a new connection to an agent; its exit code without an agent; ssh's exit code for errors.
RECONNECT, NO_AGENT, SSH_FAILED = "manyhands.cluster.agents.connection", 3, 255
ENDED_S, PASS_ON_S = 0.5, 2.0  # time limits: ssh's exit code after a loss; streams of a new connection
TAIL_BYTES = 1 << 14  # bytes read from the end of a log for an error message
ENDED_MS = 200  # a lost connection's second direction may end this much later
# A closed pipe reports POLLHUP; a socket of sshd, closed in one direction, reports POLLRDHUP.
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class LinkClosed(RunError):  # noqa: N818 - a state that callers check for, not only an error
    """Raised if a machine's agent, or the connection to the agent, has ended."""


class MisunderstoodError(RunError):
    """Raised if the agent has another version of manyhands, or if a message was invalid."""


class AgentConnection:
    """The launcher's end of a connection. Reconnects if the connection is lost while the agent still runs.

    `process` is the agent, or ssh to its machine; the file `log` receives the standard error of `process`.
    """

    def __init__(
        self, machine: Machine, process: subprocess.Popen[bytes], log: Path, *, here: bool, log_start: int = 0
    ) -> None:
        self.machine, self.log, self.here = machine, log, here
        self.last_received = time.monotonic()  # time of the last message, or of the loss of a connection
        self.closed = False  # True once nothing more can be received
        self.connected = True  # False from the loss of a connection until the agent answers over another
        self.unsent = bytearray()  # bytes to send when possible, so that a slow machine does not delay the others
        # starts another ssh that runs Python with these arguments on the machine; None if that is impossible
        self.connect_again: Callable[[Sequence[str]], subprocess.Popen[bytes]] | None = None
        self.clock_offset_s = 0.0  # seconds that the machine's clock is ahead of ours
        self._lines, self._socket = MessageStream(), ""
        self._reconnect_at = 0.0  # time of the next attempt after a loss; 0 if connected
        self._asked, self._log_start, self._heartbeat_at = 0, log_start, 0.0
        self._attach_process(process)

    def _attach_process(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._input, self._output = process, process.stdin, process.stdout
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._output.fileno(), False)

    def fileno(self) -> int:
        return self._output.fileno()

    def send(self, message: Message, request_id: int = 0) -> None:  # doesn't wait
        line = self._lines.add(message, request_id)
        if self.connected:
            self.unsent += line
            self.flush()

    def heartbeat(self) -> None:
        """Sends a heartbeat if one is due; reconnects if the next attempt to replace a lost connection is due."""
        now = time.monotonic()
        if self._reconnect_at and not self.closed and now > self._reconnect_at:
            self._reconnect()
        if not self.closed and now > self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            self.send(messages.Alive(self._lines.received))

    def flush(self) -> None:
        """Sends as much of `unsent` as possible without waiting."""
        try:
            while self.unsent and not self._input.closed:
                sent = os.write(self._input.fileno(), self.unsent[: 1 << 16])
                del self.unsent[:sent]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent.clear()

    def read(self) -> list[tuple[int, Message]]:
        """Returns received messages with their ids, without waiting. Sets `closed` once no more message can arrive."""
        found: list[tuple[int, Message]] = []
        with contextlib.suppress(BlockingIOError):
            while self.readable:
                received = os.read(self.fileno(), 1 << 16)
                if not received or self._lines.too_long:
                    self._disconnect()
                    break
                self.last_received = time.monotonic()
                for number, message in self._lines.take(received):
                    if isinstance(message, messages.Reconnected):
                        self.connected = True
                        self.unsent += self._lines.unacknowledged
                        self.flush()
                    elif isinstance(message, Reachable):
                        self._socket = message.socket
                    if not isinstance(message, messages.Alive):
                        found.append((number, message))
        return found

    @property
    def readable(self) -> bool:
        return not (self.closed or self._reconnect_at)

    def _disconnect(self) -> None:
        """Schedules a reconnection, unless the agent has ended or earlier attempts have taken longer than SILENT_S."""
        ended = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = 0 <= self.process.wait(ENDED_S) != SSH_FAILED
        now = time.monotonic()
        if self.connected:  # an agent that imported torch was silent until now
            self.last_received = now
        late = now - self.last_received > SILENT_S
        self.closed = ended or late or self._lines.too_long or not (self._socket and self.connect_again)
        if not self.closed:
            self._reconnect_at = now + (0.0 if self.connected else RECONNECT_S)
            self.connected = False
            self._lines.disconnect()
            self.unsent.clear()

    def _reconnect(self) -> None:
        assert self.connect_again
        self.close(0.0)
        try:
            self._attach_process(self.connect_again((SAFE, "-m", RECONNECT, self._socket, str(self._lines.received))))
        except (UserError, OSError):  # such as no memory for a process
            self._disconnect()
            return
        self.closed, self._reconnect_at = False, 0.0

    def ask(self, request: Request[R], timeout_s: float, others: Collection["AgentConnection"] = ()) -> R:
        """Sends a request and returns the answer. Raises RunError if the request failed or the machine is lost."""
        (answer,) = ask_all({self: request}, timeout_s, others).values()
        if isinstance(answer, RunError):
            raise answer
        return answer

    def post(self, request: Request[Any]) -> int:
        """Sends a request and returns its id, which the answer repeats."""
        self._asked += 1
        self.send(request.call, self._asked)
        return self._asked

    def log_tail(self, last_lines: int = 8) -> str:
        """Returns the last lines of the process's standard error."""
        return log_tail(self.log, self._log_start, last_lines)

    def close(self, patience_s: float = 5.0) -> int:
        """Closes the connection, so that `process` exits; kills it after `patience_s`. Returns the exit code."""
        close_all([self], patience_s)
        return self.process.returncode


def log_tail(log: Path, start: int, last_lines: int = 8) -> str:
    """Returns the last lines written to a file after byte `start`; "" if the file is missing."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-last_lines:])
    return ""


def close_all(links: Collection[AgentConnection], patience_s: float = 5.0) -> None:
    """Closes connections in parallel, within `patience_s` in total."""
    end_processes([link.process for link in links], patience_s)
    for link in links:
        link.closed = True


def end_processes(processes: Collection[subprocess.Popen[bytes]], patience_s: float, terminate: bool = False) -> None:
    """Ends processes by closing their standard input (and by SIGTERM if `terminate`); kills them after `patience_s`."""
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if terminate:
            process.terminate()
    until = time.monotonic() + patience_s
    for process in processes:
        assert process.stdout is not None
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def ask_all(
    requests: Mapping[AgentConnection, Request[R]], timeout_s: float, others: Collection[AgentConnection] = ()
) -> dict[AgentConnection, R | RunError]:
    """Sends each machine its request and waits for all answers; connections in `others` get heartbeats meanwhile.

    Returns the answer or the error of each machine: LinkClosed if the machine is lost, RunError if the request failed.
    """
    asked = {link: (link.post(request), request) for link, request in requests.items()}
    answers: dict[AgentConnection, R | RunError] = {}
    until = time.monotonic() + timeout_s
    while len(answers) < len(asked) and time.monotonic() < until:
        for link in {*asked, *others}:
            link.heartbeat()
        waiting = [link for link in asked if link not in answers]
        for link in [*wait_for_links(waiting, 0.2), *(link for link in waiting if link.closed)]:
            for answer in poll_answer(link, *asked[link]):
                answers[link] = answer
    silent = f"did not answer within {timeout_s:.0f} s"
    return {link: answers.get(link, _request_error(link, f"{link.machine.name} {silent}")) for link in asked}


def wait_for_links(links: Iterable[AgentConnection], patience_s: float) -> list[AgentConnection]:
    """Waits up to `patience_s` for connections that can send or receive; returns those with received bytes."""
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


def poll_answer(link: AgentConnection, request_id: int, request: Request[R]) -> list[R | RunError]:
    """Returns a list of the answer or the error of a request; an empty list if it has not arrived. Doesn't wait."""
    for answered, message in link.read():
        if answered == request_id and isinstance(message, messages.CallResult):
            try:
                return [request.result(message)]
            except ValueError as error:
                return [_request_error(link, Misunderstood(f"invalid message: {error}"))]
        if isinstance(message, Misunderstood) or (answered == request_id and isinstance(message, RequestFailed)):
            return [_request_error(link, message)]
    tail = link.log_tail(1).strip() if link.closed else ""
    return [_request_error(link, f"{link.machine.name} is lost{tail and f': {tail}'}")] if link.closed else []


def _request_error(link: AgentConnection, failed: RequestFailed | str) -> RunError:
    name = link.machine.name
    if isinstance(failed, str):
        return LinkClosed(failed, name, (f"check that {name} is running and reachable: manyhands doctor --hosts …",))
    if isinstance(failed, Misunderstood):
        return MisunderstoodError(f"{name}: {failed.what}", name, failed.hints)
    error = RunError(failed.what, name, failed.hints)
    if failed.traceback:
        error.add_note(failed.traceback)
    return error


class Wire:
    """The agent's end of a connection: reads stdin, and writes to `output`. Keeps no thread, to allow forks."""

    def __init__(self, output: int) -> None:
        self._output, self._lines = output, MessageStream()
        self._received: deque[tuple[int, Message]] = deque()
        self._listener: socket.socket | None = None
        self._passed_by: socket.socket | None = None  # closing it ends the process that passed the connection on
        self.open = True  # False once the launcher has closed its end or has been silent for too long
        self.connected = True  # False while a lost connection can be replaced
        self.last_received = time.monotonic()  # time of the last message, or of the loss of a connection
        self.remote = False  # True if the launcher is on another machine, so that silence means a loss
        self.patient = False  # True if the run continues without the launcher, which may return

    @property
    def silent(self) -> bool:
        """True if the launcher has sent nothing for SILENT_S; sshd may take hours to notice a dead client."""
        return self.remote and time.monotonic() - self.last_received > SILENT_S

    def _can_reconnect(self) -> bool:
        """True if the launcher may reconnect: a lost connection has closed input and output, an exit only the input."""
        poll = select.poll()
        poll.register(self._output, 0)
        return bool(self._listener and self.remote and poll.poll(ENDED_MS))

    @contextlib.contextmanager
    def watch_launcher(self, clean_up: Callable[[], None]) -> Generator[None]:
        """Exits this process, after `clean_up`, if the launcher exits or is lost while the block runs.

        For blocks that read no messages, such as an import of torch. The thread that watches the launcher ends with
        the block, because forking workers requires a process without threads.
        """
        ours, over = socket.socketpair()

        def watch() -> None:
            poll = select.poll()
            poll.register(0, _ENDED)
            poll.register(over, select.POLLIN)
            if over.fileno() in dict(poll.poll()):
                return
            listener = self._listener
            if listener and self._can_reconnect() and select.select([listener, over], [], [], SILENT_S)[0]:
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
        """Listens for new connections of the launcher on a Unix socket in a private folder; returns its path."""
        path = str(folder / "agent")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        self._listener = listener
        # Copies in a forked worker would keep a connection's process alive, and the socket of a dead agent open.
        os.register_at_fork(after_in_child=lambda: [each.close() for each in (listener, self._passed_by) if each])
        return path

    def send(self, message: Message, request_id: int = 0) -> None:
        """Sends a message, which answers the request `request_id`; 0 for events. Does nothing without a launcher."""
        line = self._lines.add(message, request_id)
        if self.connected:
            self._write(line)

    def _write(self, line: bytes) -> None:
        """Writes a line; a remote launcher that accepts no bytes for SILENT_S counts as gone."""
        data = memoryview(line)
        with contextlib.suppress(BrokenPipeError):
            while data and self.open:
                if select.select([], [self._output], [], SILENT_S)[1]:
                    data = data[os.write(self._output, data[: select.PIPE_BUF]) :]
                else:
                    self.open = not self.remote

    def wait(self) -> tuple[int, Message] | None:
        """Returns the next request and its id, or None once the launcher is gone."""
        while self.open:
            if self._received:
                return self._received.popleft()
            self._receive(1.0)
        return None

    def poll(self) -> list[Message]:
        """Returns the messages received so far, without waiting."""
        self._receive(0)
        return [self._received.popleft()[1] for _ in range(len(self._received))]

    def _receive(self, patience_s: float) -> None:
        inputs = [self._listener] if self._listener else []
        while self.open and (ready := select.select([0, *inputs] if self.connected else inputs, [], [], patience_s)[0]):
            patience_s, received = 0, b""
            if self._listener in ready:
                self._reconnect(self._listener)
                continue
            with contextlib.suppress(ConnectionResetError):
                received = os.read(0, 1 << 16)
            for number, message in self._lines.take(received):
                if isinstance(message, Misunderstood):
                    self.send(message, number)
                elif isinstance(message, messages.Alive):
                    self.send(messages.Alive(self._lines.received))
                else:
                    self._received.append((number, message))
            if not received:
                self.connected, self.open = False, self._can_reconnect()
                if self._passed_by:
                    self._passed_by.close()
            if self.open:  # reset here, because nothing is read during an import of torch
                self.last_received = time.monotonic()
        if self.silent and not self.patient:
            self.open = False

    def _reconnect(self, listener: socket.socket) -> None:
        """Accepts a new connection, and resends messages that the launcher has not received."""
        passed_by, _ = listener.accept()
        passed_by.settimeout(PASS_ON_S)
        with contextlib.suppress(OSError, ValueError):
            count, descriptors, _, _ = socket.recv_fds(passed_by, 16, 3)
            for descriptor, own in zip(descriptors, (0, self._output, 2), strict=True):
                os.dup2(descriptor, own)
                os.close(descriptor)
            if self._passed_by:
                self._passed_by.close()
            self._passed_by, self.connected = passed_by, True
            self.last_received = time.monotonic()
            self._lines.acknowledge(int(count))
            self._lines.disconnect()
            self._write(self._lines.add(messages.Reconnected(self._lines.received)) + self._lines.unacknowledged)


def forward_streams(path: str, received: str) -> int:
    """Passes the standard streams and the count of `received` messages to the agent's socket, until it is closed."""
    with socket.socket(socket.AF_UNIX) as agent:
        try:
            agent.connect(path)
            socket.send_fds(agent, [received.encode()], [0, 1, 2])
            agent.recv(1)
        except OSError:
            os.write(2, b"the agent has ended\n")
            return NO_AGENT
    return 0


if __name__ == "__main__":
    sys.exit(forward_streams(*sys.argv[1:]))

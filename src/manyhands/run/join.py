"""The launcher as a process: detached from the terminal, and asked to add machines at a socket in its run folder."""

import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.hosts.formats import hostfile
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import Lines, Message, encode
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.files import private_files
from manyhands.core.resuming import resume_command
from manyhands.core.stops import STOPS, handled
from manyhands.core.terminal import show, show_json
from manyhands.run.registry import find_run, head_of_active

SOCKET, LOG = "head.sock", "head.log"
Notify = Callable[[str, bool], object]


@dataclass(frozen=True)
class AskToJoin(Message):
    """A request to add this machine, as a user writes it."""

    host: str


@dataclass(frozen=True)
class JoinStatus(Message):
    """The answer to it."""

    text: str
    takes_part: bool


@contextmanager
def join_listener(
    folder: Path, on_request: Callable[[Machine, Notify], None], say: Callable[[str, str], object]
) -> Generator[Callable[[], None]]:
    """Opens the socket while the block runs, and gives a function that is to be called often and never waits.

    Args:
        folder: the run folder.
        on_request: called with each requested machine and whom to notify; raises ManyhandsError to refuse it.
        say: prints a sentence, with its log level.
    """
    path, clients = folder / SOCKET, dict[socket.socket, Lines]()
    with ExitStack() as stack:
        try:
            path.unlink(missing_ok=True)
            listener = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            listener.setblocking(False)
            with _short(path) as short:
                listener.bind(short)
            path.chmod(0o600)
            listener.listen()
        except OSError as error:
            say(f"manyhands join can't add machines to this run: {error.strerror} ({path})", "WARNING")
            listener = None
        if listener is None:
            yield lambda: None
            return

        def tick() -> None:
            with suppress(OSError):  # there is no new client, or no more files can be opened now
                while True:
                    client = listener.accept()[0]
                    client.setblocking(False)
                    clients[client] = Lines()
            for client in list(clients):
                with suppress(BlockingIOError):
                    _read(client, clients, on_request)

        try:
            yield tick
        finally:
            path.unlink(missing_ok=True)
            for client in clients:
                client.close()


def _read(client: socket.socket, clients: dict[socket.socket, Lines], on_request: Callable[..., None]) -> None:
    """Reads a client's request and forwards it."""

    def notify(text: str, takes_part: bool) -> None:
        with suppress(OSError):  # the client may have gone
            client.sendall(encode(JoinStatus(text, takes_part)))
        disconnect()

    def disconnect() -> None:
        clients.pop(client, None)
        client.close()

    try:
        received = client.recv(1 << 16)
    except ConnectionError:
        received = b""
    lines = clients[client]
    requests = [message for _, message in lines.take(received) if isinstance(message, AskToJoin)]
    if not requests:
        if not received or lines.too_long:
            disconnect()
        return
    try:
        (machine,) = hostfile.read_list(requests[0].host, "--host").machines
        on_request(machine, notify)
    except ManyhandsError as error:
        notify("; ".join([error.message, *error.hints]), False)
    except ValueError:
        notify("join adds one machine at a time", False)


@contextmanager
def _short(path: Path) -> Generator[str]:
    """Gives a path of the socket that fits into the system's limit of about a hundred bytes."""
    if len(os.fsencode(path)) < 100 or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def join_here(run: str, host: str) -> str:
    """Asks the launcher of a run, on this machine, to add another machine, and waits until that has joined.

    Raises:
        UserError: there is no such run, or it can't add machines.
        RunError: the machine can't join; the error has the reason.
    """
    found = find_run(run, active=True)
    folder = found.path
    if not (folder / SOCKET).exists() and not (head := head_of_active(found)).here:
        hints = (f"run this on {head.host}: manyhands join {shlex.quote(run)} --host {host}",)
        raise UserError(f"{head.name} was launched from {head.host}", head.run, hints)
    with socket.socket(socket.AF_UNIX) as head:
        try:
            with _short(folder / SOCKET) as short:
                head.connect(short)
        except OSError:
            hints = ("name an active run that was started by manyhands launch",)
            raise UserError("the launcher of the run does not answer", str(folder), hints) from None
        head.sendall(encode(AskToJoin(host)))
        lines = Lines()
        while received := head.recv(1 << 16):
            for _, message in lines.take(received):
                if isinstance(message, JoinStatus):
                    if message.takes_part:
                        return message.text
                    raise RunError(message.text, host)
    raise RunError(f"the run ended before {host} joined", str(folder))


class Background:
    """Forks this process. The child, in which `elsewhere` is 0, launches the run; the parent waits.

    Attributes:
        elsewhere: the process id of the child, in the parent.
    """

    def __init__(self) -> None:
        self._heard, self._writer = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Signals that arrive before `wait` handles them are passed on then.
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.elsewhere = os.fork()
        if not self.elsewhere:
            os.setsid()  # Ctrl-C and the end of the terminal don't reach this process
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(self._heard)
            self._left = False
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)

    def leave(self, run: Path) -> None:
        """Leaves the terminal and writes further messages into the run folder; a second call changes nothing."""
        if self._left:
            return
        self._left = True
        with private_files(), (run / LOG).open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        os.write(self._writer, os.fsencode(run))
        os.close(self._writer)

    def wait(self, *, as_json: bool) -> int:
        """Waits until the run trains or has ended, and passes signals on to the launcher; returns the exit code."""
        os.close(self._writer)
        with handled(lambda number, _frame: os.kill(self.elsewhere, number)), os.fdopen(self._heard, "rb") as heard:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)
            run = Path(os.fsdecode(heard.read()))
            if not run.name:
                return os.waitstatus_to_exitcode(os.waitpid(self.elsewhere, 0)[1]) & 0xFF
        if as_json:
            show_json({"run": str(run), "status": "running", "pid": self.elsewhere, "log": str(run / LOG)})
            return 0
        lines = [
            f"{run} keeps training without this terminal; launcher log: {run / LOG}",
            f"to stop: manyhands stop {run}",
            f"to resume on another machine of the run, if this machine is lost: {resume_command(run)}",
        ]
        show(lines)
        return 0

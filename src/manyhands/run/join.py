"""A machine more for a run that goes on, asked for at a socket file in the run folder of its head."""

import os
import shlex
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.hosts.formats import hostfile
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import Lines, Message, encode
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.run.find import find_run, head_of_active

SOCKET = "head.sock"
Notify = Callable[[str, bool], object]


@dataclass(frozen=True)
class AskToJoin(Message):
    """This machine is to take part, as a user writes it."""

    host: str


@dataclass(frozen=True)
class JoinStatus(Message):
    """What became of that."""

    text: str
    takes_part: bool


class JoinListener:
    """The head's end of the socket. Nothing here waits.

    Args:
        folder: the run's.
        on_request: called with each requested machine and whom to notify; raises ManyhandsError to refuse it.
    """

    def __init__(self, folder: Path, on_request: Callable[[Machine, Notify], None]) -> None:
        self._path, self._on_request = folder / SOCKET, on_request
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        with _short(self._path) as short:
            self._listener.bind(short)
        self._path.chmod(0o600)
        self._listener.listen()
        self._open: dict[socket.socket, Lines] = {}

    def tick(self) -> None:
        """Hears who has come."""
        with suppress(OSError):  # nobody has come, or no more files can be open just now
            while True:
                come = self._listener.accept()[0]
                come.setblocking(False)
                self._open[come] = Lines()
        for one in list(self._open):
            with suppress(BlockingIOError):
                self._hear(one)

    def _hear(self, one: socket.socket) -> None:
        try:
            received = one.recv(1 << 16)
        except ConnectionError:
            received = b""
        lines = self._open[one]
        asked = [message for _, message in lines.take(received) if isinstance(message, AskToJoin)]
        if asked:
            self._asked(one, asked[0].host)
        elif not received or lines.too_long:
            self._let_go(one)

    def _asked(self, one: socket.socket, host: str) -> None:
        def notify(text: str, takes_part: bool) -> None:
            with suppress(OSError):  # who asked may have gone
                one.sendall(encode(JoinStatus(text, takes_part)))
            self._let_go(one)

        try:
            (machine,) = hostfile.read_list(host, "--host").machines
            self._on_request(machine, notify)
        except ManyhandsError as error:
            notify("; ".join([error.message, *error.hints]), False)
        except ValueError:
            notify("join adds one machine at a time", False)

    def _let_go(self, one: socket.socket) -> None:
        self._open.pop(one, None)
        one.close()

    def close(self) -> None:
        """Takes the socket away."""
        self._path.unlink(missing_ok=True)
        for one in [self._listener, *self._open]:
            one.close()


@contextmanager
def join_listener(
    folder: Path, on_request: Callable[[Machine, Notify], None], say: Callable[[str, str], object]
) -> Generator[Callable[[], None]]:
    """Opens the socket for as long as the block lasts; gives what is to be called often."""
    try:
        door = JoinListener(folder, on_request)
    except OSError as error:
        say(f"manyhands join can't add machines to this run: {error.strerror} ({folder / SOCKET})", "WARNING")
        yield lambda: None
        return
    try:
        yield door.tick
    finally:
        door.close()


@contextmanager
def _short(path: Path) -> Generator[str]:
    """A socket's path as the system takes it, which is little more than a hundred bytes long."""
    if len(os.fsencode(path)) < 100 or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def join_here(run: str, host: str) -> str:
    """Has a run whose head is on this machine take up another machine; waits until it does.

    Raises:
        UserError: there is no such run, or it takes nobody.
        RunError: the machine doesn't take part; why is in it.
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
                if isinstance(message, JoinStatus) and message.takes_part:
                    return message.text
                if isinstance(message, JoinStatus):
                    raise RunError(message.text, host)
    raise RunError(f"the run ended before {host} joined", str(folder))

"""The agent's process on each machine, this one too: answers its head's questions, and starts the workers.

Started as `python -m manyhands.cluster.host`, here or over ssh. Standard input brings one JSON object a line,
standard output takes one JSON object a line; the end of standard input means that the head is gone. Nothing here
unpickles what comes from outside. It imports torch only when the workers are to be started.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import platformdirs

from manyhands.cluster.facts.load import cores
from manyhands.cluster.link import SILENT_S
from manyhands.cluster.mirror import Sender
from manyhands.cluster.orders import Orders
from manyhands.cluster.probe import Probe
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.folder import use_run_folder
from manyhands.core.outside import parse_json
from manyhands.parallel.ports import listen

Request = dict[str, Any]
# Lines that are shown of what a killed process wrote.
LAST_WORDS = 8
# Looks for new records so often.
MIRROR_S = 0.4
# Of a log, so much in one answer.
LOG_BYTES = 1 << 20
# Code beyond this is data, which isn't ours to carry.
CODE_BYTES = 32 * 1024 * 1024


class Wire:
    """This end of the conversation; read without waiting and without a thread, since workers are forked.

    Attributes:
        open: False once the head has closed its end, or has been silent for too long.
        heard: when the head was last heard of, by the monotonic clock.
        remote: True where the head is on another machine, so that its silence means something.
    """

    def __init__(self, output: int) -> None:
        self._output, self._rest = output, b""
        self.open, self.heard, self.remote = True, time.monotonic(), False

    def tell(self, kind: str, **content: Any) -> None:
        """Sends one object; a head that is gone hears nothing."""
        data = memoryview(json.dumps({"kind": kind, **content}).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while data and self._has_room():
                data = data[os.write(self._output, data[: select.PIPE_BUF]) :]

    def _has_room(self) -> bool:
        """Waits until the head takes something; one that is elsewhere and takes nothing for too long is gone."""
        while self.open and not select.select([], [self._output], [], SILENT_S)[1]:
            self.open = not self.remote
        return self.open

    def wait(self) -> Request | None:
        """The next request, or None when the head is gone."""
        while self.open:
            request = self._next()
            if request is not None:
                return request
            self._fill(1.0)
        return None

    def poll(self) -> list[Request]:
        """The requests that have come, without waiting."""
        self._fill(0)
        found: list[Request] = []
        while (request := self._next()) is not None:
            found.append(request)
        return found

    def _next(self) -> Request | None:
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            request = parse_json(line, infinite=True)
            if request.get("do") != "alive":
                return request
            self.tell("alive")
        return None

    def _fill(self, patience_s: float) -> None:
        while self.open and select.select([0], [], [], patience_s)[0]:
            received = os.read(0, 1 << 16)
            self.open = bool(received)
            self._rest += received
            self.heard = time.monotonic()
            patience_s = 0
        # sshd may not notice for hours that the other side has gone.
        if self.remote and time.monotonic() - self.heard > SILENT_S:
            self.open = False


class Host:
    """What a head may ask of this machine.

    Args:
        wire: the conversation.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._listener: socket.socket | None = None
        self._sender: Sender | None = None
        self._probes = Probe()
        self._mirror_at = 0.0
        self._until_gone = contextlib.ExitStack()
        self._answers: dict[str, Callable[[Request], Mapping[str, Any] | None]] = {
            "hello": self._hello,
            "code": self._code,
            "open": self._open,
            "scratch": self._scratch,
            "bind": self._bind,
            "log": self._log,
            "prepare": self._prepare,
            "start": self._start,
            **dict.fromkeys(("listen", "connect", "measure", "unlisten", "clock"), self._probe),
        }

    def serve(self) -> None:
        """Answers until the head is gone."""
        with contextlib.ExitStack() as self._until_gone:
            self._serve()

    def _serve(self) -> None:
        while (request := self.wire.wait()) is not None:
            number = request.pop("id", None)
            try:
                answer = self._answers[request["do"]](request)
            except ManyhandsError as error:
                self.wire.tell("error", id=number, what=error.what, where=error.where, mend=error.mend)
            except Exception as error:  # noqa: BLE001 - the head must hear of whatever went wrong
                text = f"{type(error).__name__}: {error}"
                self.wire.tell("error", id=number, what=text, traceback=traceback.format_exc())
            else:
                if answer is not None:
                    self.wire.tell("answer", id=number, **answer)

    def tick(self) -> list[str]:
        """To be called often while workers run: what the head commands meanwhile; records go to the head."""
        words = [str(request.get("do")) for request in self.wire.poll()]
        if self._sender and time.monotonic() > self._mirror_at:
            self._mirror_at = time.monotonic() + MIRROR_S
            self.send_records()
        return words

    def send_records(self) -> bool:
        """Sends what is new in the run folder; True if there was something."""
        pieces = list(self._sender.news()) if self._sender else []
        for piece in pieces:
            self.wire.tell("file", **piece)
        return bool(pieces)

    def _hello(self, request: Request) -> Mapping[str, Any]:
        """Facts about this machine; from now on a silent head is a head that is gone, if it is elsewhere."""
        from manyhands.cluster.facts import gather

        self.wire.remote = bool(request.get("remote"))
        return {"facts": gather(request)}

    def _probe(self, request: Request) -> Mapping[str, Any]:
        """Is reached, reaches others, or measures the way to one of them."""
        return self._probes.answer(request)

    def _code(self, request: Request) -> Mapping[str, Any]:
        """Puts the head's code into a folder named after its content, and works there."""
        files = _checked_files(request["files"])
        digest = hashlib.sha256(json.dumps(request["files"], sort_keys=True).encode()).hexdigest()[:16]
        folder = platformdirs.user_cache_path("manyhands") / "code" / digest
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                temporary.write_bytes(content)
                temporary.replace(path)
        os.chdir(folder)
        return {"folder": str(folder)}

    def _open(self, request: Request) -> Mapping[str, Any]:
        """Makes the run folder here, unless this machine sees the head's own."""
        path = Path(request["folder"]).expanduser().absolute()
        shared = (path / "ranks" / request["token"]).is_file()
        folder = use_run_folder(path)
        folder.failures.mkdir(parents=True, exist_ok=True)
        if not shared:
            for stale in folder.failures.glob("*.json"):
                stale.unlink()
        if request["records"] and not shared:
            self._sender = Sender(path, request["held"])
        return {"folder": str(path), "shared": shared, "checkpoints": folder.has_checkpoints()}

    def _scratch(self, _request: Request) -> Mapping[str, Any]:
        """A folder that goes again when the head does."""
        folder = tempfile.mkdtemp(prefix="manyhands-")
        self._until_gone.callback(shutil.rmtree, folder, ignore_errors=True)
        return {"folder": folder}

    def _log(self, request: Request) -> Mapping[str, Any]:
        """What has come to a file since `offset`: whole lines, with `rest` the last one without its end too."""
        path = Path(request["path"]).expanduser()
        text = b""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(request["offset"])
                text = file.read(LOG_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        if len(text) == LOG_BYTES:
            text = whole or text  # a line that is longer than an answer comes in pieces
        elif not request["rest"]:
            text = whole
        return {"text": text.decode(errors="replace"), "offset": request["offset"] + len(text)}

    def _bind(self, request: Request) -> Mapping[str, Any]:
        """Listens for the workers of all machines, on one address; the store is served there later."""
        self._listener = listen(request["address"], request.get("port", 0))
        return {"port": self._listener.getsockname()[1]}

    def _prepare(self, request: Request) -> Mapping[str, Any]:
        """Imports what the workers need, and says how many processes this machine takes."""
        set_threads(request["threads"], request["size"])
        from manyhands.cluster.agent import prepare

        return prepare(request["device"], request["preload"])

    def _start(self, request: Request) -> None:
        """Starts the workers and watches them to their end; the answer is the event "ended"."""
        self._probes.close()
        orders = Orders(**{name: value for name, value in request.items() if name != "do"})
        set_threads(orders.threads, orders.sizes[orders.machine])
        from manyhands.cluster.agent import run

        if self._listener is None and orders.machine == 0:
            self._listener = listen(orders.address, orders.port)
        listener, self._listener = self._listener, None
        ended = run(orders, self, listener)
        while self.send_records():
            pass
        self.wire.tell("ended", generation=orders.generation, **ended, words=_last_words(Path(orders.logs), ended))


def set_threads(threads: int, size: int) -> None:
    """OpenMP reads its number of threads once, when torch is loaded; so it is set before, where it can be known."""
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif size and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(cores() / size)))


def _last_words(logs: Path, ended: Mapping[str, Any]) -> dict[int, str]:
    """The end of the logs of those processes of this machine that failed and left no record."""
    spoke = {record["rank"] for record in ended.get("records", [])}
    words: dict[int, str] = {}
    for rank in set(ended["failed"]) - spoke:
        with contextlib.suppress(OSError):
            lines = (logs / f"{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            words[rank] = "\n".join(lines[-LAST_WORDS:])
    return words


def _checked_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a head's code by their path, which must stay inside the folder."""
    found: dict[str, bytes] = {}
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise UserError(f"the path {name!r} leads out of the folder")
        try:
            found[name] = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise UserError(f"{name} did not arrive whole") from None
    if sum(map(len, found.values())) > CODE_BYTES:
        raise UserError(f"more than {CODE_BYTES >> 20} MiB of code")
    return found


def main() -> None:
    """Serves the head on standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not come between our lines.
    output = os.dup(1)
    os.dup2(2, 1)
    Host(Wire(output)).serve()


if __name__ == "__main__":
    main()

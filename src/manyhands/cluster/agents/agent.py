"""The agent's process on each machine, this one too: answers its head's questions, and starts the workers.

Started as `python -m manyhands.cluster.agents.agent`, here or over ssh. Standard input brings messages and standard
output takes them; the end of standard input means that the head is gone. It imports torch only when the workers are to
be started, or where it was started before the job was known.
"""

import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
from filelock import Timeout

from manyhands.cluster.agents.claim import Term, agent_has_left, claim, raise_term, run_id, set_run_id, term_in
from manyhands.cluster.agents.code_there import checked_files, write_code
from manyhands.cluster.agents.early import EARLY
from manyhands.cluster.agents.mirror import Receiver, Sender
from manyhands.cluster.agents.orders import AHEAD, ELASTIC, PRELOAD
from manyhands.cluster.agents.own_tunnels import Tunnels
from manyhands.cluster.agents.protocol import (
    Bind,
    Bound,
    FolderThere,
    Greeting,
    Hello,
    InspectRun,
    KeepRecords,
    LogText,
    MakeScratch,
    OpenRun,
    OpenTunnelEnds,
    OpenTunnels,
    Prepare,
    Prepared,
    ReachThere,
    ReadLog,
    RunInspected,
    RunOpened,
    StartWorkers,
    TakeCode,
    TunnelEnded,
    TunnelsOpened,
    WorkersEnded,
)
from manyhands.cluster.agents.short_spins import short_spins
from manyhands.cluster.agents.wire import Wire
from manyhands.cluster.doctor.probe import Probe
from manyhands.cluster.messages import Done, Message, RequestFailed
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.files import private_files
from manyhands.core.machine import cores
from manyhands.core.resuming import saved_steps
from manyhands.core.run_folder import RunFolder, use_run_folder, writing_into
from manyhands.core.scratch import scratch
from manyhands.core.terminal import say
from manyhands.core.timeouts import CLAIM_S, MAKE_WAY_S
from manyhands.parallel.ports import listen
from manyhands.parallel.tunnel_ends import reach

# Looks for new records so often.
MIRROR_S = 0.4
# Of a log, so much in one answer.
LOG_BYTES = 1 << 20


class Agent:
    """What a head may ask of this machine.

    Args:
        wire: the conversation.
        until_gone: what is given back once the head is gone.
    """

    def __init__(self, wire: Wire, until_gone: contextlib.ExitStack) -> None:
        self.wire, self._until_gone = wire, until_gone
        self._listener: socket.socket | None = None
        self._sender: Sender | None = None
        self._claimed: set[Path] = set()
        self._keepers: dict[str, Receiver] = {}
        self._probes = Probe()
        self._mirror_at, self._started, self._alone = 0.0, False, False
        self._tunnels, self._tunnel_reported, self._socket = Tunnels(), False, ""
        until_gone.callback(self._tunnels.close)
        self.answers: dict[type[Message], Callable[[Any], Message]] = {
            Hello: self._hello,
            TakeCode: self._take_code,
            OpenRun: self._open,
            InspectRun: self._look,
            KeepRecords: self._keep,
            MakeScratch: self._scratch,
            Bind: self._bind,
            OpenTunnelEnds: self._open_tunnel_ends,
            OpenTunnels: lambda request: TunnelsOpened(self._tunnels.open_tunnels(request.commands, request.seconds)),
            ReachThere: self._reach_there,
            ReadLog: self._log,
            Prepare: self._prepare,
            StartWorkers: self._start,
            **self._probes.answers,
        }

    def tick(self) -> list[Message]:
        """To be called often while workers run: what the head commands meanwhile; records go to the head."""
        commands: list[Message] = []
        for message in self.wire.poll():
            if isinstance(message, KeepRecords):
                self._keep_copy(message)
            else:
                commands.append(message)
        if self._sender and time.monotonic() > self._mirror_at and self.wire.connected and not self.wire.silent:
            self._mirror_at = time.monotonic() + MIRROR_S
            self.send_records()
        self._report_tunnels()
        alone = self.wire.remote and not (self.wire.open and self.wire.connected)
        if alone and not self._alone:
            with Path(os.devnull).open("wb") as nothing:  # nobody reads the end of the lost connection
                os.dup2(nothing.fileno(), 2)
        self._alone = alone
        return commands

    def _report_tunnels(self) -> None:
        if not self._tunnel_reported and (what := self._tunnels.ended()):
            self._tunnel_reported = True
            self.wire.send(TunnelEnded(what))

    def send_records(self) -> bool:
        """Sends what is new in the run folder; True if there was something."""
        pieces = list(self._sender.news()) if self._sender else []
        for piece in pieces:
            self.wire.send(piece)
        return bool(pieces)

    def _hello(self, request: Hello) -> Greeting:
        from manyhands.cluster.doctor.facts import gather

        self.wire.remote = request.remote
        if request.remote and not self._socket:
            # No other connection is possible where the temporary folder is full or its path too long.
            with contextlib.suppress(OSError):
                self._socket = self.wire.listen(self._until_gone.enter_context(scratch("wire")))
        return Greeting(gather(request.wanted), self._socket)

    def _take_code(self, request: TakeCode) -> FolderThere:
        """Puts the head's code into a folder named after its content, of this user alone, and works there."""
        files = checked_files(request.files)
        digest = hashlib.sha256(json.dumps(request.files, sort_keys=True).encode()).hexdigest()[:16]
        folder = platformdirs.user_cache_path("manyhands") / "code" / digest
        with private_files():
            write_code(folder, files)
        os.chdir(folder)
        return FolderThere(str(folder))

    def _open(self, request: OpenRun) -> RunOpened:
        """Makes the run folder here, unless this machine sees the head's own, and keeps other runs out of it.

        A folder with checkpoints keeps its id, for the head to compare.
        """
        with private_files():
            return self._open_run(Path(request.folder).expanduser().absolute(), request)

    def _open_run(self, path: Path, request: OpenRun) -> RunOpened:
        shared = (path / "ranks" / request.token).is_file()
        folder = RunFolder(path)
        term = self._term(folder, request.run, Term(request.term))
        # What a machine saved that had not rank 0 lies there without the run's job.
        if run_id(folder) != request.run:
            use_run_folder(path)
        self._sender = None
        found: str | None = ""
        if not shared and not term > request.term > 0:
            with writing_into(path):
                found = self._claim(folder, request)
            if found is not None and request.records:
                self._sender = Sender(path, request.held, output=request.output)
        # A process that made way has saved by now. Steps in the records may be saved on another machine.
        saved = max(saved_steps(folder), default=-1)
        return RunOpened(
            str(path), shared, folder.has_checkpoints(), found is None, found or "",
            saved, Receiver(path).held(), path in self._claimed, term,
        )  # fmt: skip

    def _look(self, request: InspectRun) -> RunInspected:
        folder = RunFolder(Path(request.folder).expanduser().absolute())
        term = self._term(folder, request.run, Term(request.term, request.generation + 1))
        busy = not agent_has_left(folder.ranks, request.machine, request.generation)
        return RunInspected(run_id(folder), folder.has_checkpoints(), busy, term)

    def _term(self, folder: RunFolder, run: str, wanted: Term) -> int:
        """Of a detached run the highest head that is known here, this one among them."""
        ours = wanted.head and run_id(folder) in ("", run)
        return (raise_term(folder.ranks, wanted) if ours else term_in(folder.ranks)).head

    def _claim(self, folder: RunFolder, request: OpenRun) -> str | None:
        """Locks the run folder until this agent ends; the id of the run that it holds, None where another has it."""
        folder.failures.mkdir(parents=True, exist_ok=True)
        try:
            waits = (MAKE_WAY_S, MAKE_WAY_S) if request.term else (CLAIM_S,)
            lock = claim(folder, request.holder, *waits)
        except Timeout:
            return None
        if lock:
            self._until_gone.callback(lock.release)
            self._claimed.add(folder.path)
        found = run_id(folder)
        if found != request.run and not (found and folder.has_checkpoints()):
            set_run_id(folder, request.run)
        for stale in folder.failures.glob("*.json"):
            stale.unlink()
        return found

    def _keep(self, request: KeepRecords) -> FolderThere:
        keeper = self._keepers.setdefault(request.folder, Receiver(Path(request.folder)))
        with private_files():
            for piece in request.pieces:
                keeper.take(piece)
        return FolderThere(request.folder)

    def _keep_copy(self, request: KeepRecords) -> None:
        """A run doesn't end where the copy of its records can't be kept; the next start gives them whole."""
        try:
            self._keep(request)
        except (OSError, ValueError) as error:
            del self._keepers[request.folder]
            say(f"can't update the copy of the run's records: {error}", "agent")

    def _scratch(self, _request: MakeScratch) -> FolderThere:
        return FolderThere(str(self._until_gone.enter_context(scratch("probe"))))

    def _log(self, request: ReadLog) -> LogText:
        path = Path(request.path).expanduser()
        text = b""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(request.offset)
                text = file.read(LOG_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        if len(text) == LOG_BYTES:
            text = whole or text  # a line that is longer than an answer comes in pieces
        elif not request.rest:
            text = whole
        return LogText(text.decode(errors="replace"), request.offset + len(text))

    def _bind(self, request: Bind) -> Bound:
        self._listener = listen(request.address, request.port)
        return Bound(self._listener.getsockname()[1])

    def _open_tunnel_ends(self, request: OpenTunnelEnds) -> FolderThere:
        self._tunnel_reported = False
        return FolderThere(self._tunnels.open(request.address))

    def _reach_there(self, request: ReachThere) -> Done:
        reach(self._tunnels.ends, request.address, request.port)
        return Done()

    def _prepare(self, request: Prepare) -> Prepared:
        set_threads(request.threads, request.size)
        with self.wire.watched(self._until_gone.close), importing():
            from manyhands.cluster.agents.elastic import prepare

            return prepare(request.device)

    def _start(self, request: StartWorkers) -> WorkersEnded:
        self._probes.close()
        orders = request.orders
        set_threads(orders.threads, orders.rendezvous.sizes[orders.rendezvous.machine])
        gc.collect()  # what an earlier start has left, with its open files
        with (
            self.wire.watched(self._until_gone.close),
            contextlib.nullcontext() if self._started else importing(),
        ):
            from manyhands.cluster.agents.elastic import preload, run

            preload(orders)
        if self._listener is None and orders.rendezvous.machine == 0 and not orders.rendezvous.file:
            self._listener = listen(orders.rendezvous.address, orders.rendezvous.port)
        if self._tunnels.ends.address:
            reach(self._tunnels.ends, orders.rendezvous.address, orders.rendezvous.port)
        listener, self._listener = self._listener, None
        self._started = True
        mine = Term(orders.term, orders.generation)
        if orders.term and raise_term(Path(orders.logs), mine) > mine:
            raise UserError("another launcher has taken over the run")
        self.wire.patient = orders.term > 0
        ended = run(orders, self.wire, self.tick, listener)
        self.wire.patient = False
        self._report_tunnels()
        while self.send_records():
            pass
        return replace(ended, host=platform.node())


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Looks for no garbage meanwhile: among torch's modules that takes a quarter of a second, and there is none.

    Nor later among what is there by then, so that workers that are forked go on sharing its memory.
    """
    gc.disable()
    try:
        with short_spins():
            yield
    finally:
        gc.freeze()
        gc.enable()


def import_early() -> None:
    """Imports what workers need before the job is known, then moves this agent's output to the launcher's log.

    Ends this process where the launcher has ended or needs no agent.
    """
    # An import that fails here fails again where it is used, and is reported there.
    with contextlib.suppress(Exception):
        for name in (ELASTIC, PRELOAD, AHEAD):
            importlib.import_module(name)
    path = b""
    while not path.endswith(b"\0"):
        if not (read := os.read(0, 1)):  # no more than the path: what follows it are messages
            os._exit(0)
        path += read
    log = os.open(os.fsdecode(path[:-1]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(2, "rb", closefd=False) as words:
        words.seek(0)
        output = words.read()
    os.dup2(log, 2)
    os.close(log)
    os.write(2, output)


def set_threads(threads: int, size: int) -> None:
    """OpenMP reads its number of threads once, when torch is loaded; so it is set before, where it can be known."""
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif size and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(cores() / size)))


def serve() -> None:
    """Serves the head on standard input and output, until it is gone."""
    # The head hears them and says what is to be done.
    for stop in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    # What libraries print must not come between our lines.
    output = os.dup(1)
    os.dup2(2, 1)
    wire = Wire(output)
    with contextlib.ExitStack() as until_gone:
        answers = Agent(wire, until_gone).answers
        while (come := wire.wait()) is not None:
            number, request = come
            if type(request) not in answers:
                continue  # a wish to stop that came too late
            try:
                wire.send(answers[type(request)](request), number)
            except ManyhandsError as error:
                wire.send(RequestFailed(error.message, error.where, error.hints), number)
            except Exception as error:  # noqa: BLE001 - the head must hear of whatever went wrong
                what = f"{type(error).__name__}: {error}"
                wire.send(RequestFailed(what, traceback=traceback.format_exc()), number)
    # All is said and cleaned up. Python's own end would take torch down piece by piece, while the user waits for it.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if EARLY in sys.argv:
        with importing():
            import_early()
    serve()

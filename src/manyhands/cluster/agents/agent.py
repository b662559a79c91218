"""The agent's process on each machine, this one too: answers its launcher's requests, and starts the workers.

Started as `python -m manyhands.cluster.agents.agent`, here or over ssh. It receives messages on standard input, which
the launcher closes when it ends, and sends on standard output. It imports torch only when it starts workers, or where
it was started before the job was known.
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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from filelock import Timeout

from manyhands.checkpoint.folders import saved_steps
from manyhands.cluster.agents import protocol
from manyhands.cluster.agents.claim import Term, agent_has_left, claim, raise_term, run_id, set_run_id, term_in
from manyhands.cluster.agents.connection import Wire
from manyhands.cluster.agents.early import EARLY
from manyhands.cluster.agents.mirror import Receiver, Sender
from manyhands.cluster.agents.protocol import ELASTIC, PRELOAD, Orders
from manyhands.cluster.doctor.findings import FactsWanted
from manyhands.cluster.doctor.probe import Probe
from manyhands.cluster.folders import use_run_folder, writing_into
from manyhands.cluster.messages import Call, Message, perform, remote, reply_to
from manyhands.core.errors import UserError
from manyhands.core.files import private_files, read_growing
from manyhands.core.machine import cores
from manyhands.core.run_folder import RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.terminal import say
from manyhands.core.timeouts import CLAIM_S, MAKE_WAY_S
from manyhands.parallel.group.ports import listen
from manyhands.parallel.group.tunnel_ends import reach

if TYPE_CHECKING:
    from manyhands.cluster.agents.tunnel import Tunnels

# Interval between two looks for new records; limit for the part of a log in one answer.
MIRROR_S, LOG_BYTES = 0.4, 1 << 20


class Agent(Probe):
    """This machine as a launcher uses it: the remote methods are the protocol between them."""

    def __init__(self, wire: Wire, until_gone: contextlib.ExitStack) -> None:
        super().__init__()
        self.wire, self._until_gone = wire, until_gone  # the stack is closed once the launcher is gone
        self._listener: socket.socket | None = None
        self._sender: Sender | None = None
        self._claimed: set[Path] = set()
        self._keepers: dict[str, Receiver] = {}
        self._mirror_at, self._started, self._alone = 0.0, False, False
        self._tunnels: Tunnels | None = None  # of the last start
        self._tunnel_reported, self._reachable = False, False
        until_gone.callback(lambda: self._tunnels and self._tunnels.close())

    def tick(self) -> list[Message]:
        """Sends new records and returns the launcher's commands; called often while workers run."""
        commands: list[Message] = []
        for message in self.wire.poll():
            if not isinstance(message, Call):
                commands.append(message)
            elif message.method == Agent.keep_records.__name__:
                self._keep_copy(message)
        if self._sender and time.monotonic() > self._mirror_at and self.wire.connected and not self.wire.silent:
            self._mirror_at = time.monotonic() + MIRROR_S
            self._send_records()
        self._report_tunnels()
        alone = self.wire.remote and not (self.wire.open and self.wire.connected)
        if alone and not self._alone:
            with Path(os.devnull).open("wb") as nothing:  # nobody reads the end of the lost connection
                os.dup2(nothing.fileno(), 2)
        self._alone = alone
        return commands

    def _report_tunnels(self) -> None:
        if self._tunnels and not self._tunnel_reported and (what := self._tunnels.ended()):
            self._tunnel_reported = True
            self.wire.send(protocol.TunnelEnded(what))

    def _send_records(self) -> bool:
        """Sends what is new in the run folder; returns False if there is nothing."""
        pieces = list(self._sender.news()) if self._sender else []
        for piece in pieces:
            self.wire.send(piece)
        return bool(pieces)

    @remote
    def hello(self, wanted: FactsWanted, remote_launcher: bool = False) -> dict[str, Any]:
        """Returns the facts about this machine. From now on a launcher on another machine that is silent is lost."""
        from manyhands.cluster.doctor.facts import gather

        self.wire.remote = remote_launcher
        if remote_launcher and not self._reachable:
            # No other connection is possible where the temporary folder is full or its path too long.
            with contextlib.suppress(OSError):
                self.wire.send(protocol.Reachable(self.wire.listen(self._until_gone.enter_context(scratch("wire")))))
                self._reachable = True
        return gather(wanted)

    @remote
    @private_files()
    def take_code(self, files: dict[str, str]) -> str:
        """Writes the launcher's code (base64, by path) into a folder named after its content, and works there."""
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        folder = platformdirs.user_cache_path("manyhands") / "code" / digest
        from manyhands.cluster.code_files import write_code

        write_code(folder, files)
        os.chdir(folder)
        return str(folder)

    @remote
    @private_files()
    def open_run(self, wanted: protocol.OpenRun) -> protocol.RunOpened:
        """Makes the run folder here, unless this machine sees the launcher's own, and keeps other runs out of it.

        A folder with checkpoints keeps its id, for the launcher to compare.
        """
        path = Path(wanted.folder).expanduser().absolute()
        folder, shared = RunFolder(path), (path / "ranks" / wanted.token).is_file()
        term = self._term(folder, wanted.run, Term(wanted.term))
        # What a machine saved that had not rank 0 lies there without the run's job.
        if run_id(folder) != wanted.run:
            use_run_folder(path)
        self._sender, found = None, ""
        if not shared and not term > wanted.term > 0:
            with writing_into(path):
                found = self._claim(folder, wanted)
            if found is not None and wanted.held is not None:
                self._sender = Sender(path, wanted.held, output=wanted.output)
        # A process that made way has saved by now. Steps in the records may be saved on another machine.
        saved, held = max(saved_steps(folder), default=-1), Receiver(path).held()
        checkpoints, own = folder.has_checkpoints(), path in self._claimed
        return protocol.RunOpened(str(path), shared, checkpoints, found is None, found or "", saved, held, own, term)

    @remote
    def inspect_run(
        self, folder: str, machine: int, generation: int, run: str = "", term: int = 0
    ) -> protocol.RunInspected:
        """Returns what is in a run folder, and whether the processes of this machine in an earlier start have exited.

        `machine` is the place in that start, `generation` its number. Agents of a lower `term` have their workers exit.
        """
        found = RunFolder(Path(folder).expanduser().absolute())
        highest = self._term(found, run, Term(term, generation + 1))
        busy = not agent_has_left(found.ranks, machine, generation)
        return protocol.RunInspected(run_id(found), found.has_checkpoints(), busy, highest)

    def _term(self, folder: RunFolder, run: str, wanted: Term) -> int:
        """Returns the highest launcher number of a detached run that is known here, including this launcher's."""
        ours = wanted.head and run_id(folder) in ("", run)
        return (raise_term(folder.ranks, wanted) if ours else term_in(folder.ranks)).head

    def _claim(self, folder: RunFolder, wanted: protocol.OpenRun) -> str | None:
        """Locks the run folder until this agent ends; returns the run's id, or None if the lock is taken."""
        folder.failures.mkdir(parents=True, exist_ok=True)
        try:
            lock = claim(folder, wanted.holder, *((MAKE_WAY_S, MAKE_WAY_S) if wanted.term else (CLAIM_S,)))
        except Timeout:
            return None
        if lock:
            self._until_gone.callback(lock.release)
            self._claimed.add(folder.path)
        found = run_id(folder)
        if found != wanted.run and not (found and folder.has_checkpoints()):
            set_run_id(folder, wanted.run)
        for stale in folder.failures.glob("*.json"):
            stale.unlink()
        return found

    @remote
    @private_files()
    def keep_records(self, folder: str, pieces: list[protocol.FilePiece]) -> None:
        """Writes these pieces of a run's records into its folder, where rank 0 appends to them."""
        keeper = self._keepers.setdefault(folder, Receiver(Path(folder)))
        for piece in pieces:
            keeper.take(piece)

    def _keep_copy(self, call: Call) -> None:
        """A run does not end where the copy of its records can't be kept; the next start sends all of them."""
        try:
            perform(self, call)
        except (OSError, ValueError) as error:
            self._keepers.clear()
            say(f"can't update the copy of the run's records: {error}", "agent")

    @remote
    def make_scratch(self) -> str:
        """Returns a new folder that is removed when the launcher is gone."""
        return str(self._until_gone.enter_context(scratch("probe")))

    @remote
    def read_log(self, path: str, offset: int, rest: bool) -> tuple[str, int]:
        """Returns the lines of a file from `offset` on, with `rest` also an incomplete last one, and their end."""
        text = read_growing(Path(path).expanduser(), offset, LOG_BYTES, rest=rest)
        return text.decode(errors="replace"), offset + len(text)

    @remote
    def bind(self, address: str, port: int = 0) -> int:
        """Listens for the workers of all machines, on one address; the store is served there later."""
        self._listener = listen(address, port)
        return self._listener.getsockname()[1]

    @remote
    def open_tunnel_ends(self, address: str) -> str:
        """Returns a new folder for the ends of ssh tunnels; the processes listen on `address`, one of loopback."""
        from manyhands.cluster.agents.tunnel import Tunnels

        self._tunnel_reported, self._tunnels = False, self._tunnels or Tunnels()
        return self._tunnels.open(address)

    @remote
    def open_tunnels(self, commands: dict[str, list[str]], seconds: float) -> dict[str, str]:
        """Starts these ssh commands, by the machine that each leads to; returns the last words of those that failed."""
        assert self._tunnels
        return self._tunnels.open_tunnels(commands, seconds)

    @remote
    def prepare(self, size: int, threads: int, device: str) -> protocol.Prepared:
        """Imports what workers need: `size` of them (0: unknown) with so many threads each (0: an equal share)."""
        set_threads(threads, size)
        with self.wire.watched(self._until_gone.close), importing():
            return importlib.import_module(ELASTIC).prepare(device)

    @remote
    def start_workers(self, orders: Orders) -> None:
        """Starts workers; sends `WorkersEnded` when all have ended, and returns."""
        self.unlisten()
        set_threads(orders.threads, orders.rendezvous.sizes[orders.rendezvous.machine])
        gc.collect()  # what an earlier start has left, with its open files
        with self.wire.watched(self._until_gone.close), contextlib.nullcontext() if self._started else importing():
            elastic = importlib.import_module(ELASTIC)
            elastic.preload(orders)
        rendezvous, listener = orders.rendezvous, self._listener
        if listener is None and rendezvous.machine == 0 and not rendezvous.file:
            listener = listen(rendezvous.address, rendezvous.port)
        if self._tunnels and self._tunnels.ends.address:
            reach(self._tunnels.ends, rendezvous.address, rendezvous.port)
        self._listener, self._started = None, True
        mine = Term(orders.term, orders.generation)
        if orders.term and raise_term(Path(orders.logs), mine) > mine:
            raise UserError("another launcher has taken over the run")
        self.wire.patient = orders.term > 0
        ended: protocol.WorkersEnded = elastic.run(orders, self.wire, self.tick, listener)
        self.wire.patient = False
        self._report_tunnels()
        while self._send_records():
            pass
        self.wire.send(replace(ended, host=platform.node()))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports torch in the block without garbage collection, and with short spins of its OpenMP threads.

    Collection takes a quarter of a second and finds nothing; it skips these modules later, too, so that forked workers
    share their memory. libgomp reads its variable once, and its default of 300,000 spins takes milliseconds.
    """
    spins = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}
    if spins:
        os.environ["GOMP_SPINCOUNT"] = "3000"
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if spins:  # child processes have the user's own environment
            os.environ.pop("GOMP_SPINCOUNT", None)


def import_early() -> None:
    """Imports what workers need, then moves this agent's output to the log that the launcher names, or ends with it."""
    # An import that fails here fails again where it is used, and is reported there.
    with contextlib.suppress(Exception):
        importlib.import_module(ELASTIC)
        importlib.import_module(PRELOAD).import_training()
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
    """Sets OpenMP's number of threads, which it reads once, when torch is loaded; does nothing if it isn't known."""
    if threads or (size and "OMP_NUM_THREADS" not in os.environ):
        os.environ["OMP_NUM_THREADS"] = str(threads or max(1, int(cores() / size)))


def serve() -> None:
    """Serves the launcher on standard input and output, until it is gone."""
    # The launcher receives them, and sends commands.
    for stop in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    # What libraries print must not come between our lines.
    output = os.dup(1)
    os.dup2(2, 1)
    wire = Wire(output)
    with contextlib.ExitStack() as until_gone:
        agent = Agent(wire, until_gone)
        while received := wire.wait():
            number, message = received
            if isinstance(message, Call):  # a command came too late: its workers have ended
                wire.send(reply_to(agent, message), number)
    # Python's own end would take torch down piece by piece, while the user waits for it.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if EARLY in sys.argv:
        with importing():
            import_early()
    serve()

"""The agent process of each machine, including the launcher's machine: answers requests and starts workers.

The launcher runs `python -m manyhands.cluster.agents.agent`, on its machine or over ssh. The agent reads messages from
standard input until the launcher closes it, and writes messages to standard output. The agent imports torch when it
starts workers, or as its first action if the launcher started it before reading the job (see `agents.early`).
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
from manyhands.cluster.agents import folders, protocol
from manyhands.cluster.agents.connection import Wire
from manyhands.cluster.agents.early import EARLY
from manyhands.cluster.agents.mirror import RecordReceiver, RecordSender
from manyhands.cluster.agents.worker_start import set_omp_threads
from manyhands.cluster.doctor.findings import FactsWanted
from manyhands.cluster.doctor.probe import Probe
from manyhands.cluster.messages import Call, Message, perform, remote, reply_to
from manyhands.core.errors import UserError
from manyhands.core.files import private_files, read_new_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.terminal import say
from manyhands.core.timeouts import CLAIM_S, MAKE_WAY_S
from manyhands.parallel.group.ports import listen
from manyhands.parallel.group.tunnel_ends import request_tunnel

if TYPE_CHECKING:
    from manyhands.cluster.agents.tunnel import MachineTunnels

MIRROR_S, LOG_BYTES = 0.4, 1 << 20  # interval of checks for new records; bytes of a log in one answer at most


class Agent(Probe):
    """The agent of a machine. The launcher calls the methods that are marked `remote`."""

    def __init__(self, wire: Wire, cleanup: contextlib.ExitStack) -> None:
        super().__init__()
        self.wire, self._cleanup = wire, cleanup  # the stack is closed once the launcher is gone
        self._listener: socket.socket | None = None
        self._sender: RecordSender | None = None
        self._claimed: set[Path] = set()
        self._receivers: dict[str, RecordReceiver] = {}
        self._mirror_at, self._started, self._alone = 0.0, False, False
        self._tunnels: MachineTunnels | None = None  # of the last start
        self._tunnel_reported, self._reachable = False, False
        cleanup.callback(lambda: self._tunnels and self._tunnels.close())

    def tick(self) -> list[Message]:
        """Sends new records to the launcher; returns the launcher's new commands. Called often while workers run."""
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
            with Path(os.devnull).open("wb") as nothing:  # nobody reads standard error of the lost connection
                os.dup2(nothing.fileno(), 2)
        self._alone = alone
        return commands

    def _report_tunnels(self) -> None:
        if self._tunnels and not self._tunnel_reported and (what := self._tunnels.ended()):
            self._tunnel_reported = True
            self.wire.send(protocol.TunnelEnded(what))

    def _send_records(self) -> bool:
        """Sends new records of the run folder; returns False if there are none."""
        pieces = list(self._sender.new_pieces()) if self._sender else []
        for piece in pieces:
            self.wire.send(piece)
        return bool(pieces)

    @remote
    def hello(self, wanted: FactsWanted, remote_launcher: bool = False) -> dict[str, Any]:
        """Returns facts about this machine. With `remote_launcher`, a launcher silent for SILENT_S counts as lost."""
        from manyhands.cluster.doctor.facts import gather_facts

        self.wire.remote = remote_launcher
        if remote_launcher and not self._reachable:
            with contextlib.suppress(OSError):  # without a socket, a lost connection can't be replaced
                self.wire.send(protocol.Reachable(self.wire.listen(self._cleanup.enter_context(scratch("wire")))))
                self._reachable = True
        return gather_facts(wanted)

    @remote
    @private_files()
    def take_code(self, files: dict[str, str]) -> str:
        """Writes the job's code ({path: base64}) to a folder, changes to that folder, and returns the folder's path."""
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        folder = platformdirs.user_cache_path("manyhands") / "code" / digest
        from manyhands.cluster.code_files import write_code

        write_code(folder, files)
        os.chdir(folder)
        return str(folder)

    @remote
    @private_files()
    def open_run(self, wanted: protocol.OpenRun) -> protocol.RunOpened:
        """Creates the run folder on this machine, and locks it unless it is the launcher's folder on a shared disk."""
        path = Path(wanted.folder).expanduser().absolute()
        folder, shared = RunFolder(path), (path / "ranks" / wanted.token).is_file()
        term = self._advance_term(folder, wanted.run, folders.Term(wanted.term))
        if folders.run_id(folder) != wanted.run:  # a machine that never had rank 0 has checkpoints, but no job file
            folders.use_run_folder(path)
        self._sender, found = None, ""
        if not shared and not term > wanted.term > 0:
            with folders.writing_into(path):
                found = self._claim_folder(folder, wanted)
            if found is not None and wanted.held is not None:
                self._sender = RecordSender(path, wanted.held, output=wanted.output)
        # After the claim, because earlier workers have saved by now. Records may name steps saved on another machine.
        saved, held = max(saved_steps(folder), default=-1), RecordReceiver(path).file_sizes()
        checkpoints, own = folder.has_checkpoints(), path in self._claimed
        return protocol.RunOpened(str(path), shared, checkpoints, found is None, found or "", saved, held, own, term)

    @remote
    def inspect_run(self, folder: str, machine: int, generation: int, run: str, term: int) -> protocol.RunOpened:
        """Returns the state of a run folder; `taken` is True while this machine runs workers of an earlier start.

        `machine` is the index of this machine in the earlier start, `generation` the index of that start. Agents with a
        lower `term` (see `agents.folders`) make their workers exit.
        """
        found = RunFolder(Path(folder).expanduser().absolute())
        highest = self._advance_term(found, run, folders.Term(term, generation + 1))
        busy = not folders.agent_has_left(found.ranks, machine, generation)
        return protocol.RunOpened(
            str(found.path), False, found.has_checkpoints(), busy, folders.run_id(found), term=highest
        )

    def _advance_term(self, folder: RunFolder, run: str, wanted: folders.Term) -> int:
        """Increases a detached run's stored term to the launcher's term; returns the higher of both terms."""
        ours = wanted.head and folders.run_id(folder) in ("", run)
        return (folders.advance_term(folder.ranks, wanted) if ours else folders.read_term(folder.ranks)).head

    def _claim_folder(self, folder: RunFolder, wanted: protocol.OpenRun) -> str | None:
        """Locks the run folder until this agent ends. Returns its run's id; None if another run has the lock."""
        folder.failures.mkdir(parents=True, exist_ok=True)
        try:
            lock = folders.claim_run_folder(folder, wanted.holder, MAKE_WAY_S if wanted.term else CLAIM_S)
        except Timeout:
            return None
        if lock:
            self._cleanup.callback(lock.release)
            self._claimed.add(folder.path)
        found = folders.run_id(folder)
        if found != wanted.run and not (found and folder.has_checkpoints()):
            folders.set_run_id(folder, wanted.run)
        for stale in folder.failures.glob("*.json"):
            stale.unlink()
        return found

    @remote
    @private_files()
    def keep_records(self, folder: str, pieces: list[protocol.FilePiece]) -> None:
        """Writes records received from the launcher into the run folder, where rank 0 will append to them."""
        keeper = self._receivers.setdefault(folder, RecordReceiver(Path(folder)))
        for piece in pieces:
            keeper.write_piece(piece)

    def _keep_copy(self, call: Call) -> None:
        """Calls `keep_records`. Prints errors instead of raising them, because the next start sends all records."""
        try:
            perform(self, call)
        except (OSError, ValueError) as error:
            self._receivers.clear()
            say(f"can't update the copy of the run's records: {error}", "agent")

    @remote
    def make_scratch(self) -> str:
        """Returns a new folder that is removed when the launcher is gone."""
        return str(self._cleanup.enter_context(scratch("probe")))

    @remote
    def read_log(self, path: str, offset: int, partial: bool) -> tuple[str, int]:
        """Returns (text of a file from byte `offset`, new offset). `partial` includes an incomplete last line."""
        text = read_new_lines(Path(path).expanduser(), offset, LOG_BYTES, unfinished=partial)
        return text.decode(errors="replace"), offset + len(text)

    @remote
    def bind(self, address: str, port: int = 0) -> int:
        """Opens a port for the next start's store (TCPStore) to listen on; returns the port. 0 selects a free one."""
        self._listener = listen(address, port)
        return self._listener.getsockname()[1]

    @remote
    def open_tunnel_ends(self, address: str) -> str:
        """Creates a folder for the sockets of ssh tunnels; returns its path. Workers listen on loopback `address`."""
        from manyhands.cluster.agents.tunnel import MachineTunnels

        self._tunnel_reported, self._tunnels = False, self._tunnels or MachineTunnels()
        return self._tunnels.open(address)

    @remote
    def open_tunnels(self, commands: dict[str, list[str]], seconds: float) -> dict[str, str]:
        """Starts ssh commands, by machine. Returns {machine: last error line} of those not ready within `seconds`."""
        assert self._tunnels
        return self._tunnels.start(commands, seconds)

    @remote
    def prepare_workers(self, processes: int, threads: int, device: str) -> tuple[str, int]:
        """Imports the workers' modules after `set_omp_threads`. Returns (device type, number of such devices)."""
        set_omp_threads(threads, processes)
        with self.wire.watch_launcher(self._cleanup.close), importing_torch():
            return importlib.import_module(protocol.ELASTIC).import_cpu_modules(device)

    @remote
    def start_workers(self, orders: protocol.Orders) -> None:
        """Runs this machine's workers until all have ended, then sends `WorkersEnded`."""
        self.unlisten()
        set_omp_threads(orders.threads, orders.rendezvous.sizes[orders.rendezvous.machine])
        gc.collect()  # frees objects and open files of an earlier start
        imports = contextlib.nullcontext() if self._started else importing_torch()
        with self.wire.watch_launcher(self._cleanup.close), imports:
            elastic = importlib.import_module(protocol.ELASTIC)
            elastic.preload(orders)
        rendezvous, listener = orders.rendezvous, self._listener
        if listener is None and rendezvous.machine == 0 and not rendezvous.file:
            listener = listen(rendezvous.address, rendezvous.port)
        if self._tunnels and self._tunnels.ends.address:
            request_tunnel(self._tunnels.ends, rendezvous.address, rendezvous.port)
        self._listener, self._started = None, True
        mine = folders.Term(orders.term, orders.generation)
        if orders.term and folders.advance_term(Path(orders.logs), mine) > mine:
            raise UserError("another launcher has taken over the run")
        self.wire.patient = orders.term > 0
        ended: protocol.WorkersEnded = elastic.run_workers(orders, self.wire, self.tick, listener)
        self.wire.patient = False
        self._report_tunnels()
        while self._send_records():
            pass
        self.wire.send(replace(ended, host=platform.node()))


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """Disables garbage collection in a block that imports torch, and shortens the spins of OpenMP threads.

    A garbage collection would take 0.25 s and free nothing. Later ones skip the imported modules too, so that forked
    workers share this memory. libgomp reads GOMP_SPINCOUNT once, and its default of 300,000 spins takes milliseconds.
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


def import_worker_modules() -> None:
    """Imports the workers' modules. Then reads the path of the agent's log from stdin, and redirects stderr there."""
    with contextlib.suppress(Exception):  # a failed import fails again, and is reported, at its first use
        importlib.import_module(protocol.ELASTIC)
        importlib.import_module(protocol.WORKER).import_training()
    path = b""
    while not path.endswith(b"\0"):
        if not (read := os.read(0, 1)):  # byte by byte, because messages follow the path
            os._exit(0)
        path += read
    log = os.open(os.fsdecode(path[:-1]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    output = os.pread(2, os.fstat(2).st_size, 0)
    os.dup2(log, 2)
    os.close(log)
    os.write(2, output)


def serve() -> None:
    """Answers the launcher's requests on standard input and output until the launcher has exited or is lost."""
    for stop in (signal.SIGINT, signal.SIGUSR1):  # the launcher handles these and sends commands
        signal.signal(stop, signal.SIG_IGN)
    output = os.dup(1)  # output of libraries must not mix with messages, so it goes to standard error
    os.dup2(2, 1)
    wire = Wire(output)
    with contextlib.ExitStack() as cleanup:
        agent = Agent(wire, cleanup)
        while received := wire.wait():
            number, message = received
            if isinstance(message, Call):  # other messages are commands for workers that have ended
                wire.send(reply_to(agent, message), number)
    atexit._run_exitfuncs()  # Python's regular exit would unload torch slowly, while the user waits
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if EARLY in sys.argv:
        with importing_torch():
            import_worker_modules()
    serve()

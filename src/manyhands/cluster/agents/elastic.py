"""Hands the workers of this machine over to PyTorch's elastic agent, and does meanwhile what the head commands.

Runs in the process of `agent`. Each generation of workers has an elastic agent, a rendezvous and a store of its own.
Nothing here unpickles what comes from outside, or listens where it wasn't told to. The only file of `cluster` that
imports torch.
"""

import contextlib
import importlib
import logging
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from manyhands.cluster.agents.claim import Term, hold_as_agent, term_in
from manyhands.cluster.agents.connection import Wire
from manyhands.cluster.agents.heartbeats import HeartbeatMonitor, Leaving, MemoryKills
from manyhands.cluster.agents.orders import PRELOAD, SCRIPT, WORKER, Orders
from manyhands.cluster.agents.protocol import (
    HeadReplaced,
    Prepared,
    StillLeaving,
    WorkerCommand,
    WorkerExited,
    WorkersEnded,
    WorkersSeen,
    WorkersStarted,
)
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.messages import Message
from manyhands.core.devices import device_kind
from manyhands.core.files import parse_json
from manyhands.core.machine import cores
from manyhands.core.records import Failure, write_json
from manyhands.core.scratch import scratch as scratch_folder
from manyhands.core.stops import STOPS
from manyhands.core.timeouts import ALONE_S, ALONE_SAVING_S, LEAVE_S, STOP_S
from manyhands.parallel.group.heartbeat import leave_path
from manyhands.parallel.group.join import IFNAMES
from manyhands.parallel.group.ports import loopback_interface

POLL_S = 0.05
# What asks this process to have the workers stop.
ASKED = {*STOPS} - {signal.SIGINT}
# Interval of reports that processes are still leaving.
REPORT_S = 1.0
# Looks so often for the word of a later head.
TERM_S = 0.5
Tick = Callable[[], list[Message]]
# What is shown of what a killed process wrote.
LAST_WORDS, LAST_BYTES = 8, 1 << 14


class _Rendezvous(StaticTCPRendezvous):
    """A rendezvous that the launcher has already decided; each poll of the agent handles the launcher's orders."""

    def __init__(self, rendezvous: Rendezvous, obey: Callable[[], None]) -> None:
        address, port, sizes = rendezvous.address, rendezvous.port, rendezvous.sizes
        super().__init__(address, port, rendezvous.machine, len(sizes), "manyhands", timeout=0)
        self._obey = obey

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(HashStore(), self.rank, self.world_size, place)

    def num_nodes_waiting(self) -> Literal[0]:
        self._obey()
        return 0


# torch's decorators hide the signatures of what is overridden below.
_Base = cast(Any, LocalElasticAgent)


class ElasticAgent(_Base):
    """PyTorch's agent with ranks from a list of sizes, a store on one address, and commands from the head."""

    def __init__(self, orders: Orders, listener: socket.socket | None, scratch: str, wire: Wire, tick: Tick) -> None:
        self._orders, self._listener, self._wire, self._tick = orders, listener, wire, tick
        self._served: TCPStore | None = None
        self._stopping_since, self._reported_at = 0.0, 0.0
        self._replaced_at, self._look_at = 0.0, 0.0
        self._scratch, self._heartbeats = Path(scratch), HeartbeatMonitor(Path(scratch), {})
        self._leaving = Leaving(self._scratch)
        self._memory = MemoryKills()
        self.exits: dict[int, int] = {}
        self.log_starts: dict[int, int] = {}
        spec = WorkerSpec(
            role="worker",
            local_world_size=orders.rendezvous.sizes[orders.rendezvous.machine],
            entrypoint=sys.executable if orders.script else importlib.import_module(WORKER).work,
            args=_script_words(orders, scratch) if orders.script else (orders, scratch, os.getpid()),
            rdzv_handler=_Rendezvous(orders.rendezvous, self._obey),
            max_restarts=0,
            monitor_interval=POLL_S,
        )
        # An accelerator's driver must start afresh in each process; CPU workers are forked with all imports done.
        method = "fork" if orders.device == "cpu" else "spawn"
        super().__init__(spec, DefaultLogsSpecs(log_dir=scratch), start_method=method)

    def _assign_worker_ranks(
        self,
        store: Store,  # noqa: ARG002 - the base class's signature
        group_rank: int,
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,
    ) -> list[Worker]:
        sizes = self._orders.rendezvous.sizes
        first, size = sum(sizes[:group_rank]), sum(sizes)
        return [
            Worker(local_rank=n, global_rank=first + n, role_rank=first + n, world_size=size, role_world_size=size)
            for n in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Logs go on over the starts of a run.
        for worker in worker_group.workers:
            log = Path(self._orders.logs) / f"{worker.global_rank}.log"
            self.log_starts[worker.global_rank] = log.stat().st_size if log.is_file() else 0
        # A worker receives them once its own handlers are set, this process once it knows its workers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # torch waits 30 s for the peers of a failed process, and not every torch can be told otherwise.
        close = self._pcontext.close
        self._pcontext.close = lambda death_sig=None, timeout=LEAVE_S: close(death_sig, min(timeout, LEAVE_S))
        if self._listener:
            # The store has a thread of its own, so it starts after the fork; clients wait in the listener's queue.
            rendezvous, descriptor = self._orders.rendezvous, self._listener.detach()
            address, patience = (rendezvous.address, rendezvous.port), timedelta(seconds=600)
            self._served = TCPStore(*address, None, True, patience, False, master_listen_fd=descriptor)
        self._heartbeats = HeartbeatMonitor(self._scratch, self._pids())
        self._wire.send(WorkersStarted(self._orders.generation, list(self._pids().values())))
        if self._stopping_since:
            self._signal(signal.SIGTERM)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Reports workers that have ended, and decides how long the others are waited for."""
        script, returned = bool(self._orders.script), self._returned()
        if len(returned) == len(self._ranks()):
            return self._let_go(returned)
        for rank, exit_code in self._exit_codes().items():
            # A worker that is killed after it has returned has done its work; one that exits before has not.
            ended = exit_code if script else exit_code is not None
            if exit_code is not None and ended and rank not in {*self.exits, *returned}:
                self.exits[rank] = exit_code
                record = self._scratch / f"{rank}.json"
                unexplained = exit_code == -signal.SIGKILL and not record.is_file()
                last = self._heartbeats.last(rank)
                if unexplained and (killed := self._memory.record(rank, self._pids()[rank], last)):
                    write_json(record, killed)
                said = _failure_in(record) if record.is_file() else None
                self._wire.send(WorkerExited(rank, exit_code, platform.node(), said))
        if script:
            return super()._monitor_workers(worker_group)
        if self.exits:
            self._leaving.begin()
        waits = self._leaving.begun and self._give_time(returned)
        return RunResult(WorkerState.FAILED if self.exits and not waits else WorkerState.HEALTHY)

    def _returned(self) -> dict[int, Any]:
        """What processes of this machine have returned, by rank; each waits then until all have."""
        if self._orders.script:
            return {}
        values = self._pcontext._return_values
        for number, queue in self._pcontext._ret_vals.items():
            if not queue.empty():
                values[number] = queue.get()
        return {self._ranks()[number]: value for number, value in values.items()}

    def _let_go(self, returned: dict[int, Any]) -> RunResult:
        """Lets the processes end, which have all returned; those that don't are killed when the agent is closed."""
        _wake(self._pcontext._worker_finished_event, len(returned))
        until = time.monotonic() + LEAVE_S
        for process in self._pcontext._pc.processes:
            process.join(max(0.0, until - time.monotonic()))
        return RunResult(WorkerState.SUCCEEDED, return_values=returned)

    def _give_time(self, returned: Collection[int]) -> bool:
        """Whether processes of this machine are to leave by themselves; those that don't in time are killed."""
        codes = self._exit_codes()
        left = {rank: pid for rank, pid in self._pids().items() if codes[rank] is None and rank not in returned}
        if not (left and self._leaving.patient(left, self._heartbeats.usual_s)):
            self._signal(signal.SIGKILL)  # those too that have returned, for which torch would wait
            return False
        if time.monotonic() > self._reported_at + REPORT_S:
            self._reported_at = time.monotonic()
            self._wire.send(StillLeaving())
        return True

    def _exit_codes(self) -> dict[int, int | None]:
        """The exit code of each rank of this machine; None while it runs."""
        if self._orders.script:
            codes = [handler.proc.poll() for _, handler in sorted(self._pcontext.subprocess_handlers.items())]
        else:
            codes = [process.exitcode for process in self._pcontext._pc.processes]
        return dict(zip(self._ranks(), codes, strict=True))

    def _exit_barrier(self) -> None:
        """Machines end when their own workers do; the head waits for all."""

    def _pids(self) -> dict[int, int]:
        """The process id of each rank of this machine; empty before they are started."""
        return dict(zip(self._ranks(), self._pcontext.pids().values(), strict=False)) if self._pcontext else {}

    def _ranks(self) -> list[int]:
        return [worker.global_rank for worker in self._worker_group.workers]

    def _obey(self) -> None:
        """Does what the head says; called on the main thread at every poll."""
        for command in self._tick():
            match command:
                case WorkerCommand("stop"):
                    self.ask_to_stop()
                case WorkerCommand("leave") if not self._orders.script:
                    self._leaving.begin()
                case WorkerCommand("free"):
                    leave_path(self._scratch).touch()
                case WorkerCommand("kill", rank):
                    self._signal(signal.SIGKILL, rank)
                    if rank is None:
                        raise RendezvousGracefulExitError("killed")
                case _:
                    pass
        if seen := self._heartbeats.news(all_of_them=bool(self._stopping_since)):
            self._wire.send(WorkersSeen(platform.node(), seen))
        if left_at := self._left_at():
            self.ask_to_stop()
        late = self._stopping_since and time.monotonic() - self._stopping_since > STOP_S
        if late or (left_at and self._too_long(left_at)):
            # One that waits for who is cut off hears nothing gentler.
            self._signal(signal.SIGKILL)
            raise RendezvousGracefulExitError("the workers did not stop in time")

    def _left_at(self) -> float:
        """When the head was last heard of that has gone, or, of a detached run, was replaced; 0 while neither."""
        if not self._orders.term:
            return 0.0 if self._wire.open else self._wire.last_received
        now = time.monotonic()
        if not self._replaced_at and now > self._look_at:
            self._look_at = now + TERM_S
            if term_in(Path(self._orders.logs)) > Term(self._orders.term, self._orders.generation):
                self._replaced_at = now
                self._wire.send(HeadReplaced())
        return self._replaced_at

    def _too_long(self, left_at: float) -> bool:
        """Whether the head has gone for longer than a save is given."""
        saves = any(seen and seen.phase == "save" for seen in map(self._heartbeats.last, self._ranks()))
        return time.monotonic() - left_at > (ALONE_SAVING_S if saves else ALONE_S)

    def ask_to_stop(self, *_signal: Any) -> None:
        """Has the workers save and leave; the second time changes nothing."""
        if self._stopping_since:
            return
        self._stopping_since = time.monotonic()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals, rank: int | None = None) -> None:
        for each, pid in self._pids().items():
            if rank in (None, each):
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    os.kill(pid, number)


def _script_words(orders: Orders, scratch: str) -> tuple[str, ...]:
    """What follows Python's name where each process runs a script of the user's; see `worker.script`."""
    # -P as for the agent itself; the script's own folder is added for it.
    cluster = orders.argument["job"]["cluster"]
    debugged = (str(cluster["debug_rank"]), str(cluster["debug_port"]))
    words = ("-u", "-P", "-m", SCRIPT, scratch, orders.logs, str(os.getpid()), *debugged, *orders.script)
    # torch fills in ${local_rank}, as under torchrun; any other $ is the user's.
    return tuple(word.replace("$", "$$").replace("$${local_rank}", "${local_rank}") for word in words)


def prepare(device: str) -> Prepared:
    """Imports what the workers need, and says what "auto" means here."""
    kind, count = devices_here(device, 1)
    if kind == "cpu":
        importlib.import_module(PRELOAD).preload()
    return Prepared(kind, count)


def devices_here(wanted: str, processes: int) -> tuple[str, int]:
    """Returns the device type that a job's `device` selects on this machine, and the number of processes for it."""
    device = device_kind(wanted, processes)
    # cuda:1 names one of them.
    counted = device not in {"cpu", "mps"} and ":" not in device
    return device, max(1, torch.accelerator.device_count()) if counted else 1


def preload(orders: Orders) -> None:
    """Imports what workers need that are to be forked, and opens their data."""
    if not orders.script and devices_here(orders.device, sum(orders.rendezvous.sizes))[0] == "cpu":
        ours = importlib.import_module(PRELOAD)
        with ours.opened_ahead(orders):
            ours.preload(orders)


def _resolve_devices(orders: Orders, listener: socket.socket | None) -> Orders:
    """Replaces "auto" and 0 by what this machine has, and divides its cores among the processes."""
    rendezvous = orders.rendezvous
    device, devices = devices_here(orders.device, sum(rendezvous.sizes))
    sizes = tuple(size or devices for size in rendezvous.sizes)
    threads = orders.threads or max(1, int(cores() / sizes[rendezvous.machine]))
    if orders.threads or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # What a cluster's shells name is for what is between machines; scripts of the user's own ask the backends too.
    alone = dict.fromkeys(IFNAMES, loopback_interface()) if len(sizes) == 1 else {}
    os.environ.update({**orders.environment, **alone})
    port = listener.getsockname()[1] if listener else rendezvous.port
    return replace(orders, device=device, rendezvous=replace(rendezvous, sizes=sizes, port=port))


def _failure_in(record: Path) -> Failure:
    return Failure.model_validate(parse_json(record.read_bytes(), infinite=True))


def _result(agent: ElasticAgent, result: RunResult | None, scratch: str) -> WorkersEnded:
    """What each worker returned, or how it ended; the first that the agent saw end is among them."""
    records = [_failure_in(path) for path in Path(scratch).glob("*.json")]
    if result is None:
        return WorkersEnded(records=records)
    failed = agent.exits or {rank: failure.exitcode for rank, failure in result.failures.items()}
    spoke = {record.rank for record in records}
    words = {rank: _last_words(agent, rank) for rank in failed if rank not in spoke}
    return WorkersEnded(result.return_values, failed, words, records=records)


def _last_words(agent: ElasticAgent, rank: int) -> str:
    """The end of what a process of this start has written."""
    with contextlib.suppress(OSError), (Path(agent._orders.logs) / f"{rank}.log").open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(agent.log_starts.get(rank, 0), end - LAST_BYTES))
        return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-LAST_WORDS:])
    return ""


def _wake(event: Any, sleepers: int) -> None:
    """Sets an event of multiprocessing. `Event.set` would wait for each sleeper, which may have been killed."""
    event._flag.acquire(False)
    event._flag.release()
    for _ in range(sleepers):
        event._cond._wait_semaphore.release()


def run(orders: Orders, wire: Wire, tick: Tick, listener: socket.socket | None) -> WorkersEnded:
    """Runs one generation of workers to its end.

    `tick` is called often and returns the launcher's commands since the last call. On the first machine, the store
    takes over the listener.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # PyTorch's agent would take these signals as an order to kill; here they ask for a save first.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    orders = _resolve_devices(orders, listener)
    held = hold_as_agent(Path(orders.logs), orders.rendezvous.machine, orders.generation)
    with scratch_folder("agent") as scratch, held:
        try:
            agent = ElasticAgent(orders, listener, str(scratch), wire, tick)
            for number in ASKED:
                signal.signal(number, agent.ask_to_stop)
            return _result(agent, cast(RunResult | None, agent.run()), str(scratch))
        except SignalException as error:
            return WorkersEnded(ended_by=str(error.sigval))
        except Exception:  # noqa: BLE001 - whatever went wrong, the head must hear of it
            return WorkersEnded(broken=traceback.format_exc())
        finally:
            for number in ASKED:  # nothing may hold on to an agent that is done, nor to its store
                signal.signal(number, signal.SIG_IGN)

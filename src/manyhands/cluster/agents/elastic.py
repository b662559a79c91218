"""Runs the workers of this machine under PyTorch's elastic agent, and follows the launcher's commands.

Runs in the agent process. Each start of workers has a new elastic agent, rendezvous and store. No other module of
`cluster` imports torch.
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
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from manyhands.cluster.agents import protocol
from manyhands.cluster.agents.connection import Wire, log_tail
from manyhands.cluster.agents.folders import Term, agent_lock, read_term
from manyhands.cluster.agents.heartbeats import ExitTimer, HeartbeatMonitor, OutOfMemoryKills
from manyhands.cluster.agents.protocol import SCRIPT, WORKER, Orders
from manyhands.cluster.agents.worker_start import set_omp_threads
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.messages import Message
from manyhands.core.devices import resolve_device_type
from manyhands.core.files import file_size, parse_json
from manyhands.core.records import Failure, write_json
from manyhands.core.scratch import scratch as scratch_folder
from manyhands.core.stops import STOPS
from manyhands.core.timeouts import ALONE_S, ALONE_SAVING_S, LEAVE_S, STOP_S
from manyhands.parallel.group.heartbeat import stop_waiting_path
from manyhands.parallel.group.join import IFNAMES
from manyhands.parallel.group.ports import loopback_interface

ASKED = {*STOPS} - {signal.SIGINT}  # signals at which this process stops the workers
POLL_S, REPORT_S, TERM_S = 0.05, 1.0, 0.5  # intervals: polls, reports of leaving workers, checks for a newer launcher
Tick = Callable[[], list[Message]]


class _Rendezvous(StaticTCPRendezvous):
    """A rendezvous with ranks assigned by the launcher. Each poll of the elastic agent calls `on_poll`."""

    def __init__(self, info: Rendezvous, on_poll: Callable[[], None]) -> None:
        super().__init__(info.address, info.port, info.machine, len(info.sizes), "manyhands", timeout=0)
        self._on_poll = on_poll

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(HashStore(), self.rank, self.world_size, place)

    def num_nodes_waiting(self) -> Literal[0]:
        self._on_poll()
        return 0


class ElasticAgent(cast(Any, LocalElasticAgent)):  # torch's decorators hide the methods' signatures
    """PyTorch's elastic agent with ranks from the launcher, a store at one address, and commands from the launcher."""

    def __init__(self, orders: Orders, listener: socket.socket | None, scratch: str, wire: Wire, tick: Tick) -> None:
        self._orders, self._listener, self._wire, self._tick = orders, listener, wire, tick
        self._served: TCPStore | None = None
        self._stopping_since = self._reported_at = self._replaced_at = self._look_at = 0.0
        self._scratch, self._heartbeats = Path(scratch), HeartbeatMonitor(Path(scratch), {})
        self._leaving, self._memory = ExitTimer(self._scratch), OutOfMemoryKills()
        self.exits, self.log_starts = dict[int, int](), dict[int, int]()
        spec = WorkerSpec(
            role="worker",
            local_world_size=orders.rendezvous.sizes[orders.rendezvous.machine],
            entrypoint=sys.executable if orders.script else importlib.import_module(WORKER).work,
            args=_script_arguments(orders, scratch) if orders.script else (orders, scratch, os.getpid()),
            rdzv_handler=_Rendezvous(orders.rendezvous, self._follow_commands),
            max_restarts=0,
            monitor_interval=POLL_S,
        )
        # Accelerator drivers don't survive a fork; CPU workers are forked after all imports.
        method = "fork" if orders.device == "cpu" else "spawn"
        super().__init__(spec, DefaultLogsSpecs(log_dir=scratch), start_method=method)

    def _assign_worker_ranks(self, _store: Store, group_rank: int, _size: int, spec: WorkerSpec) -> list[Worker]:
        sizes = self._orders.rendezvous.sizes
        first, size = sum(sizes[:group_rank]), sum(sizes)
        ranks = ((n, first + n) for n in range(spec.local_world_size))
        return [Worker(local, rank, rank, size, role_world_size=size) for local, rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:  # logs continue over all starts of a run
            self.log_starts[worker.global_rank] = file_size(Path(self._orders.logs) / f"{worker.global_rank}.log")
        # Signals reach a worker once it has set its handlers, and this process once it knows its workers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        close = self._pcontext.close  # torch waits 30 s for the peers of a failed worker
        self._pcontext.close = lambda death_sig=None, timeout=LEAVE_S: close(death_sig, min(timeout, LEAVE_S))
        if self._listener:
            # The store starts a thread, so it is created after the fork; clients wait in the listener's queue.
            rendezvous, descriptor = self._orders.rendezvous, self._listener.detach()
            address, patience = (rendezvous.address, rendezvous.port), timedelta(seconds=600)
            self._served = TCPStore(*address, None, True, patience, False, master_listen_fd=descriptor)
        self._heartbeats = HeartbeatMonitor(self._scratch, self._pids())
        self._wire.send(protocol.WorkersStarted(self._orders.generation, list(self._pids().values())))
        if self._stopping_since:
            self._signal_workers(signal.SIGTERM)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Reports workers that have exited. After a failure, waits while the other workers may save."""
        script, returned = bool(self._orders.script), self._results()
        if len(returned) == len(self._ranks()):
            return self._release(returned)
        for rank, exit_code in self._exit_codes().items():
            # A task's worker may be killed after it has returned, but must not exit before, even with code 0.
            ended = exit_code if script else exit_code is not None
            if exit_code is not None and ended and rank not in {*self.exits, *returned}:
                self._report_exit(rank, exit_code)
        if script:
            return super()._monitor_workers(worker_group)
        if self.exits:
            self._leaving.begin()
        waits = self._leaving.begun and self._workers_have_time(returned)
        return RunResult(WorkerState.FAILED if self.exits and not waits else WorkerState.HEALTHY)

    def _report_exit(self, rank: int, exit_code: int) -> None:
        self.exits[rank], record = exit_code, self._scratch / f"{rank}.json"
        pid, heartbeat = self._pids()[rank], self._heartbeats.last_heartbeat(rank)
        unexplained = exit_code == -signal.SIGKILL and not record.is_file()
        if unexplained and (killed := self._memory.record(rank, pid, heartbeat)):
            write_json(record, killed)
        failure = _read_failure(record) if record.is_file() else None
        self._wire.send(protocol.WorkerExited(rank, exit_code, platform.node(), failure))

    def _results(self) -> dict[int, Any]:
        """Returns the results of finished workers, by rank. Finished workers wait until `_release`."""
        if self._orders.script:
            return {}
        values = self._pcontext._return_values
        for number, queue in self._pcontext._ret_vals.items():
            if not queue.empty():
                values[number] = queue.get()
        return {self._ranks()[number]: value for number, value in values.items()}

    def _release(self, returned: dict[int, Any]) -> RunResult:
        """Lets the workers exit, once all have `returned` results. The elastic agent kills workers that don't exit."""
        event: Any = self._pcontext._worker_finished_event  # `Event.set` waits for workers that may be dead
        event._flag.acquire(False)
        event._flag.release()
        for _ in returned:
            event._cond._wait_semaphore.release()
        until = time.monotonic() + LEAVE_S
        for process in self._pcontext._pc.processes:
            process.join(max(0.0, until - time.monotonic()))
        return RunResult(WorkerState.SUCCEEDED, return_values=returned)

    def _workers_have_time(self, returned: Collection[int]) -> bool:
        """Returns True while workers may save and exit; after the time limit, kills the workers and returns False."""
        codes = self._exit_codes()
        remaining = {rank: pid for rank, pid in self._pids().items() if codes[rank] is None and rank not in returned}
        if not (remaining and self._leaving.has_time(remaining, self._heartbeats.usual_s)):
            self._signal_workers(signal.SIGKILL)  # also finished workers, for which torch would wait
            return False
        if time.monotonic() > self._reported_at + REPORT_S:
            self._reported_at = time.monotonic()
            self._wire.send(protocol.StillLeaving())
        return True

    def _exit_codes(self) -> dict[int, int | None]:
        if self._orders.script:
            codes = {number: handler.proc.poll() for number, handler in self._pcontext.subprocess_handlers.items()}
        else:
            codes = dict(enumerate(process.exitcode for process in self._pcontext._pc.processes))
        return {rank: codes[number] for number, rank in enumerate(self._ranks())}

    def _exit_barrier(self) -> None:
        """Disables torch's wait for other machines, because the launcher waits for all machines."""

    def _pids(self) -> dict[int, int]:
        """Returns the process id of each rank on this machine; an empty dict before the workers are started."""
        pids = self._pcontext.pids() if self._pcontext else {}
        return {rank: pids[number] for number, rank in enumerate(self._ranks()) if number in pids}

    def _ranks(self) -> list[int]:
        return [worker.global_rank for worker in self._worker_group.workers]

    def _follow_commands(self) -> None:
        """Follows the launcher's commands; called on the main thread at every poll."""
        for command in self._tick():
            match command:
                case protocol.WorkerCommand("stop"):
                    self.ask_to_stop()
                case protocol.WorkerCommand("leave") if not self._orders.script:
                    self._leaving.begin()
                case protocol.WorkerCommand("free"):
                    stop_waiting_path(self._scratch).touch()
                case protocol.WorkerCommand("kill", rank):
                    self._signal_workers(signal.SIGKILL, rank)
                    if rank is None:
                        raise RendezvousGracefulExitError("killed")
                case _:
                    pass
        if seen := self._heartbeats.states(always=bool(self._stopping_since)):
            self._wire.send(protocol.WorkersSeen(platform.node(), seen))
        now, lost_at, alone_s = time.monotonic(), self._launcher_lost_at(), ALONE_S
        if lost_at:
            self.ask_to_stop()
            if any(seen and seen.phase == "save" for seen in map(self._heartbeats.last_heartbeat, self._ranks())):
                alone_s = ALONE_SAVING_S
        if (self._stopping_since and now - self._stopping_since > STOP_S) or (lost_at and now - lost_at > alone_s):
            self._signal_workers(signal.SIGKILL)  # a process that waits for a lost machine reacts to no other signal
            raise RendezvousGracefulExitError("the workers did not stop in time")

    def _launcher_lost_at(self) -> float:
        """Returns the time at which the launcher was lost or a newer launcher was detected; 0 if neither happened."""
        if not self._orders.term:
            return 0.0 if self._wire.open else self._wire.last_received
        now = time.monotonic()
        if not self._replaced_at and now > self._look_at:
            self._look_at = now + TERM_S
            if read_term(Path(self._orders.logs)) > Term(self._orders.term, self._orders.generation):
                self._replaced_at = now
                self._wire.send(protocol.HeadReplaced())
        return self._replaced_at

    def ask_to_stop(self, *_signal: Any) -> None:
        """Makes the workers save and exit. Later calls do nothing."""
        if not self._stopping_since:
            self._stopping_since = time.monotonic()
            self._signal_workers(signal.SIGTERM)

    def _signal_workers(self, number: signal.Signals, rank: int | None = None) -> None:
        for each, pid in self._pids().items():
            if rank in (None, each):
                with contextlib.suppress(ProcessLookupError):  # the worker has ended
                    os.kill(pid, number)


def _script_arguments(orders: Orders, scratch: str) -> tuple[str, ...]:
    """Returns the arguments of the Python process that runs a user's script; see `worker.script`."""
    # -P as for the agent; `worker.script` adds the folder of the script to the path.
    cluster = orders.argument["job"]["cluster"]
    debugged = (str(cluster["debug_rank"]), str(cluster["debug_port"]))
    words = ("-u", "-P", "-m", SCRIPT, scratch, orders.logs, str(os.getpid()), *debugged, *orders.script)
    # torch replaces ${local_rank}, as under torchrun; any other $ stays.
    return tuple(word.replace("$", "$$").replace("$${local_rank}", "${local_rank}") for word in words)


def import_cpu_modules(device: str) -> tuple[str, int]:
    """Imports the workers' modules if `device` selects the CPU. Returns (device type, number of devices)."""
    kind, count = detect_devices(device, 1)
    if kind == "cpu":
        importlib.import_module(WORKER).preload()
    return kind, count


def detect_devices(requested: str, processes: int) -> tuple[str, int]:
    """Returns (device type for cluster.device = `requested` and so many `processes`, number here; 1 for a CPU)."""
    device = resolve_device_type(requested, processes)
    single = device in {"cpu", "mps"} or ":" in device  # cuda:1 names one of several
    return device, 1 if single else max(1, torch.accelerator.device_count())


def preload(orders: Orders) -> None:
    """Imports the modules and opens the data that forked workers share with this process."""
    if not orders.script and detect_devices(orders.device, sum(orders.rendezvous.sizes))[0] == "cpu":
        importlib.import_module(WORKER).preload(orders)


def _resolve_devices(orders: Orders, listener: socket.socket | None) -> Orders:
    """Replaces the device "auto" and process counts of 0 by this machine's devices; sets the number of threads."""
    rendezvous = orders.rendezvous
    device, devices = detect_devices(orders.device, sum(rendezvous.sizes))
    sizes = tuple(size or devices for size in rendezvous.sizes)
    set_omp_threads(orders.threads, sizes[rendezvous.machine])
    # On one machine, loopback: an interface in the environment is meant for several machines.
    alone = dict.fromkeys(IFNAMES, loopback_interface()) if len(sizes) == 1 else {}
    os.environ.update({**orders.environment, **alone})
    port = listener.getsockname()[1] if listener else rendezvous.port
    return replace(orders, device=device, rendezvous=replace(rendezvous, sizes=sizes, port=port))


def _read_failure(record: Path) -> Failure:
    return Failure.model_validate(parse_json(record.read_bytes(), infinite=True))


def _workers_ended(agent: ElasticAgent, result: RunResult | None, scratch: str) -> protocol.WorkersEnded:
    records = [_read_failure(path) for path in Path(scratch).glob("*.json")]
    if result is None:
        return protocol.WorkersEnded(records=records)
    failed = agent.exits or {rank: failure.exitcode for rank, failure in result.failures.items()}
    explained = {record.rank for record in records}
    logs = {rank: Path(agent._orders.logs) / f"{rank}.log" for rank in failed if rank not in explained}
    words = {rank: log_tail(path, agent.log_starts.get(rank, 0)) for rank, path in logs.items()}
    return protocol.WorkersEnded(result.return_values, failed, words, records=records)


def run_workers(orders: Orders, wire: Wire, tick: Tick, listener: socket.socket | None) -> protocol.WorkersEnded:
    """Runs the workers of one start until all have ended.

    `tick` is called often and returns the launcher's commands since the last call. On the first machine, the store
    takes over `listener`.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # at the usual signals torch would kill the workers
    orders = _resolve_devices(orders, listener)
    lock = agent_lock(Path(orders.logs), orders.rendezvous.machine, orders.generation)
    with scratch_folder("agent") as scratch, lock:
        try:
            agent = ElasticAgent(orders, listener, str(scratch), wire, tick)
            for number in ASKED:
                signal.signal(number, agent.ask_to_stop)
            return _workers_ended(agent, cast(RunResult | None, agent.run()), str(scratch))
        except SignalException as error:
            return protocol.WorkersEnded(ended_by=str(error.sigval))
        except Exception:  # noqa: BLE001 - reported to the launcher
            return protocol.WorkersEnded(broken=traceback.format_exc())
        finally:
            for number in ASKED:  # drops references to the agent, which closes its store
                signal.signal(number, signal.SIG_IGN)

"""Hands the workers of this machine over to PyTorch's elastic agent, and does meanwhile what the head commands.

Runs in the process of `host`. Each generation of workers has an elastic agent, a rendezvous and a store of its own.
Nothing here unpickles what comes from outside, or listens where it wasn't told to. The only file of `cluster` that
imports torch.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch
from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from manyhands.cluster.facts.load import cores
from manyhands.cluster.orders import DEVICE_INDEX, Orders
from manyhands.core.outside import parse_json
from manyhands.core.records import FAILURE_FILE
from manyhands.core.streams import Tolerant

POLL_S = 0.05
# After the first failure the others get this long to leave by themselves before they are killed.
LEAVE_S = 3
# A stop that was asked for waits for an evaluation and a save; a second Ctrl-C ends it at once.
STOP_S = 600.0
# So long after the last sign of their head the workers, which were asked to save, are killed.
ALONE_S = 25.0
PR_SET_PDEATHSIG = 1


class Head(Protocol):
    """Who is obeyed while workers run."""

    @property
    def wire(self) -> Any:
        """The conversation; its `open` is False once the head is gone."""

    def tick(self) -> list[str]:
        """What the head has commanded since the last call: "stop" or "kill"."""
        ...


class _Rendezvous(RendezvousHandler):
    """A meeting that the head has already decided; polled by the agent, it passes on what the head says."""

    def __init__(self, orders: Orders, obey: Callable[[], None]) -> None:
        self._orders, self._obey = orders, obey

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "manyhands"

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self._orders.address, self._orders.port)
        return RendezvousInfo(HashStore(), self._orders.machine, len(self._orders.sizes), place)

    def num_nodes_waiting(self) -> int:
        self._obey()
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing is open."""

    def get_run_id(self) -> str:
        return "manyhands"

    def shutdown(self) -> bool:
        return True


# torch's decorators hide the signatures of what is overridden below.
_Base = cast(Any, LocalElasticAgent)


class Agent(_Base):
    """PyTorch's agent with ranks from a list of sizes, a store on one address, and commands from the head."""

    def __init__(self, orders: Orders, listener: socket.socket | None, scratch: str, head: Head) -> None:
        self._orders, self._listener, self._head = orders, listener, head
        self._served: TCPStore | None = None
        self._stopping_since = 0.0
        self.exits: dict[int, int] = {}
        spec = WorkerSpec(
            role="worker",
            local_world_size=orders.sizes[orders.machine],
            entrypoint=_worker,
            args=(orders, scratch, os.getpid()),
            rdzv_handler=_Rendezvous(orders, self._obey),
            max_restarts=0,
            monitor_interval=POLL_S,
        )
        # An accelerator's driver must start afresh in each process; CPU workers are forked with all imports done.
        method = "fork" if orders.device == "cpu" else "spawn"
        super().__init__(spec, DefaultLogsSpecs(log_dir=scratch), start_method=method, shutdown_timeout=LEAVE_S)

    def _assign_worker_ranks(
        self,
        store: Store,  # noqa: ARG002 - the base class's signature
        group_rank: int,
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,
    ) -> list[Worker]:
        first, size = sum(self._orders.sizes[:group_rank]), sum(self._orders.sizes)
        return [
            Worker(local_rank=n, global_rank=first + n, role_rank=first + n, world_size=size, role_world_size=size)
            for n in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        # torch waits 30 s for the peers of a failed process, whatever shutdown_timeout says.
        context.close = functools.partial(_close_soon, context.close)
        context._pc.join = functools.partial(context._pc.join, grace_period=LEAVE_S)
        if self._listener:
            # The store has a thread of its own, so it starts after the fork; clients wait in the listener's queue.
            address, descriptor = self._orders.address, self._listener.detach()
            self._served = TCPStore(
                address, self._orders.port, None, True, timedelta(seconds=600), False, master_listen_fd=descriptor
            )
        self._head.wire.tell("started", generation=self._orders.generation, pids=list(self._pids()))
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Notes which processes have ended by themselves before the base class ends the others."""
        processes: Any = self._pcontext._pc.processes if self._pcontext else []  # pyright: ignore[reportAttributeAccessIssue]
        for worker, process in zip(worker_group.workers, processes, strict=True):
            if process.exitcode:
                self.exits.setdefault(worker.global_rank, process.exitcode)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Machines end when their own workers do; the head waits for all."""

    def _pids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _obey(self) -> None:
        """Does what the head says; called on the main thread at every poll."""
        for word in self._head.tick():
            if word == "kill":
                raise RendezvousGracefulExitError("killed")
            if word == "stop":
                self.ask_to_stop()
        if not self._head.wire.open:
            self.ask_to_stop()
        late = self._stopping_since and time.monotonic() - self._stopping_since > STOP_S
        alone = not self._head.wire.open and time.monotonic() - self._head.wire.heard > ALONE_S
        if late or alone:
            raise RendezvousGracefulExitError("the workers did not stop in time")

    def ask_to_stop(self, *_signal: Any) -> None:
        """Has the workers save and leave; the second time changes nothing."""
        if self._stopping_since:
            return
        self._stopping_since = time.monotonic()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):  # one that has come to its end already
                os.kill(pid, signal.SIGTERM)


def _worker(orders: Orders, scratch: str, agent: int) -> Any:
    """First thing in each worker: dies with its agent, writes to its own file, and runs the entry."""
    _die_with_parent(agent)
    os.environ[FAILURE_FILE] = f"{scratch}/{os.environ['RANK']}.json"
    if orders.devices:
        os.environ[DEVICE_INDEX] = str(orders.devices[int(os.environ["LOCAL_RANK"])])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    _write_to(Path(orders.logs) / f"{os.environ['RANK']}.log")
    module, _, function = orders.entry.partition(":")
    return getattr(importlib.import_module(module), function)(orders.argument)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _write_to(path: Path) -> None:
    """Both output streams of this process go to the end of one file; standard input is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)
    # A log on a full disk loses lines; what wrote them, a library or the user's own code, must not fail by it.
    sys.stdout, sys.stderr = cast(TextIO, Tolerant(sys.stdout)), cast(TextIO, Tolerant(sys.stderr))


def prepare(device: str, preload: list[str]) -> dict[str, Any]:
    """Imports what the workers need.

    Returns:
        device: the kind that "auto" means here; count: its number of devices, 1 for a CPU.
    """
    kind, count = _devices(device)
    if kind == "cpu":
        _preload(preload)
    return {"device": kind, "count": count}


def _devices(wanted: str) -> tuple[str, int]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = wanted if wanted != "auto" else accelerator.type if accelerator else "cpu"
    # "cuda:1" names one of them.
    counted = device not in {"cpu", "mps"} and ":" not in device
    return device, max(1, torch.accelerator.device_count()) if counted else 1


def _preload(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _settle(orders: Orders, listener: socket.socket | None) -> Orders:
    """Replaces "auto" and 0 by what this machine has, and divides its cores among the processes."""
    device, devices = _devices(orders.device)
    sizes = [size or devices for size in orders.sizes]
    threads = orders.threads or max(1, int(cores() / sizes[orders.machine]))
    if orders.threads or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    os.environ.update(orders.environment)
    port = listener.getsockname()[1] if listener else orders.port
    return dataclasses.replace(orders, device=device, sizes=sizes, port=port)


def _result(agent: Agent, result: RunResult | None, scratch: str) -> dict[str, Any]:
    """What each worker returned, or how it ended; the first that the agent saw end is among them."""
    records = [parse_json(path.read_bytes(), infinite=True) for path in Path(scratch).glob("*.json")]
    if result is None:
        return {"returned": {}, "failed": {}, "records": records}
    failed = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return {
        "returned": result.return_values,
        "failed": {**failed, **(agent.exits if failed else {})},
        "records": records,
    }


def _close_soon(close: Callable[..., None], death_sig: signal.Signals | None = None, timeout: float = LEAVE_S) -> None:
    close(death_sig, min(timeout, LEAVE_S))


def run(orders: Orders, head: Head, listener: socket.socket | None) -> dict[str, Any]:
    """Runs one generation of workers to its end.

    Args:
        orders: what to start.
        head: who is obeyed meanwhile.
        listener: the socket that the store takes over; on the first machine.

    Returns:
        returned: by rank, what the entry returned; failed: by rank, exit codes; records: what failed workers wrote of
        themselves; broken: the agent's own traceback.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # PyTorch's agent would take these signals as an order to kill; here they ask for a save first.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    orders = _settle(orders, listener)
    scratch = tempfile.mkdtemp(prefix="manyhands-agent-")
    try:
        if orders.device == "cpu":
            _preload(orders.preload)
        agent = Agent(orders, listener, scratch, head)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, agent.ask_to_stop)
        return _result(agent, cast(RunResult | None, agent.run()), scratch)
    except SignalException as error:
        return {"returned": {}, "failed": {}, "ended_by": str(error.sigval)}
    except Exception:  # noqa: BLE001 - whatever went wrong, the head must hear of it
        return {"returned": {}, "failed": {}, "broken": traceback.format_exc()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

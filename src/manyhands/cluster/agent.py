"""A process of its own on each machine: hands the workers over to PyTorch's elastic agent and watches its head.

Started as `python -m manyhands.cluster.agent`. Its first line on standard input says what to start; later lines are
commands ("stop", "kill"); the end of standard input means that the head is gone, and stops the workers. What happens
goes to standard output, one JSON object a line. Nothing here unpickles what comes from outside or listens beyond
loopback. The only file of `cluster` that imports torch.
"""

import ctypes
import dataclasses
import functools
import importlib
import json
import logging
import os
import select
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
from typing import Any, cast

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

from manyhands.cluster.start import cores

POLL_S = 0.05
# After the first failure the others get this long to leave by themselves before they are killed.
LEAVE_S = 3
# A stop that was asked for waits for an evaluation and a save; a second Ctrl-C ends it at once.
STOP_S = 600.0
# Without a head nothing may live on for long.
ALONE_S = 25.0
PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Orders:
    """What the head asks for.

    Attributes:
        entry: "module:function", called in each worker with `argument`.
        argument: plain data for it.
        sizes: processes on each machine; 0 for one per accelerator of this machine, or one.
        machine: this machine's place in `sizes`.
        logs: folder for each worker's own output, <rank>.log.
        preload: modules to import before CPU workers are forked, so that they start at once.
        device: "auto", "cpu" or the kind of accelerator.
        threads: CPU threads for each process; 0 divides this machine's cores.
    """

    entry: str
    argument: dict[str, Any]
    sizes: list[int]
    machine: int
    logs: str
    preload: list[str]
    device: str
    threads: int


class _Rendezvous(RendezvousHandler):
    """A meeting that the head has already decided; polled by the agent, it passes on what the head says."""

    def __init__(self, orders: Orders, port: int, obey: Callable[[], None]) -> None:
        self._orders, self._port, self._obey = orders, port, obey

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "manyhands"

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo("127.0.0.1", self._port)
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
    """PyTorch's agent with ranks from a list of sizes, a loopback store, and commands from the head."""

    def __init__(self, orders: Orders, listener: socket.socket, scratch: str, commands: "_Commands") -> None:
        self._orders, self._listener, self._commands = orders, listener, commands
        self._served: TCPStore | None = None
        self._stopping_since = 0.0
        self.exits: dict[int, int] = {}
        spec = WorkerSpec(
            role="worker",
            local_world_size=orders.sizes[orders.machine],
            entrypoint=_worker,
            args=(orders.entry, orders.argument, orders.logs, os.getpid()),
            rdzv_handler=_Rendezvous(orders, listener.getsockname()[1], self._obey),
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
        # The store has a thread of its own, so it starts after the fork; clients wait in the listener's queue.
        self._served = TCPStore(
            "127.0.0.1",
            self._listener.getsockname()[1],
            None,
            True,
            timedelta(seconds=600),
            False,
            master_listen_fd=self._listener.detach(),
        )
        _tell("started", pids=list(self._pids()))
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
        for word in self._commands.new_lines():
            if word == "kill":
                raise RendezvousGracefulExitError("killed")
            self.ask_to_stop()
        limit = STOP_S if self._commands.head_is_there else ALONE_S
        if self._stopping_since and time.monotonic() - self._stopping_since > limit:
            raise RendezvousGracefulExitError("the workers did not stop in time")

    def ask_to_stop(self, *_signal: Any) -> None:
        """Has the workers save and leave; the second time changes nothing."""
        if self._stopping_since:
            return
        self._stopping_since = time.monotonic()
        for pid in self._pids():
            os.kill(pid, signal.SIGTERM)


class _Commands:
    """Lines from the head, read without waiting and without a thread; its end counts as "stop"."""

    def __init__(self) -> None:
        self._rest, self._open = b"", True

    @property
    def head_is_there(self) -> bool:
        """False once the head has closed its end."""
        return self._open

    def wait_for_line(self) -> str:
        """The next line, or an empty string when the head is gone."""
        while b"\n" not in self._rest and self._open:
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def new_lines(self) -> list[str]:
        """The lines that have come since the last call."""
        while self._open and select.select([0], [], [], 0)[0]:
            self._read()
            if not self._open:
                self._rest += b"stop\n"
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode().strip() for line in lines]

    def _read(self) -> None:
        received = os.read(0, 65536)
        self._open = bool(received)
        self._rest += received


def _tell(kind: str, **content: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **content}) + "\n")
    sys.stdout.flush()


def _worker(entry: str, argument: dict[str, Any], logs: str, agent: int) -> Any:
    """First thing in each worker: dies with its agent, writes to its own file, and runs the entry."""
    _die_with_parent(agent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    _write_to(Path(logs) / f"{os.environ['RANK']}.log")
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)(argument)


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


def _settle(orders: Orders) -> Orders:
    """Replaces "auto" and 0 by what this machine has, and divides its cores among the processes."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = orders.device if orders.device != "auto" else accelerator.type if accelerator else "cpu"
    # "cuda:1" names one of them.
    devices = torch.accelerator.device_count() if device not in {"cpu", "mps"} and ":" not in device else 1
    sizes = [size or max(1, devices) for size in orders.sizes]
    threads = orders.threads or max(1, cores() // sizes[orders.machine])
    if orders.threads or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return dataclasses.replace(orders, device=device, sizes=sizes)


def _result(agent: Agent, result: RunResult | None) -> dict[str, Any]:
    """What each worker returned, or how it ended; the first that the agent saw end is among them."""
    if result is None:
        return {"returned": {}, "failed": {}}
    failed = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return {"returned": result.return_values, "failed": {**failed, **(agent.exits if failed else {})}}


def _close_soon(close: Callable[..., None], death_sig: signal.Signals | None = None, timeout: float = LEAVE_S) -> None:
    close(death_sig, min(timeout, LEAVE_S))


def main() -> None:
    """Reads the orders, runs the workers to their end, and tells the head."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # PyTorch's agent would take these signals as an order to kill; here they ask for a save first.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    commands = _Commands()
    line = commands.wait_for_line()
    if not line:
        return
    orders = Orders(**json.loads(line))
    orders = _settle(orders)
    scratch = tempfile.mkdtemp(prefix="manyhands-agent-")
    try:
        if orders.device == "cpu":
            for module in orders.preload:
                importlib.import_module(module)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        agent = Agent(orders, listener, scratch, commands)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, agent.ask_to_stop)
        _tell("ended", **_result(agent, cast(RunResult | None, agent.run())))
    except SignalException as error:
        _tell("ended", returned={}, failed={}, signal=str(error.sigval))
    except Exception:  # noqa: BLE001 - whatever went wrong, the head must hear of it
        _tell("broken", traceback=traceback.format_exc())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

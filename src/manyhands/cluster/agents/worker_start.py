"""Prepares a worker before it uses torch: parent-death signal, output files, and waiting for a debugger."""

import ctypes
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from manyhands.cluster.agents.heartbeats import heartbeat_path
from manyhands.cluster.agents.protocol import Orders
from manyhands.cluster.hosts.inventory import DEVICE_INDEX, LOOPBACK
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.machine import cores
from manyhands.core.records import FAILURE_FILE
from manyhands.core.stops import STOPS
from manyhands.core.terminal import TolerantStream, say
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE


def set_omp_threads(threads: int, processes: int) -> None:
    """Sets OMP_NUM_THREADS to `threads`. If that is 0, keeps the user's value or divides the cores by `processes`."""
    if threads or (processes and "OMP_NUM_THREADS" not in os.environ):
        os.environ["OMP_NUM_THREADS"] = str(threads or max(1, int(cores() / processes)))


def begin_worker(orders: Orders, scratch: str, agent_pid: int) -> dict[str, Any]:
    """Sets up this process, which the agent has forked or spawned, as a worker; returns the arguments of its task."""
    for number in (*STOPS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to all processes of a job; the agent forwards it as SIGTERM
    rank = begin_process(scratch, orders.logs, agent_pid)
    os.environ[HEARTBEAT_FILE] = str(heartbeat_path(Path(scratch), rank))
    if orders.rendezvous.devices:
        os.environ[DEVICE_INDEX] = str(orders.rendezvous.devices[int(os.environ["LOCAL_RANK"])])
    # A forked worker inherits torch's thread count from the agent, which must not start threads before the fork.
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if torch and threads.isdecimal() and torch.get_num_threads() != int(threads) > 0:
        torch.set_num_threads(int(threads))
    return orders.argument


def worker_process_info(options: ClusterOptions, file: str) -> ProcessInfo:
    """Returns this worker's rank from environment variables. `file`: the URL of a file store, or "" for a TCPStore."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not file
    attempt, device = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get(DEVICE_INDEX, "")
    return ProcessInfo(
        rank, size, local_rank, local_size, file or "env://", options.backend, options.device, agent_store=served,
        join_warn_s=options.join_warn_s, join_timeout_s=options.join_timeout_s, attempt=attempt,
        device_index=int(device) if device else None,
    )  # fmt: skip


def begin_process(scratch: str, logs: str, agent_pid: int) -> int:
    """Makes this process exit with its agent, write failures to `scratch` and output to `logs`; returns its rank."""
    rank = int(os.environ["RANK"])
    if sys.platform == "linux":  # the kernel ends this process when its agent ends
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != agent_pid:  # the agent has ended already
        os._exit(1)
    os.environ[FAILURE_FILE] = f"{scratch}/{rank}.json"
    Path(logs).mkdir(parents=True, exist_ok=True)  # output goes to one file; standard input is empty
    output = os.open(f"{logs}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    for descriptor, own in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, own)
    os.close(output)
    os.close(nothing)
    # On a full disk log lines are lost, but the code that prints them must not fail.
    sys.stdout, sys.stderr = cast(TextIO, TolerantStream(sys.stdout)), cast(TextIO, TolerantStream(sys.stderr))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # blocked by the agent while it starts its workers
    return rank


def attach_notice(options: ClusterOptions) -> str:
    """Returns the instructions for attaching VS Code's debugger, with a warning about the open port."""
    rank, port = options.debug_rank, options.debug_port
    entry = {"name": f"manyhands rank {rank}", "type": "debugpy", "request": "attach",
             "connect": {"host": LOOPBACK, "port": port}, "justMyCode": False}  # fmt: skip
    return (
        f"rank {rank} waits for a debugger on port {port} of its machine ({LOOPBACK}); "
        "every user of that machine can run code as you through this port\n"
        f"add this entry to the configurations in VS Code's launch.json:\n{json.dumps(entry, indent=2)}\n"
        f"if the rank runs on another machine, first run: ssh -L {port}:{LOOPBACK}:{port} MACHINE\n"
        "stall detection, collective timeouts and recovery are off for this run"
    )


def wait_for_debugger(rank: int, size: int, options: ClusterOptions) -> None:
    """Waits for a debugger on rank cluster.debug_rank. Raises UserError if rank, debugpy or a free port is missing."""
    if options.debug_rank >= size:
        message = f"there is no rank {options.debug_rank} to debug: the ranks are 0 … {size - 1}"
        raise UserError(message, "--debug-rank", (f"choose a rank from 0 to {size - 1}",))
    if rank != options.debug_rank:
        return
    if importlib.util.find_spec("debugpy") is None:
        hints = (f"on the machine of rank {rank}, run: pip install 'manyhands[debug]'",)
        raise UserError(f"rank {rank} can't be debugged: debugpy is not installed", "--debug-rank", hints)
    import debugpy  # pyright: ignore[reportMissingTypeStubs]

    debugpy.configure(subProcess=False)
    try:
        debugpy.listen((LOOPBACK, options.debug_port))
    except RuntimeError as error:
        hints = (f"choose another port: --cluster.debug-port {options.debug_port + 1}",)
        message = f"rank {rank} can't be debugged on {LOOPBACK} port {options.debug_port}: {error}"
        raise UserError(message, "cluster.debug_port", hints) from error
    say(attach_notice(options))
    debugpy.wait_for_client()

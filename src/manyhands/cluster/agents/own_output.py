"""First things in a worker of an agent's: it dies with its agent and has files of its own. Needs no torch."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from manyhands.cluster.agents.heartbeats import heartbeat_path
from manyhands.cluster.agents.orders import Orders
from manyhands.cluster.hosts.inventory import DEVICE_INDEX
from manyhands.core.records import FAILURE_FILE
from manyhands.core.stops import STOPS
from manyhands.core.terminal import Tolerant
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE

PR_SET_PDEATHSIG = 1


def take_orders(orders: Orders, scratch: str, agent: int) -> dict[str, Any]:
    """Makes this process, which the agent has forked or spawned, one of the run's; gives what its task needs."""
    for number in (*STOPS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # A scheduler's word to all processes of a job; the agent passes it on as it does the others.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = begin(scratch, orders.logs, agent)
    os.environ[HEARTBEAT_FILE] = str(heartbeat_path(Path(scratch), rank))
    if orders.rendezvous.devices:
        os.environ[DEVICE_INDEX] = str(orders.rendezvous.devices[int(os.environ["LOCAL_RANK"])])
    _set_threads()
    return orders.argument


def _set_threads() -> None:
    """The number that torch read when the agent imported it is another; set here, as its threads must not be forked."""
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if torch and threads.isdecimal() and torch.get_num_threads() != int(threads) > 0:
        torch.set_num_threads(int(threads))


def begin(scratch: str, logs: str, agent: int) -> int:
    """What any process that an agent has started does first.

    Args:
        scratch: the agent's folder for records.
        logs: where the process writes what it says.
        agent: the agent's process id.

    Returns:
        The process's rank.
    """
    rank = int(os.environ["RANK"])
    _die_with_parent(agent)
    os.environ[FAILURE_FILE] = f"{scratch}/{rank}.json"
    _write_to(Path(logs) / f"{rank}.log")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # blocked by the agent while it starts its workers
    return rank


def _die_with_parent(parent: int) -> None:
    """Has the kernel end this process when `parent` ends; ends it now where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _write_to(path: Path) -> None:
    """Both output streams of this process go to the end of one file; standard input is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)
    # A log on a full disk loses lines; what wrote them, a library or the user's own code, must not fail by it.
    sys.stdout, sys.stderr = cast(TextIO, Tolerant(sys.stdout)), cast(TextIO, Tolerant(sys.stderr))

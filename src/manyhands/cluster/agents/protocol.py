"""Events between a launcher and its agents, and the argument and result types of the agent's methods.

The launcher sends `WorkerCommand` while workers run; agents send all other events. `cluster.messages` encodes events.
`Agent` and its base class `Probe` define the methods that the launcher calls.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.messages import Message
from manyhands.config.job import Job
from manyhands.core.records import Failure
from manyhands.parallel.group.heartbeat import ObservedHeartbeat


@dataclass(frozen=True)
class FilePiece(Message):
    """Part of a growing file in a run folder, from byte `offset` on, or all of a small file."""

    name: str
    text: str
    offset: int = 0


@dataclass(frozen=True)
class WorkerCommand(Message):
    """A command to the workers of a machine.

    "stop": save and exit. "leave": workers of another machine have failed; save if possible, and exit. "free": stop
    waiting for a lost peer, whose loss the network has not reported. "kill": end at once.
    """

    what: Literal["stop", "leave", "free", "kill"]
    rank: int | None = None  # for "kill": the hung rank; None for all ranks


@dataclass(frozen=True)
class Reachable(Message):
    """The path of the Unix socket over which the launcher can reconnect to this agent."""

    socket: str


@dataclass(frozen=True)
class TunnelEnded(Message):
    """A tunnel opened by this machine has ended."""

    what: str


@dataclass(frozen=True)
class WorkersStarted(Message):
    """The workers' process ids, by local rank."""

    generation: int
    pids: list[int]


@dataclass(frozen=True)
class WorkersSeen(Message):
    """The states of a machine's workers; sent while a worker makes no progress, or after a stop request."""

    host: str
    ranks: list[ObservedHeartbeat]


@dataclass(frozen=True)
class WorkerExited(Message):
    """Reports that a worker has failed; sent at once, before the agent ends the other workers."""

    rank: int
    code: int
    host: str
    record: Failure | None = None


@dataclass(frozen=True)
class StillLeaving(Message):
    """Reports that workers of this machine are saving, or may start to save, after a failure of the run."""


@dataclass(frozen=True)
class HeadReplaced(Message):
    """Reports that another launcher took over, or that the run was stopped here; the workers save and exit."""


@dataclass(frozen=True)
class WorkersEnded(Message):
    """The results of a machine's workers, by rank. The agent's last event of a start."""

    returned: dict[int, Any] = field(default_factory=dict[int, Any])  # results of the tasks
    failed: dict[int, int] = field(default_factory=dict[int, int])  # exit codes
    words: dict[int, str] = field(default_factory=dict[int, str])  # last log lines of failed workers without a record
    host: str = ""  # the machine's own name
    records: list[Failure] = field(default_factory=list[Failure])  # written by failed workers
    broken: str = ""  # the traceback if the agent itself failed
    ended_by: str = "the workers did not stop in time"  # why workers were ended that neither returned nor failed


@dataclass(frozen=True)
class OpenRun:
    """The argument of `Agent.open_run`: the run folder to open on a machine."""

    folder: str  # absolute path, or relative to the work folder
    token: str  # name of a file in ranks/ that only the launcher's own folder has
    holder: str  # id of the launch that claims the folder
    run: str  # the run's id
    held: dict[str, int] | None = None  # size of each growing file that the launcher has; None: send no records
    output: bool = False  # also send the output of rank 0
    term: int = 0  # of the launcher of a detached run; workers of lower terms save and exit


@dataclass(frozen=True)
class RunOpened:
    """The state of a run folder on a machine, as `Agent.open_run` or `Agent.inspect_run` found it."""

    folder: str  # its absolute path
    shared: bool  # True if it is the launcher's own folder, on a shared disk
    checkpoints: bool  # True if it has any
    taken: bool = False  # True if another run, or an earlier start of this run, is active in it
    run: str = ""  # id of the run found in it; empty for none
    saved: int = -1  # the newest saved step; -1 for none
    held: dict[str, int] = field(default_factory=dict[str, int])  # size in bytes of each growing file
    own: bool = False  # True if this machine has locked it
    term: int = 0  # the highest term known there


# Modules of higher packages, by name: a worker's task with the imports before the fork, and a worker's user script.
WORKER, SCRIPT = "manyhands.worker.entry", "manyhands.worker.script"
ELASTIC = "manyhands.cluster.agents.elastic"  # starts and watches workers; imports torch


@dataclass(frozen=True)
class Orders:
    """The argument of `Agent.start_workers`: one start of workers on one machine."""

    argument: dict[str, Any]  # plain data: task, job, run folder on the machine, further arguments of the task
    logs: str  # folder of the workers' output, <rank>.log; ranks/ of the run folder
    rendezvous: Rendezvous  # a size of 0: one process per accelerator, or one process without accelerators
    device: str = "auto"  # "auto", "cpu" or the kind of accelerator
    threads: int = 0  # CPU threads for each process; 0 divides this machine's cores
    environment: dict[str, str] = field(default_factory=dict[str, str])  # variables for the workers
    script: tuple[str, ...] = ()  # the user's training script and its arguments; empty for manyhands' own tasks
    generation: int = 0  # index of the start, from 0
    term: int = 0  # of the launcher, if the workers continue without it (detached run); else 0


def orders_for(job: Job, task: str, folder: str, rendezvous: Rendezvous, **arguments: Any) -> Orders:
    """Returns the orders for one machine. `folder` is an absolute path there; `arguments` are those of the task."""
    argument = {"task": task, "job": job.model_dump(mode="json"), "folder": folder, **arguments}
    script = job.run.script if task == "train" else ()
    return Orders(argument, f"{folder}/ranks", rendezvous, job.cluster.device, job.cluster.threads, script=script)

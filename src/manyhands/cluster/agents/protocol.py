"""Events between a launcher and its agents, and what the agent's methods take and return.

A launcher sends `WorkerCommand` while workers run, an agent the other events. Not here: how a message becomes a line
(`messages`), and what the launcher can call (`Agent`, and its base `Probe`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.messages import Message
from manyhands.config.job import Job
from manyhands.core.records import Failure
from manyhands.parallel.group.heartbeat import Seen


@dataclass(frozen=True)
class FilePiece(Message):
    """A piece of a growing file of a run folder from its byte `offset` on, or a small file in full."""

    name: str
    text: str
    offset: int = 0


@dataclass(frozen=True)
class WorkerCommand(Message):
    """A command to the workers of a machine.

    "stop": save and exit. "leave": processes of another machine have failed; save what can be saved, and exit. "free":
    give up waiting, because a peer is gone and the network has not reported it. "kill": end at once.
    """

    what: Literal["stop", "leave", "free", "kill"]
    rank: int | None = None  # the rank to kill, which hangs; the other ranks see a failed process


@dataclass(frozen=True)
class Reachable(Message):
    """The socket at which a new connection reaches this agent, should the first one end."""

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
    """The state of a machine's processes; sent where one is not well."""

    host: str
    ranks: list[Seen]


@dataclass(frozen=True)
class WorkerExited(Message):
    """A process has failed; sent at once, before the other processes of its machine are ended."""

    rank: int
    code: int
    host: str
    record: Failure | None = None


@dataclass(frozen=True)
class StillLeaving(Message):
    """Processes of this machine are saving, or about to, after a failure of the run."""


@dataclass(frozen=True)
class HeadReplaced(Message):
    """This agent obeys another launcher, or the run was stopped on this machine: its processes save and exit."""


@dataclass(frozen=True)
class WorkersEnded(Message):
    """How a machine's processes ended, by rank: the last event of a start."""

    returned: dict[int, Any] = field(default_factory=dict[int, Any])  # what their entry returned
    failed: dict[int, int] = field(default_factory=dict[int, int])  # exit codes
    words: dict[int, str] = field(default_factory=dict[int, str])  # end of the logs of failed ones without a record
    host: str = ""  # the machine's own name
    records: list[Failure] = field(default_factory=list[Failure])  # written by failed ones
    broken: str = ""  # the agent's own traceback
    ended_by: str = "the workers did not stop in time"  # why they were ended, where they neither returned nor failed


@dataclass(frozen=True)
class OpenRun:
    """A run folder to open on a machine."""

    folder: str  # its path, from the work folder
    token: str  # a file in its ranks/ by which the launcher's own is recognised
    holder: str  # the start of a run that claims it
    run: str  # the run's id
    held: dict[str, int] | None = None  # bytes of each growing file that the launcher has; None: it wants no records
    output: bool = False  # send what rank 0 prints, too
    term: int = 0  # of the launcher of a detached run; agents of lower terms make way


@dataclass(frozen=True)
class RunOpened:
    """The run folder on a machine."""

    folder: str  # its absolute path
    shared: bool  # it is the launcher's own
    checkpoints: bool  # it has some
    taken: bool = False  # another run is active in it
    run: str = ""  # id of the run that it held; empty for none
    saved: int = -1  # the newest step that is saved there; -1 for none
    held: dict[str, int] = field(default_factory=dict[str, int])  # bytes of each growing file that are there
    own: bool = False  # this machine holds it, and no other
    term: int = 0  # the highest that is known there


@dataclass(frozen=True)
class RunInspected:
    """The run folder on a machine before it is opened."""

    run: str  # id of the run; empty for none
    checkpoints: bool  # it has some
    busy: bool  # processes of an earlier start are still there
    term: int = 0  # the highest that is known there


@dataclass(frozen=True)
class Prepared:
    """The kind of device that is used on a machine, and how many there are; 1 for a CPU."""

    device: str
    count: int


# Modules by name, since they lie above this package: what each process runs, which is a task of ours or a script of
# the user's, and what imports and opens everything that CPU workers need before they are forked.
WORKER, SCRIPT, PRELOAD = "manyhands.worker.entry", "manyhands.worker.script", "manyhands.worker.preload"
# Starts and watches them: the only file of the agent's that imports torch.
ELASTIC = "manyhands.cluster.agents.elastic"


@dataclass(frozen=True)
class Orders:
    """One generation of workers on one machine."""

    argument: dict[str, Any]  # plain data: the task, the job, the run folder there, what the task needs besides
    logs: str  # folder for each worker's own output, <rank>.log; ranks/ of the run folder
    rendezvous: Rendezvous  # a size of 0: one process for each accelerator of this machine, or one
    device: str = "auto"  # "auto", "cpu" or the kind of accelerator
    threads: int = 0  # CPU threads for each process; 0 divides this machine's cores
    environment: dict[str, str] = field(default_factory=dict[str, str])  # variables for the workers
    script: tuple[str, ...] = ()  # the user's own training script and its words; empty for a task of ours
    generation: int = 0  # counts the starts of a run's processes
    term: int = 0  # of the launcher, without which the processes continue; 0 where they don't


def orders_for(
    job: Job,
    task: str,
    folder: str,
    rendezvous: Rendezvous,
    *,
    device: str = "",
    environment: dict[str, str] | None = None,
    generation: int = 0,
    **more: Any,
) -> Orders:
    """Returns the orders for one machine; `folder` is absolute there, and `more` plain data that the task needs."""
    argument = {"task": task, "job": job.model_dump(mode="json"), "folder": folder, **more}
    script = job.run.script if task == "train" else ()
    device, threads = device or job.cluster.device, job.cluster.threads
    return Orders(argument, f"{folder}/ranks", rendezvous, device, threads, environment or {}, script, generation)

"""What a head asks its machines' agents for, and what these tell of their own. The doctor's questions are with it.

Not here: how a message becomes a line (`messages`), and what is done about one (`agent`, `supervise`).
"""

from dataclasses import dataclass, field
from typing import Any

from manyhands.cluster.agents.orders import Orders
from manyhands.cluster.doctor.questions import FactsWanted
from manyhands.cluster.messages import Done, Message, Request
from manyhands.core.records import Failure
from manyhands.parallel.heartbeat import Seen


@dataclass(frozen=True)
class Alive(Message):
    """A heartbeat, which the agent answers with another; `received` acknowledges messages by their number."""

    received: int = 0


@dataclass(frozen=True)
class Reconnected(Alive):
    """The first message over a new connection to the same agent; unacknowledged messages follow."""


@dataclass(frozen=True)
class StopWorkers(Message):
    """Have the workers save and leave."""


@dataclass(frozen=True)
class KillWorkers(Message):
    """End the workers at once."""


@dataclass(frozen=True)
class FreeWorkers(Message):
    """Have the workers give up what they wait for: who should come is gone, and the network hasn't told them."""


@dataclass(frozen=True)
class PeersFailed(Message):
    """Processes of another machine have failed: those here may save what they have, and leave."""


@dataclass(frozen=True)
class KillWorker(Message):
    """End this one at once, which hangs; the others hear it as any process's end."""

    rank: int


@dataclass(frozen=True)
class Greeting(Message):
    """What a machine says of itself; see `doctor.facts`."""

    facts: dict[str, Any]
    socket: str = ""  # where a new connection reaches this agent, should the first one end; empty where none can


@dataclass(frozen=True)
class Hello(Request[Greeting]):
    """Who are you? From now on a silent head is a head that is gone, if it is on another machine."""

    wanted: FactsWanted = field(default_factory=FactsWanted)
    remote: bool = False


@dataclass(frozen=True)
class FolderThere(Message):
    """A folder on the machine, by its absolute path."""

    folder: str


@dataclass(frozen=True)
class TakeCode(Request[FolderThere]):
    """Put these files (base64, by their path in the work folder) into a folder of their own, and work there."""

    files: dict[str, str]


@dataclass(frozen=True)
class MakeScratch(Request[FolderThere]):
    """A folder that goes again when the head does."""


@dataclass(frozen=True)
class RunOpened(Message):
    """The run folder on a machine."""

    folder: str  # its absolute path
    shared: bool  # it is the head's own
    checkpoints: bool  # it has some
    taken: bool = False  # another run goes on in it
    run: str = ""  # id of the run that it held; empty for none
    saved: int = -1  # the newest step that is saved there; -1 for none
    held: dict[str, int] = field(default_factory=dict[str, int])  # bytes of each growing file that are there
    own: bool = False  # this machine holds it, and no other
    term: int = 0  # the highest that is known there


@dataclass(frozen=True)
class OpenRun(Request[RunOpened]):
    """Make the run folder and keep other runs out of it."""

    folder: str  # its path, from the work folder
    token: str  # a file in its ranks/ by which the head's own is recognised
    holder: str  # the start of a run that claims it
    run: str  # the run's id
    records: bool = False  # send what is written there
    held: dict[str, int] = field(default_factory=dict[str, int])  # bytes of each growing file that the head has already
    output: bool = False  # send what rank 0 prints, too
    term: int = 0  # of the head of a detached run; who works for less makes way


@dataclass(frozen=True)
class RunInspected(Message):
    """What is in a run folder on a machine, before it is opened."""

    run: str  # id of the run; empty for none
    checkpoints: bool  # it has some
    busy: bool  # processes that an earlier agent of this machine has started are there still
    term: int = 0  # the highest that is known there


@dataclass(frozen=True)
class InspectRun(Request[RunInspected]):
    """What is in this run folder, and have the processes left that were this machine's, by its place and start?

    They are to, where the run is detached.
    """

    folder: str
    machine: int
    generation: int
    run: str = ""
    term: int = 0


@dataclass(frozen=True)
class FilePiece(Message):
    """A piece of a growing file of a run folder from its byte `offset` on, or a small file whole."""

    name: str
    text: str
    offset: int = 0


@dataclass(frozen=True)
class KeepRecords(Request[FolderThere]):
    """Put these pieces of a run's records into its folder, for rank 0 to go on with."""

    folder: str
    pieces: list[FilePiece]


@dataclass(frozen=True)
class LogText(Message):
    """What has come to a file, and where the next look begins."""

    text: str
    offset: int


@dataclass(frozen=True)
class ReadLog(Request[LogText]):
    """Whole lines of a file from `offset` on; with `rest` the last one without its end too."""

    path: str
    offset: int
    rest: bool


@dataclass(frozen=True)
class Bound(Message):
    """The store's port."""

    port: int


@dataclass(frozen=True)
class Bind(Request[Bound]):
    """Listen for the workers of all machines, on one address; the store is served there later."""

    address: str
    port: int = 0


@dataclass(frozen=True)
class OpenTunnelEnds(Request[FolderThere]):
    """Make a folder for the ends of ssh tunnels, anew for each start; the machine's processes get this address."""

    address: str


@dataclass(frozen=True)
class TunnelsOpened(Message):
    """The last words of those that don't stand, by name."""

    failed: dict[str, str]


@dataclass(frozen=True)
class OpenTunnels(Request[TunnelsOpened]):
    """Start these ssh commands, by the name of the machine that each leads to, and wait until they stand."""

    commands: dict[str, list[str]]
    seconds: float


@dataclass(frozen=True)
class ReachThere(Request[Done]):
    """Have another machine's port be reached on its address of loopback here."""

    address: str
    port: int


@dataclass(frozen=True)
class TunnelEnded(Message):
    """A tunnel that this machine holds has ended by itself."""

    what: str


@dataclass(frozen=True)
class Prepared(Message):
    """The kind of device that is used on a machine, and how many there are; 1 for a CPU."""

    device: str
    count: int


@dataclass(frozen=True)
class Prepare(Request[Prepared]):
    """Import what workers need: so many of them (0: unknown), with so many threads each (0: cores shared out)."""

    size: int
    threads: int
    device: str


@dataclass(frozen=True)
class WorkersEnded(Message):
    """An agent's last word: what became of its machine's processes, by rank."""

    returned: dict[int, Any] = field(default_factory=dict[int, Any])  # what their entry returned
    failed: dict[int, int] = field(default_factory=dict[int, int])  # exit codes
    # the end of the logs of failed ones that left no record
    words: dict[int, str] = field(default_factory=dict[int, str])
    host: str = ""  # the machine's own name
    records: list[Failure] = field(default_factory=list[Failure])  # what failed ones wrote of themselves
    broken: str = ""  # the agent's own traceback
    ended_by: str = "the workers did not stop in time"  # why they were ended, where they neither returned nor failed


@dataclass(frozen=True)
class StartWorkers(Request[WorkersEnded]):
    """Start workers, and answer when all have ended."""

    orders: Orders


@dataclass(frozen=True)
class WorkersStarted(Message):
    """The workers' process ids, by local rank."""

    generation: int
    pids: list[int]


@dataclass(frozen=True)
class WorkersSeen(Message):
    """How the processes of a machine are; told where one isn't well."""

    host: str
    ranks: list[Seen]


@dataclass(frozen=True)
class WorkerExited(Message):
    """A process has failed; told at once, before the others of its machine are ended."""

    rank: int
    code: int
    host: str
    record: Failure | None = None


@dataclass(frozen=True)
class HeadReplaced(Message):
    """Another head is obeyed now, or the run was stopped on this machine: its processes save and leave."""


@dataclass(frozen=True)
class StillLeaving(Message):
    """One of the run has failed, and processes of this machine save what they have, or are on their way to it."""

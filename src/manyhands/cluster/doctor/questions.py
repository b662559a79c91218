"""What a machine can be asked to find out: who it is, who reaches it, whom it reaches, and how fast."""

from dataclasses import dataclass

from manyhands.cluster.doctor.findings import Attempt
from manyhands.cluster.messages import Done, Message, Request


@dataclass(frozen=True)
class FactsWanted:
    """What a machine is to say of itself beside the general facts."""

    workdir: str = ""  # of the job; empty for where the agent is
    runs: str = ""  # folder in which run folders will lie; empty for the usual one
    data: str = ""  # as the job names it; empty for none
    data_dir: str = ""  # where the job says that data lies
    torch: bool = False  # where there is an accelerator torch is asked too, which takes seconds
    only: tuple[str, ...] = ()  # names of the facts that are wanted; empty for all


@dataclass(frozen=True)
class Listener:
    """Where a machine listens, or why it can't."""

    address: str  # its own
    port: int = 0  # of the listener
    token: str = ""  # who doesn't know it isn't answered
    error: str = ""  # why nothing listens there; empty where all is well
    holder: str = ""  # who holds the port, if that is why

    @property
    def trouble(self) -> str:
        """The error and who is to blame; empty where it listens."""
        return self.error + (f", by {self.holder}" if self.holder else "")


@dataclass(frozen=True)
class Listening(Message):
    """One listener for each address."""

    listeners: tuple[Listener, ...]


@dataclass(frozen=True)
class Listen(Request[Listening]):
    """Be reached on exactly these addresses, for so long at most; port 0 is any free one."""

    addresses: tuple[str, ...]
    port: int = 0
    seconds: float = 60.0


@dataclass(frozen=True)
class Attempted(Message):
    """How each attempt went, in the order of the targets."""

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class Connect(Request[Attempted]):
    """Reach others' listeners, all at once."""

    targets: tuple[Listener, ...]
    timeout_s: float


@dataclass(frozen=True)
class Measured(Message):
    """What went through; None where it couldn't be measured."""

    mbps: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Measure(Request[Measured]):
    """Send to a listener for about so long, as fast as it goes."""

    target: Listener
    seconds: float


@dataclass(frozen=True)
class Unlisten(Request[Done]):
    """Close all listeners."""


@dataclass(frozen=True)
class ClockTime(Message):
    """What a machine's clock shows."""

    time: float


@dataclass(frozen=True)
class AskClock(Request[ClockTime]):
    """What does your clock show?"""


@dataclass(frozen=True)
class OpenPort:
    """What a process of manyhands listens on."""

    address: str  # of this machine; 0.0.0.0 or :: for all of them
    port: int
    pid: int
    lets_in: bool  # whether a connection to it was answered just now


@dataclass(frozen=True)
class OpenPorts(Message):
    """All of a machine's."""

    ports: tuple[OpenPort, ...]


@dataclass(frozen=True)
class AskPorts(Request[OpenPorts]):
    """What of manyhands listens on your machine?"""

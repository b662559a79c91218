"""The heartbeat that each process of a run writes, by which stalls are detected."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manyhands.core.terminal import plain
from manyhands.core.timeouts import STALL, STALL_S

HEARTBEAT_FILE = "MANYHANDS_HEARTBEAT_FILE"  # names the file for a worker's `Heartbeat`

_Seconds = Annotated[float, Field(ge=0, lt=1e9)]  # plausible values from other processes


class Heartbeat(BaseModel):
    """The progress of a process."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    count: int  # of heartbeats; where it stops growing, the process doesn't run
    step: int  # updates made
    phase: Annotated[str, Field(max_length=100), AfterValidator(plain)]  # what it is at: train, data, evaluate, save
    still_s: _Seconds  # since it last got on
    usual_s: _Seconds  # the median of its last updates; of the first, what the link is expected to need; 0 if unknown
    calls: int = -1  # collectives of all processes that it has reached; -1 if unknown
    moved_bytes: int = 0  # by all its connections, both ways; 0 where the system doesn't say
    cpu_s: _Seconds = 0.0  # processor time that it has used

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which it is a stall."""
        return STALL_S + STALL * self.usual_s

    @property
    def late(self) -> bool:
        return self.still_s > self.limit_s


def leave_path(folder: Path) -> Path:
    """A file that exists once the processes with heartbeats in that folder should stop waiting for their peers."""
    return folder / "leave"


class Seen(Heartbeat):
    """A heartbeat, and what the agent of its machine observes from outside."""

    rank: int  # whose it is
    pid: int  # of the process
    quiet_s: float  # since its last heartbeat
    stopped: bool  # True where the system doesn't let it run: SIGSTOP, or a debugger

    @property
    def stood_s(self) -> float:
        """Seconds since its last progress."""
        return self.still_s + self.quiet_s


def rescue_path(folder: Path, rank: int) -> Path:
    """A file beside the heartbeat that exists once a process whose peer has failed saves its state."""
    return folder / f"{rank}.saves"

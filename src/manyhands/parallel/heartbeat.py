"""Heartbeats of the processes of a run, from which a stall and the stalled rank are detected."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manyhands.core.terminal import plain

# The variable that names the file for a worker's `Heartbeat`.
HEARTBEAT_FILE = "MANYHANDS_HEARTBEAT_FILE"
# The interval of heartbeats.
HEARTBEAT_S = 1.0
# A step is stalled after STALL_S + STALL times the usual time.
STALL_S, STALL = 30.0, 3.0

# A plausible time in another process's heartbeat.
_Seconds = Annotated[float, Field(ge=0, lt=1e9)]


class Heartbeat(BaseModel):
    """The progress of a process."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    count: int  # of heartbeats; while it doesn't grow, the process doesn't run
    step: int  # updates made
    phase: Annotated[str, Field(max_length=100), AfterValidator(plain)]  # train, data, evaluate, save
    still_s: _Seconds  # since its last progress
    usual_s: _Seconds  # the median of its last updates; before the first, the expected time; 0 if unknown
    # collectives of all processes that it has reached; -1 if unknown
    calls: int = -1
    moved_bytes: int = 0  # by all its connections, in both directions; 0 if unknown
    cpu_s: _Seconds = 0.0  # processor time used

    @property
    def limit_s(self) -> float:
        """The time without progress that counts as a stall."""
        return STALL_S + STALL * self.usual_s

    @property
    def late(self) -> bool:
        """True if the process knows that it is stalled."""
        return self.still_s > self.limit_s


def leave_path(folder: Path) -> Path:
    """Returns the file that tells the processes with heartbeats in a folder to stop waiting for their peers."""
    return folder / "leave"


class Seen(Heartbeat):
    """A heartbeat with what the agent of its machine observes."""

    rank: int  # of the process
    pid: int  # of the process
    quiet_s: float  # since its last heartbeat
    stopped: bool  # by SIGSTOP or a debugger

    @property
    def stood_s(self) -> float:
        """Seconds since the last known progress."""
        return self.still_s + self.quiet_s


def rescue_path(folder: Path, rank: int) -> Path:
    """Returns the file that exists while a process saves its state after the failure of a peer."""
    return folder / f"{rank}.saves"

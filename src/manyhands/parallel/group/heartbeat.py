"""Heartbeats of a run's processes, from which stalls are detected."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manyhands.core.terminal import plain
from manyhands.core.timeouts import STALL_FACTOR, STALL_S

HEARTBEAT_FILE = "MANYHANDS_HEARTBEAT_FILE"  # the environment variable with the path of a worker's `Heartbeat`

_Seconds = Annotated[float, Field(ge=0, lt=1e9)]  # plausible values from other processes


class Heartbeat(BaseModel):
    """The progress that a worker process reports periodically."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    count: int  # heartbeats written; constant while the process doesn't run
    step: int  # updates made
    phase: Annotated[str, Field(max_length=100), AfterValidator(plain)]  # current phase: train, data, evaluate, save
    still_s: _Seconds  # seconds since the last progress
    usual_s: _Seconds  # median seconds of recent updates; for the first, the expected time of the link; 0 if unknown
    calls: int = -1  # collectives of the entire run that this process has reached; -1 if unknown
    moved_bytes: int = 0  # sent and received on all connections; 0 if unknown
    cpu_s: _Seconds = 0.0  # CPU time of the process

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the process counts as stalled."""
        return STALL_S + STALL_FACTOR * self.usual_s

    @property
    def late(self) -> bool:
        return self.still_s > self.limit_s


def stop_waiting_path(folder: Path) -> Path:
    """Returns the path of the file that signals workers (heartbeats in `folder`) to stop waiting for lost peers."""
    return folder / "leave"


class ObservedHeartbeat(Heartbeat):
    """A worker's heartbeat, with what the machine's agent (the process that starts the workers) observes."""

    rank: int
    pid: int
    quiet_s: float  # since the last heartbeat
    stopped: bool  # True if the process is suspended by SIGSTOP or a debugger

    @property
    def stood_s(self) -> float:
        """Seconds since the worker's last progress, now rather than at its last heartbeat."""
        return self.still_s + self.quiet_s


def emergency_save_path(folder: Path, rank: int) -> Path:
    """Returns the path of the file by which rank `rank` announces a save after a peer's failure."""
    return folder / f"{rank}.saves"

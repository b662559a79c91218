"""An agent's view of the processes on its machine: their heartbeats, and whether the system lets them run."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from manyhands.core.files import read_bytes
from manyhands.core.timeouts import HEARTBEAT_S
from manyhands.parallel.group.heartbeat import Heartbeat, Seen

# Who got on or gave a sign of life more recently is well.
_WELL_S = 2.0
# Of a process that the system doesn't let run, and that hasn't begun to train.
_BEFORE_THE_FIRST = Heartbeat(count=0, step=0, phase="build", still_s=0.0, usual_s=0.0)


def heartbeat_path(scratch: Path, rank: int) -> Path:
    """The file of a process's heartbeat."""
    return scratch / f"{rank}.heartbeat"


def process_state(pid: int) -> dict[str, Any]:
    """Returns the fields of `Seen` that the operating system reports for a local process; empty without a process."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        spent = process.cpu_times()
        stopped = process.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        return {"cpu_s": spent.user + spent.system, "stopped": stopped}
    return {}


class HeartbeatMonitor:
    """Reads the heartbeats of this machine's processes.

    Args:
        scratch: the folder of their heartbeats.
        pids: by rank.
    """

    def __init__(self, scratch: Path, pids: Mapping[int, int]) -> None:
        self._scratch, self._pids = scratch, pids
        self._last: dict[int, tuple[Heartbeat, float]] = {}
        self._stopped: dict[int, float] = {}
        self._due = 0.0

    @property
    def usual_s(self) -> float:
        """What an update usually takes, as far as it is known."""
        return max((heartbeat.usual_s for heartbeat, _ in self._last.values()), default=0.0)

    def news(self, *, all_of_them: bool) -> list[Seen]:
        """About once a second, all processes where one of them isn't well, or where all are asked for; else nothing."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + HEARTBEAT_S
        seen = [found for rank in self._pids if (found := self._look(rank, now))]
        if all_of_them or any(each.stood_s > _WELL_S or each.stopped for each in seen):
            return seen
        return []

    def last(self, rank: int) -> Heartbeat | None:
        """Returns the last heartbeat of a process; None before it begins to train."""
        return self._last[rank][0] if rank in self._last else None

    def _look(self, rank: int, now: float) -> Seen | None:
        with contextlib.suppress(OSError, ValueError, ValidationError):
            heartbeat = Heartbeat.model_validate_json(read_bytes(heartbeat_path(self._scratch, rank), 1 << 12))
            if rank not in self._last or self._last[rank][0].count != heartbeat.count:
                self._last[rank] = heartbeat, now
        found = process_state(self._pids[rank])
        if rank in self._last:
            heartbeat, at = self._last[rank]
        elif found.get("stopped"):
            heartbeat, at = _BEFORE_THE_FIRST, self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)
            return None  # it hasn't begun to train
        known = heartbeat.model_dump() | {"rank": rank, "pid": self._pids[rank], "quiet_s": now - at}
        return Seen(**known | found) if found else None

"""Observes an agent's workers: heartbeats, suspended processes, time to exit, and out-of-memory kills."""

import contextlib
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from manyhands.core.files import read_bytes
from manyhands.core.machine import CGROUPS
from manyhands.core.records import PROCESS_ENDED, Failure
from manyhands.core.timeouts import HEARTBEAT_S, LEAVE_S, SAVE_MOST_S, SAVE_QUIET_S
from manyhands.parallel.group.heartbeat import Heartbeat, ObservedHeartbeat, emergency_save_path

_WELL_S = 2.0  # a process with more recent progress is well
# Stands in for the heartbeat of a suspended process that hasn't begun to train.
_NO_HEARTBEAT = Heartbeat(count=0, step=0, phase="build", still_s=0.0, usual_s=0.0)
UPDATES = 2.0  # after a failure a process computes for this many update durations, until its next collective fails


def heartbeat_path(scratch: Path, rank: int) -> Path:
    return scratch / f"{rank}.heartbeat"


def process_state(pid: int) -> dict[str, Any]:
    """Returns {"cpu_s": CPU seconds, "stopped": is suspended} of a local process; {} if the process has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        spent = process.cpu_times()
        stopped = process.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        return {"cpu_s": spent.user + spent.system, "stopped": stopped}
    return {}


class HeartbeatMonitor:
    """Reads the heartbeats of this machine's workers in the folder `scratch`; `pids` are process ids by rank."""

    def __init__(self, scratch: Path, pids: Mapping[int, int]) -> None:
        self._scratch, self._pids, self._due = scratch, pids, 0.0
        self._last: dict[int, tuple[Heartbeat, float]] = {}
        self._stopped: dict[int, float] = {}

    @property
    def usual_s(self) -> float:
        """The usual duration of an update in seconds; 0 if unknown."""
        return max((heartbeat.usual_s for heartbeat, _ in self._last.values()), default=0.0)

    def states(self, *, always: bool) -> list[ObservedHeartbeat]:
        """Returns all workers' states if one is stalled or `always` is set, at most once a second; otherwise []."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + HEARTBEAT_S
        seen = [found for rank in self._pids if (found := self._worker_state(rank, now))]
        return seen if always or any(each.stood_s > _WELL_S or each.stopped for each in seen) else []

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """Returns the last heartbeat of a rank; None before the rank begins to train."""
        return self._last[rank][0] if rank in self._last else None

    def _worker_state(self, rank: int, now: float) -> ObservedHeartbeat | None:
        with contextlib.suppress(OSError, ValueError, ValidationError):
            heartbeat = Heartbeat.model_validate_json(read_bytes(heartbeat_path(self._scratch, rank), 1 << 12))
            if rank not in self._last or self._last[rank][0].count != heartbeat.count:
                self._last[rank] = heartbeat, now
        found = process_state(self._pids[rank])
        if rank in self._last:
            heartbeat, at = self._last[rank]
        elif found.get("stopped"):
            heartbeat, at = _NO_HEARTBEAT, self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)
            return None  # the process hasn't begun to train
        known = heartbeat.model_dump() | {"rank": rank, "pid": self._pids[rank], "quiet_s": now - at}
        return ObservedHeartbeat(**known | found) if found else None


class ExitTimer:
    """Limits the time for workers to exit after a failure. Workers that save (`emergency_save_path`) get more time."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._since, self.begun = scratch, 0.0, False
        self._progress: dict[int, tuple[object, float]] = {}

    def begin(self) -> None:
        """Starts the time limit, because a process of the run has failed. Later calls do nothing."""
        if not self.begun:
            self.begun, self._since = True, time.monotonic()

    def has_time(self, remaining: Mapping[int, int], usual_s: float) -> bool:
        """Returns True while workers ({rank: process id}) have time to exit. `usual_s` is the duration of an update."""
        began_s = time.monotonic() - self._since
        if began_s < LEAVE_S + UPDATES * usual_s:
            return True
        return began_s < SAVE_MOST_S and any(self._save_progresses(rank, pid) for rank, pid in remaining.items())

    def _save_progresses(self, rank: int, pid: int) -> bool:
        """Returns True if a worker is saving, and has used CPU time or written bytes within SAVE_QUIET_S."""
        if not emergency_save_path(self._scratch, rank).exists():
            return False
        done, now = None, time.monotonic()
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            written = process.io_counters().write_chars if hasattr(process, "io_counters") else 0
            done = process.cpu_times()[:2], written
        if rank not in self._progress or self._progress[rank][0] != done:
            self._progress[rank] = done, now
        return now - self._progress[rank][1] < SAVE_QUIET_S


class OutOfMemoryKills:
    """Detects which killed workers ran out of memory, by the kill counter of this process's cgroup (v2)."""

    def __init__(self) -> None:
        self._group = CGROUPS  # the root group, as in a container
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                group = CGROUPS / line.removeprefix("0::/")
                if line.startswith("0::") and (group / "memory.events").is_file():
                    self._group = group
        self._reported = self._read_counter()

    def record(self, rank: int, pid: int, heartbeat: Heartbeat | None) -> Failure | None:
        """Returns a failure record for a worker killed by SIGKILL; None if the kernel's kill counter has not risen."""
        if self._read_counter() <= self._reported:
            return None
        self._reported += 1
        size = ""
        with contextlib.suppress(OSError, ValueError):  # "max" for no limit
            size = f" (limit {int((self._group / 'memory.max').read_text()) >> 20:,} MiB)"
        what = f"rank {rank} was killed by the kernel, out of memory{size}"
        hints = ["use fewer processes on this machine", "or reduce train.micro_batch", "or shard: --parallel fsdp"]
        return Failure(
            time=time.time(), rank=rank, host=platform.node(), pid=pid, step=heartbeat and heartbeat.step,
            phase=heartbeat.phase if heartbeat else "", error=PROCESS_ENDED, what=what, hints=hints,
        )  # fmt: skip

    def _read_counter(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError):
            counts = dict(line.split() for line in (self._group / "memory.events").read_text().splitlines())
            return int(counts["oom_kill"])
        return 0

"""An agent's view of its processes: heartbeats, whether the system runs them, time to leave, kills for memory."""

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
from manyhands.parallel.group.heartbeat import Heartbeat, Seen, rescue_path

# A process that made progress or sent a heartbeat more recently is well.
_WELL_S = 2.0
# Of a process that the system doesn't let run, and that hasn't begun to train.
_BEFORE_THE_FIRST = Heartbeat(count=0, step=0, phase="build", still_s=0.0, usual_s=0.0)
# Until the next collective they compute, for so many times as long as an update takes.
UPDATES = 2.0


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
    """Reads the heartbeats of this machine's processes, whose ids are given by rank, in their folder."""

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


class Leaving:
    """Gives processes time to leave; those that save, as their files in `scratch` say, have it while they progress."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._since = scratch, 0.0
        self._signs: dict[int, tuple[object, float]] = {}

    @property
    def begun(self) -> bool:
        """True once one of the run has failed."""
        return bool(self._since)

    def begin(self) -> None:
        """Notes that one of the run has failed; the second time changes nothing."""
        self._since = self._since or time.monotonic()

    def patient(self, left: Mapping[int, int], usual_s: float) -> bool:
        """Whether those that are left (process id by rank) have time yet; `usual_s` is what an update takes."""
        now = time.monotonic()
        began_s = now - self._since
        return began_s < LEAVE_S + UPDATES * usual_s or (
            began_s < SAVE_MOST_S and any(self._saves(rank, pid, now) for rank, pid in left.items())
        )

    def _saves(self, rank: int, pid: int, now: float) -> bool:
        """Whether a process saves what it has, and gets on with it."""
        if not rescue_path(self._scratch, rank).exists():
            return False
        sign = _done_by(pid)
        if rank not in self._signs or self._signs[rank][0] != sign:
            self._signs[rank] = sign, now
        return now - self._signs[rank][1] < SAVE_QUIET_S


def _done_by(pid: int) -> object:
    """CPU time of a process, and bytes written where the operating system reports them."""
    try:
        process = psutil.Process(pid)
        written = process.io_counters().write_chars if hasattr(process, "io_counters") else 0
        return process.cpu_times()[:2], written
    except psutil.Error:
        return None


class MemoryKills:
    """Attributes out-of-memory kills to workers that ended by SIGKILL, by the counter of this process's cgroup (v2)."""

    def __init__(self) -> None:
        self._group = _own_group()
        self._reported = self._count()

    def record(self, rank: int, pid: int, heartbeat: Heartbeat | None) -> Failure | None:
        """The failure record of a killed worker if the counter has risen; else None, also where there is no counter."""
        if self._count() <= self._reported:
            return None
        self._reported += 1
        limit = self._limit()
        hints = ["use fewer processes on this machine", "or reduce train.micro_batch", "or shard: --parallel fsdp"]
        size = f" (limit {limit >> 20:,} MiB)" if limit else ""
        what = f"rank {rank} was killed by the kernel, out of memory{size}"
        return Failure(
            time=time.time(), rank=rank, host=platform.node(), pid=pid, step=heartbeat and heartbeat.step,
            phase=heartbeat.phase if heartbeat else "", error=PROCESS_ENDED, what=what, hints=hints,
        )  # fmt: skip

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in (self._group / "memory.events").read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0

    def _limit(self) -> int:
        """The cgroup's limit in bytes; 0 where it has none of its own."""
        with contextlib.suppress(OSError, ValueError):  # "max"
            return int((self._group / "memory.max").read_text())
        return 0


def _own_group() -> Path:
    """The folder of this process's cgroup; in a container, whose path may be that on the host, the topmost visible."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            group = CGROUPS / line.removeprefix("0::/")
            if line.startswith("0::") and (group / "memory.events").is_file():
                return group
    return CGROUPS

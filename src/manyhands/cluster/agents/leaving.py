"""Processes of a machine that end: how long they are given, and which of them the kernel killed for memory."""

import contextlib
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from manyhands.core.machine import CGROUPS
from manyhands.core.records import PROCESS_ENDED, Failure
from manyhands.core.timeouts import LEAVE_S, SAVE_MOST_S, SAVE_QUIET_S
from manyhands.parallel.group.heartbeat import Heartbeat, rescue_path

# Until the next collective they compute, for so many times as long as an update takes.
UPDATES = 2.0


class Leaving:
    """Gives processes time to leave, which those that save have as long as they get on.

    Args:
        scratch: where they say that they save.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._since = 0.0
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

"""Workers that the kernel killed for memory, found by the counter of the cgroup (version 2) that the agent is in."""

import contextlib
import platform
import time
from pathlib import Path

from manyhands.core.records import PROCESS_ENDED, Failure
from manyhands.parallel.heartbeat import Heartbeat

_ROOT = Path("/sys/fs/cgroup")


class MemoryKills:
    """Attributes the kernel's out-of-memory kills in this process's cgroup to workers that ended by SIGKILL."""

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
            group = _ROOT / line.removeprefix("0::/")
            if line.startswith("0::") and (group / "memory.events").is_file():
                return group
    return _ROOT

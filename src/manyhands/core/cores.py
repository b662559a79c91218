"""CPU cores that this process may use, and how busy others keep them."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_STAT = Path("/proc/stat")


def cores() -> float:
    """CPU cores that this process may use: by its affinity, and by the quota of its group of processes."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return min(float(count), quota) if quota else float(count)


def _quota() -> float:
    """The least of all groups that this process is in, from its own to the root; 0 where there is none."""
    found = [quota for folder in _folders() if (quota := _quota_of(folder)) > 0]
    return min(found, default=0.0)


def _folders() -> Iterator[Path]:
    """A container sees its own group as the root."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    yield from (_ROOT, _ROOT / "cpu")
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield from (_ROOT / ("cpu" if names else "") / part, *([] if names else [_ROOT / "unified" / part]))


def _quota_of(folder: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        most, period = (folder / "cpu.max").read_text().split()
        return int(most) / int(period)  # "max" where there is none
    with contextlib.suppress(OSError, ValueError):
        most = (folder / "cpu.cfs_quota_us").read_text()
        return max(0.0, int(most) / int((folder / "cpu.cfs_period_us").read_text()))
    return 0.0


# The system counts in hundredths of a second.
_WATCHED_S = 0.1


class Others:
    """How much of this machine's processors others took since this was made; 0 where the system doesn't tell."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float:
        """Of all processors' time, what neither idled nor was this process's, 0 to 1; watched for a while at least."""
        time.sleep(max(0.0, self._began[1] + _WATCHED_S - time.perf_counter()))
        busy_s, wall_s, own_s = (now - before for now, before in zip(self._now(), self._began, strict=True))
        whole_s = wall_s * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy_s - own_s) / whole_s)) if whole_s > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        return _busy_seconds(), time.perf_counter(), time.process_time()


def _busy_seconds() -> float:
    """Of all processors since the machine started."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, *rest = map(int, words[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

"""Memory that is left on this machine, or in the container that this process is in."""

import contextlib
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """Bytes in all, and bytes that are free or can be freed at once."""
    system = psutil.virtual_memory()
    total, free = system.total, system.available
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        cached = sum(int(value) for name, value in lines if name == "inactive_file")
        total, free = min(total, limit), min(free, limit - used + cached)
    return total, max(0, free)

"""Which machine a process is on, as far as other processes are concerned."""

import contextlib
import os
import socket
from pathlib import Path


def this_machine() -> str:
    """Equal for processes that share one network stack and see each other's ids: one machine, one container."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())  # noqa: PTH115
    return " ".join(parts)

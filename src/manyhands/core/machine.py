"""Identity, processors and memory of this machine, within the limits of a container."""

import contextlib
import functools
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names for bfloat16 instructions: x86 vectors, x86 matrices, ARM


def machine_id() -> str:
    """Returns an identifier of this machine and of the network and PID namespaces of this process."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())  # noqa: PTH115
    return " ".join(parts)


def memory_bytes() -> tuple[int, int]:
    """Returns (total, available) memory of this machine or container, in bytes."""
    system = psutil.virtual_memory()
    total, free = system.total, system.available
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((CGROUPS / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (line.split() for line in (CGROUPS / "memory.stat").read_text().splitlines())
        cached = sum(int(value) for name, value in lines if name == "inactive_file")
        total, free = min(total, limit), min(free, limit - used + cached)
    return total, max(0, free)


def cores() -> float:
    """Returns the number of CPU cores that the affinity and the cgroup quotas of this process allow."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(count), *(quota for folder in _cgroup_folders() if (quota := _cpu_quota(folder)) > 0)])


def _cgroup_folders() -> Iterator[Path]:
    """Yields the folders of this process's cgroups and of their parents. In a container, the root is its own cgroup."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    yield from (CGROUPS, CGROUPS / "cpu")
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield from (CGROUPS / ("cpu" if names else "") / part, *([] if names else [CGROUPS / "unified" / part]))


def _cpu_quota(folder: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        most, period = (folder / "cpu.max").read_text().split()
        return int(most) / int(period)  # without a quota, `most` is "max"
    with contextlib.suppress(OSError, ValueError):
        most = (folder / "cpu.cfs_quota_us").read_text()
        return max(0.0, int(most) / int((folder / "cpu.cfs_period_us").read_text()))
    return 0.0


class CpuModel(NamedTuple):
    """The name of a CPU model, and its support for bfloat16."""

    name: str
    bf16: bool  # has instructions for bfloat16; False if that is unknown


@functools.cache
def cpu_model() -> CpuModel:
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return parse_cpuinfo(text)


def parse_cpuinfo(cpuinfo: str) -> CpuModel:
    """Parses the first CPU in the text of /proc/cpuinfo, which is empty on systems other than Linux."""
    rows = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    values = {key.strip(): value.strip() for key, _, value in rows}
    keys = ("model name", "CPU part", "cpu model")
    name = next((values[key] for key in keys if values.get(key)), platform.processor() or platform.machine())
    flags = set(values.get("flags", values.get("Features", "")).split())
    known = sorted(flags & (_BF16 | {"avx2", "avx512f"}))  # some clouds use one name for all processors
    return CpuModel(" ".join([name, *known]), bool(flags & _BF16))

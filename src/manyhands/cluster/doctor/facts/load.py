"""What the machine has to offer, and who else uses it."""

import contextlib
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from manyhands.core.machine import memory as whole_memory

# Words in the command line of what trains on several processes.
TRAINERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "horovodrun",
            "msrun", "mpirun")  # fmt: skip
# manyhands' own agent is only at work while it has processes of its own: the doctor's has none.
AGENTS = ("manyhands.cluster.agents.agent", "manyhands.cluster.agents.elastic")
SHM = Path("/dev/shm")


def load() -> float:
    """Processes that were running or waiting to, over the last minute."""
    return psutil.getloadavg()[0]


def memory() -> dict[str, int]:
    """Bytes of memory, with the limit of its group of processes."""
    total, free = whole_memory()
    return {"total": total, "free": free}


def places(named: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """For /dev/shm and each named folder: its size and free bytes, whether it is there and can be written to."""
    found = {name: {"path": str(path.absolute()), **_place(path)} for name, path in named.items()}
    return {**({"shm": {"path": str(SHM), **_place(SHM)}} if SHM.is_dir() else {}), **found}


def _place(path: Path) -> dict[str, Any]:
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    usage = psutil.disk_usage(str(nearest))
    writable = os.access(nearest, os.W_OK | os.X_OK)
    return {"exists": path.is_dir(), "size": usage.total, "free": usage.free, "writable": writable}


def other_jobs() -> list[dict[str, Any]]:
    """Processes that look like training jobs of somebody, their heads only."""
    found: list[dict[str, Any]] = []
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "username"]):
        info = process.info
        words = info["cmdline"] or []
        if info["pid"] not in ours and _trains(process, words):
            found.append({"pid": info["pid"], "user": info["username"] or "", "command": " ".join(words)[:160],
                          "parent": info["ppid"]})  # fmt: skip
    pids = {job["pid"] for job in found}
    return [job for job in found if job["parent"] not in pids]


def _trains(process: psutil.Process, words: list[str]) -> bool:
    # `ssh n2 torchrun …` runs elsewhere, and an editor holds a file that only bears the name.
    programs = {Path(word).name for word in words[:2]} | {after for dash, after in pairwise(words) if dash == "-m"}
    if programs & set(TRAINERS):
        return True
    with contextlib.suppress(psutil.Error):
        return bool(programs & set(AGENTS)) and bool(process.children())
    return False

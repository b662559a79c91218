"""What the processes below one of them hold: /proc's own figures."""

import contextlib
from pathlib import Path

import psutil


def family(pid):
    """A process and all below it."""
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


def figures_of(processes):
    """By process: what it is, its CPU seconds, resident and proportional memory in MiB, threads and descriptors."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            memory, cpu = process.memory_full_info(), process.cpu_times()
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            found.append({
                "pid": process.pid, "parent": process.ppid(), "command": " ".join(process.cmdline())[-80:],
                "cpu_s": cpu.user + cpu.system, "rss_mib": memory.rss / 2**20, "pss_mib": memory.pss / 2**20,
                "own_mib": memory.uss / 2**20, "peak_mib": peak / 1024,
                "threads": process.num_threads(), "descriptors": process.num_fds(),
            })  # fmt: skip
    return found

"""Starts the processes of a run on this machine, by way of an agent in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOAD = "manyhands.train.preload"


@dataclass(frozen=True)
class LocalStart:
    """What to start here.

    Attributes:
        entry: "module:function" that each worker calls with `argument`.
        argument: plain data for it.
        processes: how many; at least one.
        logs: folder of the workers' own output.
        device: "cpu" or the kind of accelerator.
        threads: CPU threads for each process; 0 divides the cores.
    """

    entry: str
    argument: dict[str, Any]
    processes: int
    logs: Path
    device: str
    threads: int = 0


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_agent(start: LocalStart) -> subprocess.Popen[str]:
    """Starts the agent in a session of its own, so that Ctrl-C reaches only its head, and gives it its orders."""
    threads = start.threads or max(1, cores() // start.processes)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads)}
    if start.threads:
        environment["OMP_NUM_THREADS"] = str(start.threads)
    agent = subprocess.Popen(
        [sys.executable, "-m", "manyhands.cluster.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(start.logs / "agent.log").open("ab"),
        env=environment,
        text=True,
        start_new_session=True,
    )
    orders = {
        "entry": start.entry,
        "argument": start.argument,
        "sizes": [start.processes],
        "machine": 0,
        "logs": str(start.logs),
        "preload": [PRELOAD] if start.device == "cpu" else [],
        "start_method": "fork" if start.device == "cpu" else "spawn",
        "variables": {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]},
    }
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(orders) + "\n")
    agent.stdin.flush()
    return agent

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
        processes: how many; 0 for one per accelerator, or one.
        logs: folder of the workers' own output.
        device: "auto", "cpu" or the kind of accelerator.
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
    with (start.logs / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "manyhands.cluster.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_thread_variables(start)},
            text=True,
            start_new_session=True,
        )
    orders = {
        "entry": start.entry,
        "argument": start.argument,
        "sizes": [start.processes],
        "machine": 0,
        "logs": str(start.logs),
        "preload": [PRELOAD],
        "device": start.device,
        "threads": start.threads,
    }
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(orders) + "\n")
    agent.stdin.flush()
    return agent


def _thread_variables(start: LocalStart) -> dict[str, str]:
    """OpenMP reads its number of threads once, when torch is loaded; so it is set before, where it can be known."""
    if start.threads:
        return {"OMP_NUM_THREADS": str(start.threads)}
    if start.processes and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": str(max(1, cores() // start.processes))}
    return {}

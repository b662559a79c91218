"""How far a run is now, from the ends of its files: cheap however long it has run."""

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.files import read_object
from manyhands.core.records import EvaluationMetrics, Event, Running, StepMetrics
from manyhands.core.run_folder import RunFolder
from manyhands.report.follow import Tail
from manyhands.report.read import STARTS, parse, parse_metrics
from manyhands.report.summary import ENDS
from manyhands.report.words import place

# Holds some hundred records.
_END_BYTES = 1 << 16


@dataclass(frozen=True)
class Now:
    """How far a run is."""

    state: str  # "starting", "running", "stopping"; or "unknown", where the head is on another machine
    processes: int | None = None  # how many train; None while that isn't known
    step: StepMetrics | None = None  # the newest record of an update
    top1: float | None = None  # of the newest evaluation
    end: Event | None = None  # the event that ended the work, if one did
    heard: float | None = None  # when the newest record was written; None where the run folder isn't to be seen here


def look(record: Running) -> Now:
    folder = RunFolder(Path(record.run))
    lines = end_of(folder.metrics)
    measured = [found for line in lines if (found := parse_metrics(line, folder))]
    events = [event for line in end_of(folder.events) if (event := parse(Event, line, folder.events))]
    since = [event for event in events if event.time >= record.time]
    steps = [found for found in measured if isinstance(found, StepMetrics)]
    scores = [found.top1 for found in measured if isinstance(found, EvaluationMetrics) and math.isfinite(found.top1)]
    environment = _object(folder.environment) if any(event.kind == "started" for event in since) else {}
    last = scores[-1] if scores else _object(folder.evaluations / "last.json").get("top1")
    times = [found.time for found in (record, *measured[-1:], *events[-1:])]
    return Now(
        heard=max(times) if folder.path.is_dir() else None,
        state=_state(record, since, any(found.time >= record.time for found in measured)),
        processes=environment.get("processes"),
        step=steps[-1] if steps else None,
        top1=last,
        end=next((event for event in reversed(since) if event.kind in ENDS), None),
    )


def as_object(record: Running, now: Now) -> dict[str, Any]:
    """A run as plain data, for --json."""
    step = now.step
    return {
        "run": record.run,
        "state": now.state,
        "pid": record.pid,
        "host": record.host,
        "hosts": record.hosts,
        "processes": now.processes,
        "started": record.time,
        "age_s": max(0.0, time.time() - record.time),
        "epoch": place(step)[0] if step else None,
        "epochs": -(-step.total_steps // step.steps_per_epoch) if step else None,
        "step": step.step if step else None,
        "total_steps": step.total_steps if step else None,
        "top1": now.top1,
        "command": record.command,
    }


def _state(record: Running, since: list[Event], measured: bool) -> str:
    if not record.here:
        return "unknown"
    last = next((event.kind for event in reversed(since) if event.kind in {"stopping", "stopped", *STARTS}), "")
    if last in {"stopping", "stopped"}:
        return "stopping"
    return "running" if measured else "starting"


def end_of(path: Path) -> list[dict[str, Any]]:
    """The last records of a file; one that is cut in two is left out."""
    with suppress(OSError):
        return Tail(path, max(0, path.stat().st_size - _END_BYTES)).poll()
    return []


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) or {}

"""Follows an active run, and reads its progress from the ends of its files."""

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.files import open_file, read_object
from manyhands.core.records import EvaluationMetrics, Event, Running, StepMetrics, parse_record_line
from manyhands.core.run_folder import RunFolder
from manyhands.report import read, summary

_END_BYTES = 1 << 16  # size of a file's end that holds some hundred records


@dataclass
class Tail:
    """Reads complete lines that were added to a file since the last poll."""

    path: Path  # need not exist yet
    offset: int = 0  # bytes read so far, up to the end of a line

    def poll(self) -> list[dict[str, Any]]:
        """Returns new lines as objects. An incomplete last line is read by a later poll; damaged lines are skipped."""
        try:
            with open_file(self.path) as file:
                # A file that shrank was rewritten.
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                text = file.read()
        except (OSError, ValueError):
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [content for line in complete.split(b"\n") if (content := parse_record_line(line)) is not None]


class Follower:
    """Reads the new records of a run folder, ordered by time."""

    def __init__(self, path: Path, *, only_new: bool = False) -> None:
        """Starts at the beginning of the files or, with `only_new`, at their current end."""
        self._folder = RunFolder(path)
        self._metrics, self._events = Tail(self._folder.metrics), Tail(self._folder.events)
        for tail in (self._metrics, self._events) if only_new else ():
            with suppress(OSError):
                tail.offset = tail.path.stat().st_size

    def poll(self) -> list[StepMetrics | EvaluationMetrics | Event]:
        new: list[StepMetrics | EvaluationMetrics | Event] = []
        new += [event for line in self._events.poll() if (event := read.parse(Event, line, self._folder.events))]
        new += [record for line in self._metrics.poll() if (record := read.parse_metrics(line, self._folder))]
        return sorted(new, key=lambda record: record.time)


@dataclass(frozen=True)
class RunProgress:
    """The state of an active run and its newest records."""

    state: str  # "starting", "running", "stopping"; or "unknown" if the launcher is on another machine
    processes: int | None = None  # number of training processes; None: unknown
    step: StepMetrics | None = None  # newest step record
    top1: float | None = None  # of the newest evaluation
    end: Event | None = None  # event that ended training, if any
    heard: float | None = None  # time of the newest record; None if the run folder isn't visible here


def read_progress(record: Running) -> RunProgress:
    """Reads the progress of a run from the ends of its files, which takes as long for long runs as for short ones."""
    folder = RunFolder(Path(record.run))
    measured = [found for line in last_records(folder.metrics) if (found := read.parse_metrics(line, folder))]
    events = [event for line in last_records(folder.events) if (event := read.parse(Event, line, folder.events))]
    since = [event for event in events if event.time >= record.time]
    scores = [found.top1 for found in measured if isinstance(found, EvaluationMetrics) and math.isfinite(found.top1)]
    changes = [event.kind for event in since if event.kind in {"stopping", "stopped", *read.STARTS}]
    if changes and changes[-1] not in read.STARTS:
        state = "stopping"
    else:
        state = "running" if any(found.time >= record.time for found in measured) else "starting"
    started = any(event.kind == "started" for event in since)
    environment = (started and read_object(folder.environment)) or {}
    detail = {} if scores else read_object(folder.evaluations / "last.json") or {}
    return RunProgress(
        state=state if record.is_local else "unknown",
        processes=environment.get("processes"),
        step=next((found for found in reversed(measured) if isinstance(found, StepMetrics)), None),
        top1=scores[-1] if scores else detail.get("top1"),
        end=next((event for event in reversed(since) if event.kind in summary.ENDS), None),
        heard=max(found.time for found in (record, *measured[-1:], *events[-1:])) if folder.path.is_dir() else None,
    )


def progress_object(record: Running, progress: RunProgress) -> dict[str, Any]:
    step = progress.step
    return {
        "run": record.run, "state": progress.state, "pid": record.pid, "host": record.host, "hosts": record.hosts,
        "processes": progress.processes, "started": record.time, "age_s": max(0.0, time.time() - record.time),
        "epoch": summary.epoch_position(step)[0] if step else None,
        "epochs": -(-step.total_steps // step.steps_per_epoch) if step else None,
        "step": step.step if step else None, "total_steps": step.total_steps if step else None,
        "top1": progress.top1, "command": record.command,
    }  # fmt: skip


def last_records(path: Path) -> list[dict[str, Any]]:
    """Returns the complete records within the last _END_BYTES of a file."""
    with suppress(OSError):
        return Tail(path, max(0, path.stat().st_size - _END_BYTES)).poll()
    return []

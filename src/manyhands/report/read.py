"""Reads a run folder, whatever state it is in: running, finished, stopped, crashed or resumed."""

import bisect
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from manyhands.core import records
from manyhands.core.errors import UserError
from manyhands.core.files import parse_toml, read_bytes, read_object
from manyhands.core.plan_record import PlanRecord, read_plan_record
from manyhands.core.records import (
    EvaluationDetail,
    EvaluationMetrics,
    Event,
    Failure,
    PhaseMetrics,
    Record,
    StepMetrics,
)
from manyhands.core.run_folder import RunFolder

METRICS: dict[str, type[StepMetrics] | type[EvaluationMetrics]] = {"step": StepMetrics, "evaluation": EvaluationMetrics}
# The words of events that begin a session of work: everything between two of them ran without a pause.
STARTS = frozenset({"started", "resumed", "restarted", "regrouped"})
# Those by which everything beyond their step, whatever was written of it before, hasn't happened.
_GOES_BACK = frozenset({"resumed", "undone"})

AnyRecord = TypeVar("AnyRecord", bound=Record)

Measured = TypeVar("Measured", StepMetrics, EvaluationMetrics)

# Many more than a page shows; a list of so many is halved.
MOST_RECORDS = 1 << 14


@dataclass(frozen=True)
class WorkPeriod:
    """A stretch of work without a pause, in seconds since 1970."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Never negative, even where a clock was set back."""
        return max(0.0, self.end - self.start)


@dataclass
class RunData:
    """Everything that a run folder tells."""

    folder: RunFolder  # where the run lies
    job: dict[str, Any] = field(default_factory=dict)  # the configuration as job.toml has it; empty if it can't be read
    environment: dict[str, Any] = field(default_factory=dict)  # env.json, or empty
    plan: PlanRecord = field(default_factory=PlanRecord)  # plan.json, or empty
    # rising in step; what a resumed run did again is there once, as it was done last; of a long run thinned
    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationMetrics] = field(default_factory=list)  # likewise
    phases: list[PhaseMetrics] = field(
        default_factory=list
    )  # as they were written: what is done again takes time again
    events: list[Event] = field(default_factory=list)  # as they were written
    sessions: list[WorkPeriod] = field(default_factory=list)  # the stretches of work, the repeated parts included
    best: EvaluationDetail | None = None  # counts at the best evaluation
    last: EvaluationDetail | None = None  # counts at the newest evaluation
    # of what was held out, with the "best" and the "last" weights; empty where nothing was
    tests: dict[str, EvaluationDetail] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)  # the first causes before their consequences, by time
    unreadable: str = ""  # letters of class names that this machine can't draw; known once pictures were drawn

    def counted(self, kind: str) -> list[Event]:
        """The events of a kind, but for those of updates that were undone later."""
        kept: list[Event] = []
        for event in self.events:
            if event.kind == kind:
                kept.append(event)
            elif event.kind in _GOES_BACK and event.step is not None:
                kept = [one for one in kept if one.step is None or one.step <= event.step]
        return kept


def read_run(path: Path) -> RunData:
    """Reads the run in folder `path`. Raises UserError: there is no run, or a newer manyhands wrote it."""
    folder = RunFolder(path)
    if not folder.exists():
        raise no_run(path)
    events = [event for line in records.read_lines(folder.events) if (event := parse(Event, line, folder.events))]
    measured = _MetricsFile(folder, events)
    steps = without_repeats(measured.read(), events, MOST_RECORDS)
    failures = [_read_record(Failure, file) for file in sorted(folder.failures.glob("*.json"))]
    return RunData(
        folder=folder,
        job=_read_toml(folder.job),
        environment=_read_object(folder.environment),
        plan=_read_plan(folder.plan),
        steps=steps,
        evaluations=without_repeats(measured.evaluations, events),
        phases=measured.phases,
        events=events,
        sessions=sessions([time for both in measured.ends.values() for time in both], events),
        best=_read_record(EvaluationDetail, folder.evaluations / "best.json"),
        last=_read_record(EvaluationDetail, folder.evaluations / "last.json"),
        tests={
            name: found
            for name in ("best", "last")
            if (found := _read_record(EvaluationDetail, folder.evaluations / f"test-{name}.json"))
        },
        failures=sorted((f for f in failures if f), key=lambda failure: (failure.consequence, failure.time)),
    )


class _MetricsFile:
    """What metrics.jsonl has, read line by line: of a long run it doesn't fit into memory."""

    def __init__(self, folder: RunFolder, events: Iterable[Event]) -> None:
        self._folder = folder
        self._starts = sorted(event.time for event in events if event.kind in STARTS)
        self.evaluations: list[EvaluationMetrics] = []
        self.phases: list[PhaseMetrics] = []
        self.ends: dict[int, tuple[float, float]] = {}  # the first and the last time after each start

    def read(self) -> Iterator[StepMetrics]:
        """The step records; the others are there once all of these were taken."""
        for line in records.read_lines(self._folder.metrics):
            if line.get("kind") == "phases":
                parsed = parse(PhaseMetrics, line, self._folder.metrics)
                self.phases += [parsed] if parsed else []
            elif record := parse_metrics(line, self._folder):
                number = bisect.bisect_left(self._starts, record.time)
                first, last = self.ends.get(number, (record.time, record.time))
                self.ends[number] = min(first, record.time), max(last, record.time)
                if isinstance(record, StepMetrics):
                    yield record
                else:
                    self.evaluations.append(record)


def without_repeats(measured: Iterable[Measured], events: Iterable[Event], most: int = sys.maxsize) -> list[Measured]:
    """Leaves out what was undone: records beyond the step that a run went back to. Thinned to `most`."""
    resumes = sorted((e.time, e.step) for e in events if e.kind in _GOES_BACK and e.step is not None)
    kept = Thinned[Measured](most)
    for record in measured:
        while resumes and resumes[0][0] <= record.time:
            kept.forget(resumes.pop(0)[1] + 1)
        # Holds without events too, and where another machine's clock is behind.
        kept.forget(record.step)
        kept.add(record)
    for _, step in resumes:
        kept.forget(step + 1)
    return kept.taken()


def sessions(times: Iterable[float], events: Iterable[Event]) -> list[WorkPeriod]:
    """Divides the run into stretches of work, by the events that begin one."""
    marks = sorted([(time, False) for time in times] + [(event.time, event.kind in STARTS) for event in events])
    found: list[WorkPeriod] = []
    for time, starts in marks:
        if starts or not found:
            found.append(WorkPeriod(time, time))
        else:
            found[-1] = WorkPeriod(found[-1].start, time)
    return found


def parse_metrics(line: dict[str, Any], folder: RunFolder) -> StepMetrics | EvaluationMetrics | None:
    """One line of metrics.jsonl as a record, or None where it isn't one that this version knows."""
    schema = METRICS.get(str(line.get("kind")))
    return parse(schema, line, folder.metrics) if schema else None


def parse(schema: type[AnyRecord], line: dict[str, Any], file: Path) -> AnyRecord | None:
    """A plain object as a record; None where it is damaged.

    JSON knows no NaN, so that one is written as null: it comes back as NaN. Raises UserError: a newer manyhands wrote
    it.
    """
    version = line.get("v")
    if isinstance(version, int) and version > records.VERSION:
        raise UserError("this run was written by a newer manyhands", str(file), ("update manyhands",))
    if None in line.values():
        numbers = {name for name, about in schema.model_fields.items() if about.annotation is float}
        line = {key: float("nan") if value is None and key in numbers else value for key, value in line.items()}
    try:
        return schema.model_validate(line)
    except ValidationError:
        return None


def _read_record(schema: type[AnyRecord], file: Path) -> AnyRecord | None:
    content = _read_object(file)
    return parse(schema, content, file) if content else None


def _read_plan(file: Path) -> PlanRecord:
    try:
        return read_plan_record(file)
    except UserError:
        pass
    # What results depend on is told even where the rest is of another kind.
    content = _read_object(file)
    kept = {key: content[key] for key in ("exceptions", "resolved") if key in content}
    try:
        return PlanRecord.model_validate(kept)
    except ValidationError:
        return PlanRecord()


def _read_object(file: Path) -> dict[str, Any]:
    return read_object(file) or {}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_bytes(file))
    except (OSError, ValueError):
        return {}


def no_run(path: Path) -> UserError:
    """The error for a folder that holds no run, with the newest runs nearby."""
    what = f"{path} holds no run: job.toml is missing" if path.is_dir() else f"there is no folder {path}"
    near = [str(run) for run in newest_runs((path, path.parent, Path("runs")))]
    hints = ("newest runs: " + ", ".join(near),) if near else ("name a run folder, which manyhands train creates",)
    return UserError(what, str(path), hints)


def newest_runs(bases: Iterable[Path], listed: Iterable[Path] = (), count: int = 3) -> Iterator[Path]:
    """Run folders, those started last first: of the folders in `bases` and those that are `listed`."""
    files = [run / "job.toml" for run in listed]
    found = {file.resolve(): file for file in files if file.is_file()}
    found |= {file.resolve(): file for base in bases for file in base.glob("*/job.toml")}
    for file in sorted(found.values(), key=lambda file: -file.stat().st_mtime)[:count]:
        yield file.parent


class Thinned(Generic[Measured]):
    """Records in the order that they came; each stands for as many of them, the newest maybe for fewer."""

    def __init__(self, most: int) -> None:
        """`most` is even; only step records may be more."""
        self._most, self._each = most, 1
        self._kept: list[Measured] = []
        self._open: list[Measured] = []

    def add(self, record: Measured) -> None:
        self._open.append(record)
        if len(self._open) == self._each:
            self._kept.append(_joined(self._open))
            self._open.clear()
        if len(self._kept) == self._most:
            self._kept = [_joined(self._kept[at : at + 2]) for at in range(0, self._most, 2)]
            self._each *= 2

    def forget(self, from_step: int) -> None:
        """Leaves out what was made from this step on."""
        for kept in (self._open, self._kept):
            while kept and kept[-1].step >= from_step:
                kept.pop()

    def taken(self) -> list[Measured]:
        return [*self._kept, *([_joined(self._open)] if self._open else [])]


def _joined(records: Sequence[Measured]) -> Measured:
    """One record over all their samples, at the place of the last."""
    if len(records) == 1:
        return records[0]
    return cast(Measured, _joined_steps(cast(Sequence[StepMetrics], records)))


def _joined_steps(records: Sequence[StepMetrics]) -> StepMetrics:
    samples = [record.samples for record in records]
    seconds = [record.samples / record.images_per_s if record.images_per_s > 0 else 0.0 for record in records]
    timed = sum(itertools.compress(samples, seconds))
    return records[-1].model_copy(
        update={
            "samples": sum(samples),
            "loss": _mean([record.loss for record in records], samples),
            "top1": _mean([record.top1 for record in records], samples),
            "images_per_s": timed / sum(seconds) if timed else records[-1].images_per_s,
            "data_share": _mean([record.data_share for record in records], seconds),
        }
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Over the values that are numbers."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if math.isfinite(value)]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else values[-1]

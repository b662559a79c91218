"""Reads a run folder in any state: running, finished, stopped, crashed or resumed."""

import bisect
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import ValidationError

from manyhands.core import records
from manyhands.core.errors import UserError
from manyhands.core.files import parse_toml, read_bytes, read_object
from manyhands.core.plan_record import PlanRecord, read_plan_record
from manyhands.core.records import EvaluationDetail, EvaluationMetrics, Event, Failure, PhaseMetrics, StepMetrics
from manyhands.core.run_folder import RunFolder

# Kinds of events that start a session: the run works without a pause until the next of these events.
STARTS = frozenset({"started", "resumed", "restarted", "regrouped"})
# Kinds of events that return to an earlier step; later steps recorded before the event don't count.
_RETURNS = frozenset({"resumed", "undone"})

AnyRecord = TypeVar("AnyRecord", bound=records.Record)
Measured = TypeVar("Measured", StepMetrics, EvaluationMetrics)

MOST_RECORDS = 1 << 14  # step records kept of a long run, many more than a page shows


class WorkPeriod(NamedTuple):
    """A session: a period of work without a pause. Times are in seconds since 1970."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.start)


@dataclass
class RunData:
    """The parsed contents of a run folder. A missing or damaged file leaves its field empty."""

    folder: RunFolder
    job: dict[str, Any] = field(default_factory=dict)  # job.toml
    environment: dict[str, Any] = field(default_factory=dict)  # env.json
    plan: PlanRecord = field(default_factory=PlanRecord)  # plan.json
    # Ascending steps; of a repeated step, the last record counts. In a long run, neighbors are averaged.
    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationMetrics] = field(default_factory=list)  # ascending without repeats, never averaged
    phases: list[PhaseMetrics] = field(default_factory=list)  # in file order, with repeated work
    events: list[Event] = field(default_factory=list)  # in file order
    sessions: list[WorkPeriod] = field(default_factory=list)  # with repeated work
    best: EvaluationDetail | None = None  # counts at the best evaluation
    last: EvaluationDetail | None = None  # counts at the newest evaluation
    tests: dict[str, EvaluationDetail] = field(default_factory=dict)  # on held-out samples, by weights: "best", "last"
    failures: list[Failure] = field(default_factory=list)  # causes before consequences, then by time
    unreadable: str = ""  # letters of class names without an installed font; known after drawing

    def option(self, section: str, key: str, default: Any = "") -> Any:
        values = self.job.get(section)
        return values.get(key, default) if isinstance(values, dict) else default

    def counted(self, kind: str) -> list[Event]:
        """Returns the events of a kind, except those of updates that were undone later."""
        kept: list[Event] = []
        for event in self.events:
            if event.kind == kind:
                kept.append(event)
            elif event.kind in _RETURNS and event.step is not None:
                kept = [one for one in kept if one.step is None or one.step <= event.step]
        return kept


def read_run(path: Path) -> RunData:
    """Reads the run in folder `path`. Raises UserError if it contains no run, or a run of a newer manyhands."""
    folder = RunFolder(path)
    if not folder.exists():
        raise missing_run_error(path)
    events = [event for line in records.read_lines(folder.events) if (event := parse(Event, line, folder.events))]
    starts = sorted(event.time for event in events if event.kind in STARTS)
    evaluations: list[EvaluationMetrics] = []
    phases: list[PhaseMetrics] = []
    spans: dict[int, tuple[float, float]] = {}  # first and last time of metrics, by the number of earlier starts

    def step_records() -> Iterator[StepMetrics]:
        """Yields the step records of metrics.jsonl, which may not fit into memory; collects all other records."""
        for line in records.read_lines(folder.metrics):
            if line.get("kind") == "phases":
                phases.extend(filter(None, [parse(PhaseMetrics, line, folder.metrics)]))
            elif record := parse_metrics(line, folder):
                number = bisect.bisect_left(starts, record.time)
                first, last = spans.get(number, (record.time, record.time))
                spans[number] = min(first, record.time), max(last, record.time)
                if isinstance(record, StepMetrics):
                    yield record
                else:
                    evaluations.append(record)

    try:
        job = parse_toml(read_bytes(folder.job))
    except (OSError, ValueError):
        job = {}
    steps = without_repeats(step_records(), events, MOST_RECORDS)
    names = ("best", "last", "test-best", "test-last")
    details = {name: _read_record(EvaluationDetail, folder.evaluations / f"{name}.json") for name in names}
    failures = filter(None, (_read_record(Failure, file) for file in sorted(folder.failures.glob("*.json"))))
    return RunData(
        folder=folder,
        job=job,
        environment=read_object(folder.environment) or {},
        plan=_read_plan(folder.plan),
        steps=steps,
        evaluations=without_repeats(evaluations, events),
        phases=phases,
        events=events,
        sessions=sessions(itertools.chain.from_iterable(spans.values()), events),
        best=details["best"],
        last=details["last"],
        tests={name: found for name in ("best", "last") if (found := details[f"test-{name}"])},
        failures=sorted(failures, key=lambda failure: (failure.consequence, failure.time)),
    )


def sessions(times: Iterable[float], events: Iterable[Event]) -> list[WorkPeriod]:
    """Divides a run into sessions: periods between starts. `times`: times of records other than `events`."""
    marks = sorted([(time, False) for time in times] + [(event.time, event.kind in STARTS) for event in events])
    found: list[WorkPeriod] = []
    for time, starts in marks:
        if starts or not found:
            found.append(WorkPeriod(time, time))
        else:
            found[-1] = found[-1]._replace(end=time)
    return found


def parse_metrics(line: dict[str, Any], folder: RunFolder) -> StepMetrics | EvaluationMetrics | None:
    """Parses a line of metrics.jsonl. Returns None for an unknown kind of record."""
    if line.get("kind") == "step":
        return parse(StepMetrics, line, folder.metrics)
    return parse(EvaluationMetrics, line, folder.metrics) if line.get("kind") == "evaluation" else None


def parse(schema: type[AnyRecord], line: dict[str, Any], file: Path) -> AnyRecord | None:
    """Parses a record, with NaN for null; None if it is damaged. Raises UserError if a newer version wrote it."""
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
    content = read_object(file)
    return parse(schema, content, file) if content else None


def _read_plan(file: Path) -> PlanRecord:
    with suppress(UserError):
        return read_plan_record(file)
    content = read_object(file) or {}  # fields that results depend on are shown even if others are damaged
    with suppress(ValidationError):
        return PlanRecord.model_validate({key: content[key] for key in ("exceptions", "resolved") if key in content})
    return PlanRecord()


def missing_run_error(path: Path) -> UserError:
    """Returns the error for a folder without a run; the hint lists the newest runs nearby."""
    what = f"{path} is not a run folder: job.toml is missing" if path.is_dir() else f"there is no folder {path}"
    near = [str(run) for run in newest_runs((path, path.parent, Path("runs")))]
    hints = ("name a run: " + ", ".join(near),) if near else ("name a run folder, which manyhands train creates",)
    return UserError(what, str(path), hints)


def newest_runs(bases: Iterable[Path], listed: Iterable[Path] = (), count: int = 3) -> list[Path]:
    """Returns the `count` newest run folders among `listed` and the subfolders of `bases`, the newest start first."""
    files = [*(run / "job.toml" for run in listed), *(file for base in bases for file in base.glob("*/job.toml"))]
    found = {file.resolve(): file for file in files if file.is_file()}
    return [file.parent for file in sorted(found.values(), key=lambda file: -file.stat().st_mtime)[:count]]


def without_repeats(measured: Iterable[Measured], events: Iterable[Event], most: int = sys.maxsize) -> list[Measured]:
    """Removes records of updates that were repeated later. Averages neighbors so that at most `most` records remain.

    `most` must be even. Only step records can be averaged, so omit `most` for evaluations.
    """
    returns = sorted((e.time, e.step) for e in events if e.kind in _RETURNS and e.step is not None)
    kept: list[Measured] = []  # each is the average of `size` neighbors
    newest: list[Measured] = []  # not averaged yet
    size = 1

    def drop_records(from_step: int) -> None:
        for made in (newest, kept):
            while made and made[-1].step >= from_step:
                made.pop()

    for record in measured:
        while returns and returns[0][0] <= record.time:
            drop_records(returns.pop(0)[1] + 1)
        drop_records(record.step)  # for runs without events, and if the clock of another machine is behind
        newest.append(record)
        if len(newest) == size:
            kept.append(_average(newest))
            newest.clear()
        if len(kept) == most:
            kept[:] = [_average(kept[at : at + 2]) for at in range(0, most, 2)]
            size *= 2
    for _, step in returns:
        drop_records(step + 1)
    return [*kept, *([_average(newest)] if newest else [])]


def _average(records: Sequence[Measured]) -> Measured:
    """Averages records over their samples; the result has the step of the last record."""
    if len(records) == 1:
        return records[0]
    steps = cast(Sequence[StepMetrics], records)
    samples = [record.samples for record in steps]
    seconds = [record.samples / record.images_per_s if record.images_per_s > 0 else 0.0 for record in steps]
    timed = sum(itertools.compress(samples, seconds))
    values = {
        "samples": sum(samples),
        "loss": _mean([record.loss for record in steps], samples),
        "top1": _mean([record.top1 for record in steps], samples),
        "images_per_s": timed / sum(seconds) if timed else steps[-1].images_per_s,
        "data_share": _mean([record.data_share for record in steps], seconds),
    }
    return cast(Measured, steps[-1].model_copy(update=values))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if math.isfinite(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else values[-1]

"""The tables of a report: configuration, environment, plan and what happened when."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.config.job import Job
from manyhands.core.records import Event
from manyhands.core.terminal import plain
from manyhands.report.read import RunData
from manyhands.report.words import duration, moment


@dataclass(frozen=True)
class ReportRow:
    """A name, its value, and what it means (empty if nobody said)."""

    name: str
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Moment:
    """One line of the time line; `level` is "", "warning" or "error"."""

    time: str
    since: str
    kind: str
    text: str
    level: str


_WARNINGS = ("warning", "stopping", "restarted", "left-out", "replaced", "slow", "stall", "undone")
_LEVELS = {"failed": "error", **dict.fromkeys(_WARNINGS, "warning")}


def configuration(run: RunData) -> list[tuple[str, list[ReportRow]]]:
    """Every value of job.toml by section, with its description."""
    groups: list[tuple[str, list[ReportRow]]] = []
    loose = [ReportRow(name, shown(value)) for name, value in run.job.items() if not isinstance(value, dict)]
    if loose:
        groups.append(("", loose))
    for section, values in run.job.items():
        if isinstance(values, dict):
            meanings = _meanings(section)
            rows = [ReportRow(row.name, _became(run, section, row), meanings.get(row.name, "")) for row in flat(values)]
            groups.append((section, rows))
    return groups


def _became(run: RunData, section: str, row: ReportRow) -> str:
    """The value; of an option that left the choice to the program what it chose."""
    found = run.plan.resolved.get(f"{section}.{row.name}")
    if found is None or row.value == plain(shown(found)):
        return row.value
    return f"{plain(shown(found))} (chosen; requested: {row.value})"


def _meanings(section: str) -> dict[str, str]:
    field = Job.model_fields.get(section)
    options = getattr(field.annotation, "model_fields", {}) if field else {}
    return {name: about.description or "" for name, about in options.items()}


def flat(content: Mapping[str, Any], prefix: str = "") -> list[ReportRow]:
    """Nested objects as rows with dotted names; lists of plain values stay on one row."""
    rows: list[ReportRow] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            rows += flat({str(number): entry for number, entry in enumerate(value)}, f"{name}.")
        else:
            rows.append(ReportRow(plain(name), shown(value)))
    return rows


def shown(value: Any) -> str:
    """A value as its owner would write it in job.toml, but without quotes."""
    if isinstance(value, str):
        return value or "–"
    if isinstance(value, list):
        return ", ".join(shown(entry) for entry in value) or "–"
    if isinstance(value, (bool, type(None))):
        return json.dumps(value) if value is not None else "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def time_line(run: RunData) -> list[Moment]:
    """What happened when; saves that follow each other are one line."""
    start = run.sessions[0].start if run.sessions else 0.0
    lines: list[Moment] = []
    for group in _condensed(run.events):
        first, last = group[0], group[-1]
        text = plain(first.message)
        if first.kind == "saved" and len(group) > 1:
            text = f"{len(group)} times, from step {first.step} to step {last.step}"
        elif first.step is not None and str(first.step) not in text:
            text = f"step {first.step}" + (f": {text}" if text else "")
        rank = f" (rank {first.rank})" if first.rank else ""
        since = duration(first.time - start)
        kind = first.kind
        lines.append(Moment(moment(first.time), since, kind, text + rank, _LEVELS.get(kind, "")))
    return lines


def _condensed(events: list[Event]) -> list[list[Event]]:
    groups: list[list[Event]] = []
    for event in events:
        if groups and event.kind == "saved" == groups[-1][0].kind:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def exceptions(run: RunData) -> list[str]:
    """The exceptions in force: where the result depends on how the work was split."""
    return [plain(entry) for entry in run.plan.exceptions]

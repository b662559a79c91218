"""The tables of a report: configuration, environment, plan and what happened when."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.config.job import Job
from manyhands.core.records import Event
from manyhands.report.read import RunData
from manyhands.report.words import duration, moment, plain


@dataclass(frozen=True)
class Row:
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


_LEVELS = {"warning": "warning", "stopping": "warning", "restarted": "warning", "failed": "error"}


def configuration(run: RunData) -> list[tuple[str, list[Row]]]:
    """Every value of job.toml by section, with its description."""
    groups: list[tuple[str, list[Row]]] = []
    loose = [Row(name, shown(value)) for name, value in run.job.items() if not isinstance(value, dict)]
    if loose:
        groups.append(("", loose))
    for section, values in run.job.items():
        if isinstance(values, dict):
            meanings = _meanings(section)
            groups.append((section, [Row(row.name, row.value, meanings.get(row.name, "")) for row in flat(values)]))
    return groups


def _meanings(section: str) -> dict[str, str]:
    field = Job.model_fields.get(section)
    options = getattr(field.annotation, "model_fields", {}) if field else {}
    return {name: about.description or "" for name, about in options.items()}


def flat(content: Mapping[str, Any], prefix: str = "") -> list[Row]:
    """Nested objects as rows with dotted names; lists of plain values stay on one row."""
    rows: list[Row] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            rows += flat({str(number): entry for number, entry in enumerate(value)}, f"{name}.")
        else:
            rows.append(Row(plain(name), shown(value)))
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
    listed = run.plan.get("exceptions")
    return [plain(entry) for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []

"""The one recommendation of a plan: which split, how many processes, and how they agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.planner.choose import DATA_PARALLEL
from manyhands.planner.fewer import enough, name_of
from manyhands.planner.find import Option, SearchResult
from manyhands.sync.choose import EXACT
from manyhands.sync.options import AUTO


@dataclass(frozen=True)
class Advice:
    """What is recommended."""

    name: str = ""  # the row of the table
    reason: str = ""  # one or two sentences
    processes: int = 0  # how many

    def as_plain(self) -> dict[str, Any]:
        """As JSON data, for plan.json."""
        return {"plan": self.name, "processes": self.processes}


def advised(found: SearchResult, sync: dict[str, Any], fewer: Sequence[Option], *, apart: bool) -> Advice:
    """The recommendation: fewer processes where they do as well, or else the plan that was picked.

    Args:
        found: all plans.
        sync: what ways of agreeing cost; see `plan_sync`.
        fewer: data parallel on fewer processes.
        apart: each process has a machine of its own.
    """
    world_size = found.request.world_size
    seconds = found.pick.measured_seconds.get(found.pick.name) or found.chosen.prediction.seconds
    name = found.pick.name
    if name == DATA_PARALLEL and (agreed := sync_seconds(sync)) and not found.pick.measured_seconds:
        name, seconds = sync_row(sync_taken(sync) or {}), agreed
    count, why = (0, "") if found.request.pins else enough(found, fewer, seconds, found.spread)
    if not count:
        return Advice(name, with_sync(found.pick.reason, sync), world_size)
    what = "machine" if apart else "process"
    use = f"use one {what}" if count == 1 else f"use {count} {what}{'s' if apart else 'es'}"
    reason = f"{use}: {why}; to use all {world_size}, run the saved plan, {found.pick.name}"
    return Advice(name_of(count), with_sync(reason, sync), count)


def sync_row(method: dict[str, Any]) -> str:
    """A way of agreeing, as the table names it."""
    return DATA_PARALLEL if method["method"] == EXACT else f"{DATA_PARALLEL}, {sync_words(method)}"


def sync_words(method: dict[str, Any]) -> str:
    """A way of agreeing: its name, codec and pace."""
    codec = f" {method['codec']}" if method["codec"] else ""
    pace = f" every {method['every']}" if method["every"] > 1 else ""
    return f"{method['method']}{codec}{pace}"


def sync_seconds(sync: dict[str, Any]) -> float | None:
    """Of an update under data parallel as the job has processes agree; None for allreduce, as plans are priced."""
    taken = sync_taken(sync)
    return taken["step_s"] if taken and taken["method"] != EXACT else None


def sync_taken(sync: dict[str, Any]) -> dict[str, Any] | None:
    """The row that the job's own method stands for."""
    if sync["asked"] == AUTO:
        return next(row for row in sync["methods"] if row["chosen"])
    rows = [row for row in sync["methods"] if row["method"] == sync["asked"]]
    return min(rows, key=lambda row: row["step_s"]) if rows else None


def with_sync(reason: str, sync: dict[str, Any]) -> str:
    """What --sync auto took, or would."""
    chosen = next(row for row in sync["methods"] if row["chosen"])
    if sync["asked"] == AUTO:
        return f"{reason}\n--sync auto: {sync['reason']}"
    if chosen["method"] == sync["asked"] or sync["machines"] == 1:
        return reason
    return f"{reason}\n--sync auto would choose another method: {sync['reason']}"

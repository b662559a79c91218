"""Recommends a plan: the sharding, the number of processes and the gradient synchronization method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from manyhands.planner.choose import DATA_PARALLEL
from manyhands.planner.find import PlanCandidate, SearchResult, data_parallel_name, needed_count
from manyhands.sync.choose import EXACT, SyncChoice, run_days
from manyhands.sync.costs import LinkCase
from manyhands.sync.options import AUTO, synchronizes_every_update

_MB, _MBIT = 1e6, 8e-6


def choice_as_plain(choice: SyncChoice, case: LinkCase, requested: str) -> dict[str, Any]:
    """Converts the choice of a sync method, and its inputs, to JSON data. `requested`: the job's method, or "auto"."""
    return {
        "asked": requested,
        "machines": case.machines,
        "link_mbit_per_s": round(case.link.bytes_per_s * _MBIT, 3),
        "latency_ms": round(case.link.latency_s * 1e3, 3),
        "compute_s": case.step_s,
        "steps": case.steps,
        "reason": choice.reason,
        "methods": [
            {
                "method": cost.method,
                "codec": None if synchronizes_every_update(cost.method) else cost.codec,
                "every": cost.every,
                "delay": cost.delay,
                "step_s": cost.step_s,
                "sent_mb": cost.sent_bytes / _MB,
                "exchange_s": cost.exchange_s,
                "efficiency": case.step_s / cost.step_s,
                "days": run_days(cost, case),
                "chosen": cost == choice.chosen,
                "refused": cost.refused,
            }
            for cost in choice.costs
        ],
    }


class Advice(NamedTuple):
    """A recommended plan."""

    name: str  # the plan's name in the table of candidates
    reason: str  # one or two sentences
    processes: int


def recommend(found: SearchResult, sync: dict[str, Any], smaller: Sequence[PlanCandidate], *, apart: bool) -> Advice:
    """Recommends fewer processes if they are as fast as all processes, else the selected plan.

    `sync`: from `choice_as_plain`. `smaller`: data parallelism on fewer processes. `apart`: one process per machine.
    """
    world_size = found.request.world_size
    seconds = found.pick.measured_seconds.get(found.pick.name) or found.chosen.prediction.seconds
    name = found.pick.name
    if name == DATA_PARALLEL and (agreed := sync_seconds(sync)) and not found.pick.measured_seconds:
        name, seconds = sync_row(job_sync_row(sync)), agreed
    count, why = (0, "") if found.request.pins else needed_count(found, smaller, seconds, found.spread)
    if not count:
        return Advice(name, append_sync_choice(found.pick.reason, sync), world_size)
    what = "machine" if apart else "process"
    use = f"use one {what}" if count == 1 else f"use {count} {what}{'s' if apart else 'es'}"
    reason = f"{use}: {why}; to use all {world_size}, run the saved plan, {found.pick.name}"
    return Advice(data_parallel_name(count), append_sync_choice(reason, sync), count)


def sync_row(method: dict[str, Any]) -> str:
    """Returns the name of a sync method in the table of plans. `method`: an item of `sync["methods"]`."""
    return DATA_PARALLEL if method["method"] == EXACT else f"{DATA_PARALLEL}, {format_sync_method(method)}"


def format_sync_method(method: dict[str, Any]) -> str:
    """Formats a sync method's name, codec, and interval in updates."""
    codec = f" {method['codec']}" if method["codec"] else ""
    pace = f" every {method['every']}" if method["every"] > 1 else ""
    return f"{method['method']}{codec}{pace}"


def sync_seconds(sync: dict[str, Any]) -> float | None:
    """Returns the seconds of a data-parallel update with the job's sync method, or None for allreduce."""
    return taken["step_s"] if (taken := job_sync_row(sync))["method"] != EXACT else None


def job_sync_row(sync: dict[str, Any]) -> dict[str, Any]:
    """Returns that item of `sync["methods"]` which is the job's sync method."""
    if sync["asked"] == AUTO:
        return next(row for row in sync["methods"] if row["chosen"])
    return min((row for row in sync["methods"] if row["method"] == sync["asked"]), key=lambda row: row["step_s"])


def append_sync_choice(reason: str, sync: dict[str, Any]) -> str:
    """Appends a sentence on the method that --sync auto chose, or would choose, to a reason."""
    chosen = next(row for row in sync["methods"] if row["chosen"])
    if sync["asked"] == AUTO:
        return f"{reason}\n--sync auto: {sync['reason']}"
    if chosen["method"] == sync["asked"] or sync["machines"] == 1:
        return reason
    return f"{reason}\n--sync auto would choose another method: {sync['reason']}"

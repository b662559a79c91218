"""manyhands ps."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.core.records import Running
    from manyhands.report.follow import Now

NO_LAUNCHER = "no launcher"
# A head on another machine that has written nothing for so long may have gone with it.
SILENT_S = 60.0
HEAD = ("run", "state", "pid", "on", "for", "progress", "top-1")


def ps(*, as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON array")] = False) -> int:
    """List active runs: machine, running time and progress."""
    from manyhands.report.follow import as_object, look
    from manyhands.run.registry import headless, registry_folder, running

    found = [(record, look(record)) for record in running()]
    left = [(record, replace(look(record), state=NO_LAUNCHER)) for record in headless()]
    found += left
    if as_json:
        show_json([as_object(record, now) for record, now in found])
        return 0
    if not found:
        show("no run is active")
        return 0
    rows = [HEAD, *(_row(record, now) for record, now in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if any(not record.here for record, _ in found):
        say(f"to remove the runs of a dead machine from this list, delete their entries: files in {registry_folder()}")
    if left:
        say(f"{NO_LAUNCHER}: to save and stop the processes, run manyhands stop RUN; for details, manyhands why RUN")
    return 0


def _row(record: "Running", now: "Now") -> tuple[str, ...]:
    from manyhands.report.follow import as_object
    from manyhands.report.summary import duration, percent, place

    about = as_object(record, now)
    count = f"{now.processes} x " if now.processes else ""
    progress = "-"
    if now.step:
        epoch, done = place(now.step)
        progress = f"epoch {epoch}/{about['epochs']}, step {done}/{now.step.steps_per_epoch}"
    return (
        plain(_shown(record.run)),
        now.state if record.here else f"on {plain(record.host)}{_silent(now)}",
        "-" if now.state == NO_LAUNCHER else str(record.pid),
        count + plain(",".join(_machines(record))),
        duration(about["age_s"]),
        progress,
        percent(now.top1) if now.top1 is not None else "-",
    )


def _machines(record: "Running") -> list[str]:
    """Those of the last start, where the run folder says so: one may have joined, or be lost."""
    from manyhands.run.logs import read_places

    try:
        return [place.host for place in read_places(RunFolder(Path(record.run)))] or record.hosts
    except UserError:
        return record.hosts


def _silent(now: "Now") -> str:
    """What tells that a machine that can't be asked may be down."""
    from manyhands.report.summary import duration

    silent_s = time.time() - now.heard if now.heard else 0.0
    return f", silent for {duration(silent_s)}" if silent_s > SILENT_S else ""


def _shown(run: str) -> str:
    path = Path(run)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else run

"""The commands for runs: ps, logs, why, stop, report and join."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyhands.cli.flags import Help, Int, Json, RunName, Settings, settings
from manyhands.cli.printing import align, print_answer
from manyhands.core.errors import EXIT_FAILED, EXIT_OK, UserError
from manyhands.core.run_folder import RunFolder, resume_command
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.core.records import Running
    from manyhands.report.follow import RunProgress

NO_LAUNCHER = "no launcher"
SILENT_S = 60.0  # a launcher on another machine without a record for so long may be down


def ps(*, as_json: Annotated[bool, Help("print one JSON array", "--json")] = False) -> int:
    """List active runs: machine, running time and progress."""
    from manyhands.report.follow import progress_object, read_progress
    from manyhands.run.registry import list_active_runs, list_headless_runs, registry_folder

    left = [(record, replace(read_progress(record), state=NO_LAUNCHER)) for record in list_headless_runs()]
    found = [*((record, read_progress(record)) for record in list_active_runs()), *left]
    if as_json:
        show_json([progress_object(record, now) for record, now in found])
        return 0
    if not found:
        show("no run is active")
        return 0
    head = ("run", "state", "pid", "on", "for", "progress", "top-1")
    show(align([head, *(_run_row(record, now) for record, now in found)]))
    if any(not record.is_local for record, _ in found):
        say(f"to remove the runs of a dead machine from this list, delete their files in {registry_folder()}")
    if left:
        say(f"{NO_LAUNCHER}: to save and stop the processes, run manyhands stop RUN; for details, manyhands why RUN")
    return 0


def _run_row(record: "Running", progress: "RunProgress") -> tuple[str, ...]:
    from manyhands.report.follow import progress_object
    from manyhands.report.summary import duration, epoch_position, percent
    from manyhands.run.logs import read_log_locations

    about = progress_object(record, progress)
    run = Path(record.run)
    state = progress.state
    if not record.is_local:
        silent_s = time.time() - progress.heard if progress.heard else 0.0
        state = f"on {plain(record.host)}" + (f", silent for {duration(silent_s)}" if silent_s > SILENT_S else "")
    try:
        # The machines of the last start, if the run folder names them: a machine may have joined, or be lost.
        hosts = [each.host for each in read_log_locations(RunFolder(run))] or record.hosts
    except UserError:
        hosts = record.hosts
    position = "-"
    if progress.step:
        epoch, done = epoch_position(progress.step)
        position = f"epoch {epoch}/{about['epochs']}, step {done}/{progress.step.steps_per_epoch}"
    return (
        plain(str(run.relative_to(Path.cwd())) if run.is_relative_to(Path.cwd()) else record.run),
        state,
        "-" if progress.state == NO_LAUNCHER else str(record.pid),
        (f"{progress.processes} x " if progress.processes else "") + plain(",".join(hosts)),
        duration(about["age_s"]),
        position,
        percent(progress.top1) if progress.top1 is not None else "-",
    )


def logs(
    run: RunName,
    /,
    *,
    rank: Annotated[Int | None, Help("show only the output of this rank, without a prefix")] = None,
    follow: Annotated[bool, Help("print new output until the run ends", "-f", "--follow")] = False,
    last: Annotated[Int, Help("show only this many last lines of each process; 0: all lines")] = 0,
    set_: Settings = None,
) -> int:
    """Show the output of the processes of a run."""
    from manyhands.run.logs import show_logs
    from manyhands.run.registry import find_run

    if last < 0:
        raise UserError(f"--last must be 0 or more, found {last}", "--last", ("use --last 20, for example",))
    try:
        show_logs(find_run(run), rank, last=last, follow=follow, settings=settings(set_))
    except KeyboardInterrupt:
        return 0  # the usual end of -f
    return 0


def why(run: RunName, /, *, as_json: Json = False) -> int:
    """Explain why a run ended (rank, machine, step, file, and what to do), or show its progress."""
    from manyhands.run.outcome import explain_named_run

    found = explain_named_run(run)
    print_answer(asdict(found), found.lines(), json=as_json)
    return 0


def stop(run: RunName, /, *, now: Annotated[bool, Help("end the run without waiting for a save")] = False) -> int:
    """Ask an active run to save and stop, and wait for its end."""
    from manyhands.checkpoint.folders import saved_step
    from manyhands.run.registry import find_run, require_launcher, stop_headless_run, stop_run

    folder = find_run(run, active=True)
    try:
        headless = stop_headless_run(folder, now=now)
        end = None if headless else stop_run(require_launcher(folder), now=now)
    except KeyboardInterrupt:
        say("this command no longer waits; the run is still stopping")
        raise
    path, saved = folder.path, saved_step(folder)
    if headless and saved is None and not now:
        show(f"the processes of {path} have saved and stopped; their checkpoint is on other machines of the run")
        return EXIT_OK
    kept = "nothing was saved" if saved is None else f"the last checkpoint, of step {saved}, is intact"
    ended = f"{path} has ended{' on this machine' if headless else ''}; {kept}"
    show(f"{path} {end.message or end.kind}" if end else ended)
    if saved is None:
        show("there is no checkpoint to resume; run the same command to start from scratch")
    elif end is None or end.kind != "finished":
        show(f"to resume: {resume_command(path)}")
    return EXIT_FAILED if end and end.kind == "failed" else EXIT_OK


def report(run: RunName, /) -> int:
    """Write report.html of a run again, with its pictures; the run may be active or have failed."""
    from manyhands.cluster.agents.folders import writing_into
    from manyhands.report.page import write_report
    from manyhands.run.registry import find_reference

    with writing_into(folder := find_reference(run)):
        page = write_report(folder)
    show(str(page))
    return 0


def join(
    run: Annotated[str, Help("a run launched from this machine: its folder, a part of its name, or last")],
    /,
    *,
    host: Annotated[
        str | None, Help("machine to add, as ssh on this machine addresses it: n4, user@n4, ssh://n4:31234")
    ] = None,
) -> int:
    """Add a machine to an active run. Run join on the machine that launched the run."""
    from manyhands.run.launch import request_join

    if not host:
        raise UserError("no machine is named", "manyhands join", ("name the machine: --host n4",))
    show(request_join(run, host))
    return EXIT_OK

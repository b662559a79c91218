"""How a run ends: the events that its launcher records, the report, and the exit code or error for the user."""

import shlex
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from manyhands.checkpoint.saved import kept_step, saved_step, unsaved
from manyhands.cluster.agents.ending import Ending, first_cause
from manyhands.cluster.failures import as_error
from manyhands.cluster.hosts.machines import machines_of
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_SAVED, ManyhandsError, RunError
from manyhands.core.records import REPLACED, Event, Failure, append, read_lines, write_json
from manyhands.core.resuming import names_resume, resume_command
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import say
from manyhands.report.read import RunData, read_run


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder  # the run folder
    status: str  # "finished" or "stopped"
    is_main: bool = True  # True on the process that prints messages

    @property
    def exit_code(self) -> int:
        """For the shell."""
        return EXIT_SAVED if self.status == "stopped" else EXIT_OK

    def read(self) -> RunData:
        """Reads the records of the run."""
        return read_run(self.folder.path)


def conclude(job: Job, folder: RunFolder, ending: Ending, earlier: int = 0) -> Outcome:
    """Records how a run ended, writes the report, and returns the outcome or raises the first cause.

    Args:
        job: the job of the run.
        folder: the run folder.
        ending: how its processes ended.
        earlier: see `stop_saved`.
    """
    if job.run.script and ending.interrupted:
        note(folder, "stopped")
        hints = (f"for its output: manyhands logs {shlex.quote(str(folder.path))}",)
        error = ManyhandsError(f"{job.run.script[0]} was stopped", hints=hints)
        error.exit_code = EXIT_INTERRUPTED
        raise error
    if job.run.script and ending.ok:
        note(folder, "finished")
        return Outcome(folder, "finished")
    if ending.refused and not ending.ok:
        note_head(job, folder, ending.refused)
        raise ending.refused
    if ending.ok:
        statuses = {value["status"] for value in ending.returned.values()}
        status, error = "stopped" if "stopped" in statuses else "finished", None
    elif ending.interrupted == 1 and not job.run.script and stop_saved(folder, earlier) is not None:
        status, error = "stopped", None
    else:
        status, error = "failed", _record_failure(job, folder, ending)
    report_on(job, folder)
    if error:
        raise error
    return Outcome(folder, status)


def _record_failure(job: Job, folder: RunFolder, ending: Ending) -> ManyhandsError:
    first, codes = ending.interrupted == 1, ending.failed.values()
    # A stop's own signal ends workers that are still starting; a second stop kills. Both make their peers fail.
    unready, killed = first and -signal.SIGTERM in codes, first and -signal.SIGKILL in codes
    follows = unready or ending.interrupted > 1
    records = [record for record in ending.records.values() if not (follows and record.consequence)]
    if ending.interrupted and (ending.hung or not (records or killed)):
        idle = first and not (ending.hung or ending.lost) and (unready or not codes)
        return interrupted(folder, ending.hung, idle=idle)
    cause, error = first_cause(ending), failure_of(folder, ending)
    if cause:
        note_cause(folder, cause)
    else:
        note_head(job, folder, error)
    return error


def failure_of(folder: RunFolder, ending: Ending) -> ManyhandsError:
    """Returns the first cause as an error for the user."""
    if ending.refused:
        return ending.refused
    if cause := first_cause(ending):
        return with_resume_hint(as_error(cause), folder)
    where = str(folder.ranks / "agent.log")
    return with_resume_hint(RunError(f"the agent that watches the processes failed: {ending.broken}", where), folder)


def with_resume_hint(error: ManyhandsError, folder: RunFolder) -> ManyhandsError:
    """Adds the command that resumes a failed run, if a checkpoint was saved and the error has no such hint."""
    if error.exit_code != EXIT_FAILED or any(map(names_resume, error.hints)):
        return error
    if (step := kept_step(folder)) is not None:
        options = "with the same or other options"
        error.hints += (f"resume from the last checkpoint, of step {step}, {options}: {resume_command(folder.path)}",)
    return error


def report_on(job: Job, folder: RunFolder) -> None:
    """Writes the report; a failure to draw it, or Ctrl-C, is reported and does not fail the run."""
    if not job.run.report or not folder.metrics.is_file():
        return
    from manyhands.report.page import write_report

    try:
        write_report(folder.path)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"report.html could not be written: {error}")
    except KeyboardInterrupt:  # the run itself has ended, and its outcome stands
        say(f"report.html is not written; to write the report, run manyhands report {shlex.quote(str(folder.path))}")


def interrupted(folder: RunFolder, hung: str = "", *, idle: bool = False) -> ManyhandsError:
    """Records that a run was stopped without saving, and returns the error; for the arguments see `unsaved`."""
    step = saved_step(folder)
    error = unsaved(folder.path, step, hung, idle=idle)
    kind = "stopped" if error.exit_code == EXIT_SAVED else "interrupted"
    note(folder, kind, error.message, step=step, data={"rankless": True})
    return error


def starts_and_stops(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the events that record starts and stops of the processes."""
    kinds = {"started", "stopping", "stopped"}
    return [line for line in read_lines(folder.events) if line.get("kind") in kinds]


def stop_saved(folder: RunFolder, earlier: int = 0) -> int | None:
    """Returns the step that a stop has saved, and records the stop; None if nothing was committed.

    A process that is killed, or a machine that is lost, after the save does not affect the result.

    Args:
        folder: the run folder.
        earlier: number of events of `starts_and_stops` that belong to earlier commands.
    """
    last = [{}, *starts_and_stops(folder)[earlier:]][-1]
    step, saved = last.get("step"), saved_step(folder)
    if last.get("kind") not in {"stopping", "stopped"} or step is None or saved is None or saved < step:
        return None
    if last.get("kind") == "stopping":
        note(folder, "stopped", f"stopped and saved at step {step}", step=step)
    return step


def note_replaced(folder: RunFolder, message: str) -> None:
    """Records that another launcher has taken the run over; its further records are in that launcher's folder."""
    note(folder, REPLACED, message, step=saved_step(folder))


def note_cause(folder: RunFolder, cause: Failure) -> None:
    """Records a first cause, in full if the failed process could not write its own record."""
    about = {"time": cause.time, "rank": cause.rank, "step": cause.step, "data": {"host": cause.host}}
    note(folder, "failed", cause.what, **about)
    with suppress(OSError):
        record = folder.failures / f"{cause.rank}.json"
        if not record.exists():
            write_json(record, cause)


def note_head(job: Job, folder: RunFolder, error: Exception) -> None:
    """Records a failure that is on no rank: an unusable machine, or the launcher itself."""
    known = isinstance(error, ManyhandsError)
    what = error.message if known else f"{type(error).__name__}: {error}"
    where, hints = (error.where, [*error.hints]) if known else ("", [])
    host = where if where in {machine.name for machine in machines_of(job.cluster)} else ""
    note(folder, "failed", what, data={"rankless": True, "host": host, "where": where, "hints": hints})


@contextmanager
def ends_noted(job: Job, folder: RunFolder) -> Generator[None]:
    """Records a failure or a stop that ends the block while no process trains.

    Raises:
        ManyhandsError: the user stopped it.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # A second one comes while the first still ends what was begun.
        raise interrupted(folder, idle=not isinstance(interrupt.__context__, KeyboardInterrupt)) from None
    except Exception as error:
        note_head(job, folder, error)
        raise


def note(folder: RunFolder, kind: str, message: str = "", **fields: Any) -> None:
    """Records an event; a full disk must not hide the error that the user sees anyway."""
    with suppress(OSError):
        append(folder.events, Event(**{"time": time.time(), "kind": kind, "message": message, **fields}))

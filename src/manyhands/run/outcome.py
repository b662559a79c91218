"""Records the end of a run (events, report, exit code), and explains a run from its records for `manyhands why`."""

import itertools
import re
import shlex
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import available_step, saved_step, unsaved_error
from manyhands.cluster.agents.folders import Term, has_working_agents, read_term
from manyhands.cluster.failures import Ending, error_of_record, first_cause, user_code_location
from manyhands.cluster.hosts.this_process import machines_of
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SAVED, ManyhandsError, RunError, shortened
from manyhands.core.records import MACHINE_LOST, REPLACED, Event, Failure, Running, append, read_lines, write_json
from manyhands.core.run_folder import RunFolder, mentions_resume, resume_command
from manyhands.core.terminal import plain, say
from manyhands.report import summary, time_shares
from manyhands.report.read import RunData, read_run
from manyhands.run import logs, registry

_SHOWN = 3
_LONGEST = 300


@dataclass(frozen=True)
class Outcome:
    """The folder and the final status of a run."""

    folder: RunFolder
    status: str  # "finished" or "stopped"
    is_main: bool = True  # True on the process that prints messages

    @property
    def exit_code(self) -> int:
        return EXIT_SAVED if self.status == "stopped" else 0

    def read(self) -> RunData:
        return read_run(self.folder.path)


def conclude(job: Job, folder: RunFolder, ending: Ending, earlier: int = 0) -> Outcome:
    """Records a run's end, writes the report, raises the run's failure. `earlier`: number of older starts and stops."""
    if job.run.script and ending.interrupted:
        record_event(folder, "stopped")
        hints = (f"to see the output: manyhands logs {shlex.quote(str(folder.path))}",)
        error = ManyhandsError(f"{job.run.script[0]} was stopped", hints=hints)
        error.exit_code = EXIT_INTERRUPTED
        raise error
    if job.run.script and ending.ok:
        record_event(folder, "finished")
        return Outcome(folder, "finished")
    if ending.refused:
        record_launcher_failure(job, folder, ending.refused)
        raise ending.refused
    if ending.ok:
        statuses = {value["status"] for value in ending.returned.values()}
        status, error = "stopped" if "stopped" in statuses else "finished", None
    elif ending.interrupted == 1 and not job.run.script and _saved_on_stop(folder, earlier):
        status, error = "stopped", None
    else:
        status, error = "failed", _record_failure(job, folder, ending)
    report_on(job, folder)
    if error:
        raise error
    return Outcome(folder, status)


def _record_failure(job: Job, folder: RunFolder, ending: Ending) -> ManyhandsError:
    first, codes = ending.interrupted == 1, ending.failed.values()
    # A stop signal ends workers that are still starting, a second one kills all. Both make their peers fail.
    unready, killed = first and -signal.SIGTERM in codes, first and -signal.SIGKILL in codes
    follows = unready or ending.interrupted > 1
    records = [record for record in ending.records.values() if not (follows and record.consequence)]
    if ending.interrupted and (ending.hung or not (records or killed)):
        idle = first and not (ending.hung or ending.lost) and (unready or not codes)
        return record_interrupt(folder, ending.hung, idle=idle)
    cause, error = first_cause(ending), error_of_ending(folder, ending)
    if cause:
        record_cause(folder, cause)
    else:
        record_launcher_failure(job, folder, error)
    return error


def error_of_ending(folder: RunFolder, ending: Ending) -> ManyhandsError:
    if ending.refused:
        return ending.refused
    what, where = f"the agent that watches the processes failed: {ending.broken}", str(folder.ranks / "agent.log")
    cause = first_cause(ending)
    return with_resume_hint(error_of_record(cause) if cause else RunError(what, where), folder)


def record_local_failure(folder: RunFolder, record: Failure) -> ManyhandsError:
    """Records that training in this process has failed; returns the error to raise."""
    record_cause(folder, record)
    if record.exit_code == EXIT_INTERRUPTED:
        return record_interrupt(folder)
    return with_resume_hint(error_of_record(record), folder)


def with_resume_hint(error: ManyhandsError, folder: RunFolder) -> ManyhandsError:
    """Adds the resume command to a failure's hints, if a checkpoint was saved and no hint has this command yet."""
    if error.exit_code != EXIT_FAILED or any(map(mentions_resume, error.hints)):
        return error
    if (step := available_step(folder)) is not None:
        options = "with the same or other options"
        error.hints += (f"resume from the last checkpoint, of step {step}, {options}: {resume_command(folder.path)}",)
    return error


def report_on(job: Job, folder: RunFolder) -> None:
    """Writes report.html. An error or Ctrl-C while writing is printed and does not fail the run."""
    if not job.run.report or not folder.metrics.is_file():
        return
    from manyhands.report.page import write_report

    try:
        write_report(folder.path)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"report.html could not be written: {error}")
    except KeyboardInterrupt:  # the run has ended, and its outcome doesn't change
        say(f"report.html is not written; to write the report, run manyhands report {shlex.quote(str(folder.path))}")


def record_interrupt(folder: RunFolder, hung: str = "", *, idle: bool = False) -> ManyhandsError:
    """Records a stop without a save; returns the error to raise. `unsaved_error` explains `hung` and `idle`."""
    step = saved_step(folder)
    error = unsaved_error(folder.path, step, hung, idle=idle)
    kind = "stopped" if error.exit_code == EXIT_SAVED else "interrupted"
    record_event(folder, kind, error.message, step=step, data={"rankless": True})
    return error


def starts_and_stops(folder: RunFolder) -> list[dict[str, Any]]:
    kinds = {"started", "stopping", "stopped"}
    return [line for line in read_lines(folder.events) if line.get("kind") in kinds]


def _saved_on_stop(folder: RunFolder, earlier: int) -> bool:
    """Returns True if the run saved after the stop request, even if it failed later. Records this as a stop."""
    last = [{}, *starts_and_stops(folder)[earlier:]][-1]
    step, saved = last.get("step"), saved_step(folder)
    if last.get("kind") not in {"stopping", "stopped"} or step is None or saved is None or saved < step:
        return False
    if last.get("kind") == "stopping":
        record_event(folder, "stopped", f"stopped and saved at step {step}", step=step)
    return True


def record_cause(folder: RunFolder, cause: Failure) -> None:
    about = {"time": cause.time, "rank": cause.rank, "step": cause.step, "data": {"host": cause.host}}
    record_event(folder, "failed", cause.what, **about)
    with suppress(OSError):
        record = folder.failures / f"{cause.rank}.json"
        if not record.exists():
            write_json(record, cause)


def record_launcher_failure(job: Job, folder: RunFolder, error: Exception) -> None:
    """Records a failure that belongs to no rank, such as that of a machine or of the launcher."""
    known = isinstance(error, ManyhandsError)
    what = error.message if known else f"{type(error).__name__}: {error}"
    where, hints = (error.where, [*error.hints]) if known else ("", [])
    host = where if where in {machine.name for machine in machines_of(job.cluster)} else ""
    record_event(folder, "failed", what, data={"rankless": True, "host": host, "where": where, "hints": hints})


@contextmanager
def recording_errors(job: Job, folder: RunFolder) -> Generator[None]:
    """Context manager that records errors and Ctrl-C while no process trains. Ctrl-C raises a ManyhandsError."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C, while the first is handled, has the first as its context.
        raise record_interrupt(folder, idle=not isinstance(interrupt.__context__, KeyboardInterrupt)) from None
    except Exception as error:
        record_launcher_failure(job, folder, error)
        raise


def record_event(folder: RunFolder, kind: str, message: str = "", **fields: Any) -> None:
    """Appends an event to events.jsonl. Ignores a full disk, so that the user sees the original error."""
    with suppress(OSError):
        append(folder.events, Event(**{"time": time.time(), "kind": kind, "message": message, **fields}))


@dataclass(frozen=True)
class RunExplanation:
    """The state of a run and the first cause of its end, for `manyhands why`. Unknown fields are empty."""

    run: str  # the run folder
    state: str  # running, finished, stopped, interrupted (unsaved), failed or killed (without a record)
    headline: str  # the progress, in a sentence
    cause: str = ""  # the first cause, in a sentence
    rank: int | None = None  # of the first cause; None if it was on no rank, or is unknown
    host: str = ""  # machine of the first cause
    step: int | None = None  # updates made before the first cause
    phase: str = ""  # phase of the update
    file: str = ""  # file and line that raised it
    others: str = ""  # what happened to the other processes
    done: list[str] = field(default_factory=list[str])  # what was done automatically, and what else was noticed
    do: list[str] = field(default_factory=list[str])  # what the user can do
    machines: str = ""  # of an active run

    def lines(self) -> list[str]:
        """Formats the explanation as lines, with the first cause after the headline."""
        named = [("why", self.cause), ("others", self.others), ("on", self.machines)]
        rows = [self.headline, *(f"{name}: {text}" for name, text in named if text)]
        return [*rows, *(f"done: {text}" for text in self.done), *(f"do: {text}" for text in self.do)]


def explain_named_run(name: str) -> RunExplanation:
    """Explains the run that `name` refers to. Raises UserError if the run is unknown or its records are damaged."""
    run = read_run(registry.find_reference(name))
    return explain_run(run, registry.find_launcher(run.folder.path))


def explain_run(run: RunData, head: Running | None = None) -> RunExplanation:
    """Explains a run from its records; `head` is the registry's record of the launcher of an active run."""
    state, folder, done = _run_state(run, head), str(run.folder.path), _describe_events(run)
    after = f"after {summary.duration(summary.seconds(run))} of work, {_describe_progress(run)}"
    now, cause, on, do = f"{_describe_progress(run)}{_last_record(run)}", "", "", list[str]()
    match state:
        case "running" if head:
            where = "" if head.is_local else f" on {head.host}, unless that machine is down"
            do = [f"to see the output of the processes: manyhands logs {folder} --follow"]
            headline = f"{folder} is active{where}, {now}"
            ranks = [(log.host, log.ranks[0], sum(log.ranks) - 1) for log in logs.read_log_locations(run.folder)]
            on = ", ".join(f"{host} (rank{f's {one} to' if one < last else ''} {last})" for host, one, last in ranks)
        case "running":
            headline = f"{folder} is active, {now}; the launcher is on another machine, or lost"
            do = [f"to save and stop, run on the launching machine: manyhands stop {folder}"]
            if read_term(run.folder.ranks) != Term():  # the run is detached
                take_over = f"to take over from a lost launcher: {resume_command(run.folder.path)}"
                do = [take_over, f"to save and stop: manyhands stop {folder}"]
        case "finished":
            headline = f"{folder} finished {after}"
        case "killed":
            all_killed = "all processes were killed from outside, or the machine of the launcher went down"
            look = "look for out-of-memory kills with dmesg | tail, and for a shutdown of the machine with last -x"
            headline, do = f"{folder} ended without a record {after}{_last_record(run)}", [look, _resume_hint(run)]
            cause = f"no process recorded an error: {all_killed}"
        case "stopped" | "interrupted":
            return _explain_stop(run, state, after, done)
        case _:
            return _explain_failure(run, f"{folder} failed {after}", done, [_resume_hint(run)])
    return RunExplanation(folder, state, headline, cause, done=done, do=do, machines=plain(on))


def _explain_stop(run: RunData, state: str, after: str, done: list[str]) -> RunExplanation:
    folder, do = str(run.folder.path), [_resume_hint(run)]
    end = next(event for event in reversed(run.events) if event.kind == state)
    how, cause = "was stopped without saving" if state == "interrupted" else "stopped", plain(end.message)
    if state == "stopped" and not end.data.get("rankless"):
        after += "; everything is saved"
        cause = "the run was asked to stop (Ctrl-C, manyhands stop, a signal), or its launcher was lost"
    last = next((event for event in reversed(run.events) if event.kind in {REPLACED, *summary.STARTS}), None)
    if last and last.kind == REPLACED:
        cause = plain(last.message)
        do = [f"on the other launcher's machine, run manyhands why {folder}", *(f"or, here: {line}" for line in do)]
    return RunExplanation(folder, state, f"{folder} {how} {after}", cause, done=done, do=do)


def _explain_failure(run: RunData, headline: str, done: list[str], do: list[str]) -> RunExplanation:
    # Failures of earlier starts were recovered from; the last start may have ended without a record of its launcher.
    last = itertools.takewhile(lambda event: event.kind not in summary.STARTS, reversed(run.events))
    event = next((event for event in last if event.kind == "failed"), None)
    if event and event.data.get("rankless"):
        where, hints = plain(str(event.data.get("where", ""))), event.data.get("hints", event.data.get("mend", ()))
        cause, host = _shorten_middle(event.message), plain(str(event.data.get("host", "")))
        if where and where not in cause:
            cause = f"machine {host}: {cause}" if host else f"{cause} ({where})"
        do = [*(line for line in map(plain, map(str, hints)) if not mentions_resume(line)), *do]
        return RunExplanation(str(run.folder.path), "failed", headline, cause, host=host, done=done, do=do)
    first = _first_failure(run, event)
    if first.error == MACHINE_LOST:
        cause, rank = f"machine {plain(first.host)}: {plain(first.what)}", None
    else:
        cause, rank = f"{_rank_text(first)}: {shortened(plain(first.what), _LONGEST)}", first.rank
    file = _failing_line(first)
    if first.consequence:
        cause = f"no process recorded the first cause; the earliest failure is a consequence: {cause}"
        do = ["look at the logs of all processes in ranks/, and at any machine without a log", *do]
    elif file and file not in cause:
        cause += f" ({file})"
    do = [*(line for line in first.hints if not mentions_resume(line)), *do]
    return RunExplanation(
        str(run.folder.path), "failed", headline, cause, rank, first.host, first.step, first.phase, file,
        _describe_other_failures(run, first), done, do,
    )  # fmt: skip


def _run_state(run: RunData, head: Running | None) -> str:
    word = summary.status(run)
    last = next((e.kind for e in reversed(run.events) if e.kind in {"interrupted", *summary.ENDS, *summary.STARTS}), "")
    if (head or has_working_agents(run.folder.ranks)) and word != "finished":
        return "running"
    return last if last == "interrupted" else "killed" if word == "unfinished" else word


def _first_failure(run: RunData, event: Event | None) -> Failure:
    """Returns the failure in `event`, which the launcher recorded; without `event`, the first original failure."""
    same = [one for one in run.failures if event and (one.what, one.rank) == (event.message, event.rank)]
    if same or not event:
        return (same or run.failures)[0]
    lost = re.match(r"(\S+) is lost: ", event.message)  # the file of the rank has the rank's own record
    host = lost[1] if lost else str(event.data.get("host", ""))
    return Failure(
        time=event.time, rank=event.rank, host=host, pid=0, step=event.step,
        error=MACHINE_LOST if lost else "", what=event.message,
    )  # fmt: skip


def _describe_other_failures(run: RunData, first: Failure) -> str:
    rest = [one for one in run.failures if one is not first and one.rank != first.rank]
    headline = "; ".join(
        f"{_rank_text(one)} "
        + ("ended after another rank failed" if one.consequence else f"failed too: {shortened(one.what)}")
        for one in rest[:_SHOWN]
    )
    size = run.environment.get("processes")
    unknown = size - 1 - len(rest) if isinstance(size, int) else 0
    more = f"{len(rest) - _SHOWN} more processes ended or failed" if len(rest) > _SHOWN else ""
    silent = f"{unknown} of {size} processes were ended before recording an error" if unknown > 0 else ""
    return plain("; ".join(filter(None, (headline, more, silent))))


def _describe_events(run: RunData) -> list[str]:
    found: list[str] = []
    starts = [event for event in run.events if event.kind in {"restarted", "regrouped"}]
    for event in starts[-_SHOWN:]:
        # The event has the machine; ranks may have moved since.
        at = f"{event.data['host']}, " if event.data.get("host") else ""
        how = "restarted" if event.kind == "restarted" else "restarted with another machine"
        found.append(f"{how} ({at}{summary.ago(time.time() - event.time)}): {_shorten_middle(event.message)}")
    if len(starts) > _SHOWN:
        found.insert(0, f"{len(starts)} restarts in all; the last {_SHOWN}:")
    found += [event.message for event in run.events if event.kind == "undone"][-_SHOWN:]
    for kind, words in (("left-out", "skipped updates"), ("replaced", "replaced pictures")):
        if events := run.counted(kind):
            found.append(f"{len(events)} {words}; the last: {events[-1].message}")
    found += filter(None, [time_shares.slow_rank_line(run)])
    for kind in ("slow", "stall"):
        alike: dict[str, list[str]] = {}
        for event in run.events:
            if event.kind == kind:
                alike.setdefault(re.sub(r"[\d.e+-]+ s|\d+%", "", event.message), []).append(event.message)
        most = sorted(alike.values(), key=len, reverse=True)[:_SHOWN]
        found += [f"{texts[-1]}{f' ({len(texts)} times)' if len(texts) > 1 else ''}" for texts in most]
    return [plain(line) for line in found]


def _shorten_middle(text: str) -> str:
    """Removes the middle of a long text, because the last line of a traceback is the most informative."""
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]} … {text[-_LONGEST * 2 // 3 :]}"


def _resume_hint(run: RunData) -> str:
    step = available_step(run.folder)
    if step is None:
        if any(event.kind == "saved" for event in run.events):
            return f"no checkpoint is left in {run.folder.checkpoints}: restore one from a copy, or use another --out"
        return "nothing was saved: run the same command to start from scratch"
    return f"resume from step {step}: {resume_command(run.folder.path)}"


def _describe_progress(run: RunData) -> str:
    saved = saved_step(run.folder) or 0
    if run.steps:
        return f"at step {max(saved, run.steps[-1].step)} of {run.steps[-1].total_steps}"
    return f"at step {saved}" if saved else "before its first update"


def _last_record(run: RunData) -> str:
    times = [record.time for record in (*run.steps[-1:], *run.evaluations[-1:], *run.events[-1:])]
    return f"; last record {summary.ago(time.time() - max(times))}" if times else ""


def _rank_text(failure: Failure) -> str:
    step = f" at step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase})" if failure.phase else ""
    return f"rank {failure.rank}{failure.host and f' on {plain(failure.host)}'}{step}{phase}"


def _failing_line(failure: Failure) -> str:
    """Returns the file and line of user code that raised a failure, or the file that it names; "" if unknown."""
    if line := user_code_location(failure):
        return plain(line)
    where = failure.where.rpartition(", ")[0] or failure.where
    return plain(where) if "/" in where and Path(where).suffix else ""

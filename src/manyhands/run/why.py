"""Explains from a run's records why the run ended, or its state: rank, machine, step, file and hints."""

import itertools
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.checkpoint.saved import kept_step
from manyhands.cluster.agents.claim import Term, agents_work, term_in
from manyhands.cluster.failures import users_place
from manyhands.core.errors import shortened
from manyhands.core.records import MACHINE_LOST, REPLACED, Event, Failure, Running
from manyhands.core.resuming import names_resume, resume_command
from manyhands.core.terminal import plain
from manyhands.report import summary
from manyhands.report.read import RunData, read_run
from manyhands.report.summary import ago, duration
from manyhands.report.time_shares import slow_rank
from manyhands.run.logs import read_places
from manyhands.run.registry import find_reference, head_of

_SHOWN = 3
_LONGEST = 300


@dataclass(frozen=True)
class Why:
    """The state of a run and its first cause; unknown fields are empty."""

    run: str  # the run folder
    # "running", "finished", "stopped", "interrupted" (unsaved), "failed" or "killed" (without a record)
    state: str
    headline: str  # the progress, in a sentence
    cause: str = ""  # the first cause, in a sentence
    rank: int | None = None  # of the first cause; None if it was on no rank, or is unknown
    host: str = ""  # its machine
    step: int | None = None  # updates made by then
    phase: str = ""  # of the update
    file: str = ""  # where it was raised
    others: str = ""  # what happened to the other processes
    done: list[str] = field(default_factory=list[str])  # what was done automatically, and what else was noticed
    do: list[str] = field(default_factory=list[str])  # what the user can do
    machines: str = ""  # of an active run

    def lines(self) -> list[str]:
        """For people; the first cause comes first."""
        named = [("why", self.cause), ("others", self.others), ("on", self.machines)]
        rows = [self.headline, *(f"{name}: {text}" for name, text in named if text)]
        return [*rows, *(f"done: {text}" for text in self.done), *(f"do: {text}" for text in self.do)]


def why(word: str) -> Why:
    """Explains the run that a word names.

    Raises:
        UserError: there is none, or its records can't be read.
    """
    run = read_run(find_reference(word))
    return explained(run, head_of(run.folder.path))


def explained(run: RunData, head: Running | None = None) -> Why:
    """Explains a run from its records; `head` is its launcher, if one is active."""
    state, folder, done = _state(run, head), str(run.folder.path), _done(run)
    after = f"after {duration(summary.seconds(run))} of work, {_place(run)}"
    now = f"{_place(run)}{_last_record(run)}"
    match state:
        case "running" if head:
            where = "" if head.here else f" on {head.host}, unless that machine is down"
            do = [f"to see the output of the processes: manyhands logs {folder} --follow"]
            headline = f"{folder} is active{where}, {now}"
            ranks = [(place.host, place.ranks[0], sum(place.ranks) - 1) for place in read_places(run.folder)]
            on = ", ".join(f"{host} (rank{f's {one} to' if one < last else ''} {last})" for host, one, last in ranks)
            return Why(folder, state, headline, machines=plain(on), done=done, do=do)
        case "running":
            headline = f"{folder} is active, {now}; the launcher is on another machine, or lost"
            do = [f"to save and stop, run on the launching machine: manyhands stop {folder}"]
            if term_in(run.folder.ranks) != Term():  # it is detached
                do = [
                    f"to take over from a lost launcher: {resume_command(run.folder.path)}",
                    f"to save and stop: manyhands stop {folder}",
                ]
            return Why(folder, state, headline, done=done, do=do)
        case "finished":
            return Why(folder, state, f"{folder} finished {after}", done=done)
        case "stopped" | "interrupted":
            return _stopped(run, state, after, done)
        case "killed":
            cause = (
                "no process recorded a reason: all processes were killed from outside, or the machine of the launcher "
                "went down"
            )
            look = "look for out-of-memory kills with dmesg | tail, and for a shutdown of the machine with last -x"
            headline = f"{folder} ended without a record {after}{_last_record(run)}"
            return Why(folder, state, headline, cause, done=done, do=[look, _resume_hint(run)])
        case _:
            return _failed(run, f"{folder} failed {after}", done, [_resume_hint(run)])


def _stopped(run: RunData, state: str, after: str, done: list[str]) -> Why:
    folder, do = str(run.folder.path), [_resume_hint(run)]
    end = next(event for event in reversed(run.events) if event.kind == state)
    how, cause = "was ended at once" if state == "interrupted" else "stopped", plain(end.message)
    if state == "stopped" and not end.data.get("rankless"):
        after += "; everything is saved"
        cause = "the run was asked to stop (Ctrl-C, manyhands stop, a signal), or its launcher was lost"
    last = next((event for event in reversed(run.events) if event.kind in {REPLACED, *summary.STARTS}), None)
    if last and last.kind == REPLACED:
        cause = plain(last.message)
        do = [f"on the other launcher's machine, run manyhands why {folder}", *(f"or, here: {line}" for line in do)]
    return Why(folder, state, f"{folder} {how} {after}", cause, done=done, do=do)


def _failed(run: RunData, headline: str, done: list[str], do: list[str]) -> Why:
    # Failures of earlier starts were recovered from; the last start may have ended without a record of its launcher.
    last = itertools.takewhile(lambda event: event.kind not in summary.STARTS, reversed(run.events))
    event = next((event for event in last if event.kind == "failed"), None)
    if event and event.data.get("rankless"):
        where, hints = plain(str(event.data.get("where", ""))), event.data.get("hints", event.data.get("mend", ()))
        cause, host = _both_ends(event.message), plain(str(event.data.get("host", "")))
        if where and where not in cause:
            cause = f"machine {host}: {cause}" if host else f"{cause} ({where})"
        do = [*(line for line in map(plain, map(str, hints)) if not names_resume(line)), *do]
        return Why(str(run.folder.path), "failed", headline, cause, host=host, done=done, do=do)
    first = _first(run, event)
    if first.error == MACHINE_LOST:
        cause, rank = f"machine {plain(first.host)}: {plain(first.what)}", None
    else:
        cause, rank = f"{_who(first)}: {shortened(plain(first.what), _LONGEST)}", first.rank
    file = _file(first)
    if first.consequence:
        cause = f"no process recorded the first cause; the earliest failure is a consequence: {cause}"
        do = ["look at the logs of all processes in ranks/, and at any machine without a log", *do]
    elif file and file not in cause:
        cause += f" ({file})"
    do = [*(line for line in first.hints if not names_resume(line)), *do]
    return Why(
        str(run.folder.path), "failed", headline, cause, rank, first.host, first.step, first.phase, file,
        _others(run, first), done, do,
    )  # fmt: skip


def _state(run: RunData, head: Running | None) -> str:
    word = summary.status(run)
    last = next((e.kind for e in reversed(run.events) if e.kind in {"interrupted", *summary.ENDS, *summary.STARTS}), "")
    if (head or agents_work(run.folder.ranks)) and word != "finished":
        return "running"
    if last == "interrupted":
        return last
    return "killed" if word == "unfinished" else word


def _first(run: RunData, event: Event | None) -> Failure:
    """Returns the first cause as the launcher recorded it, or the first failure that is no consequence."""
    same = [one for one in run.failures if event and (one.what, one.rank) == (event.message, event.rank)]
    if same or not event:
        return (same or run.failures)[0]
    # The record of that rank's own end may be in place of the launcher's.
    lost = re.match(r"(\S+) is lost: ", event.message)
    host = lost[1] if lost else str(event.data.get("host", ""))
    return Failure(
        time=event.time, rank=event.rank, host=host, pid=0, step=event.step,
        error=MACHINE_LOST if lost else "", what=event.message,
    )  # fmt: skip


def _others(run: RunData, first: Failure) -> str:
    """Describes what happened to the other processes."""
    rest = [one for one in run.failures if one is not first and one.rank != first.rank]
    headline = "; ".join(
        f"{_who(one)} {'ended after another rank failed' if one.consequence else 'failed too: ' + shortened(one.what)}"
        for one in rest[:_SHOWN]
    )
    size = run.environment.get("processes")
    unknown = size - 1 - len(rest) if isinstance(size, int) else 0
    more = f"{len(rest) - _SHOWN} more processes ended or failed" if len(rest) > _SHOWN else ""
    silent = f"{unknown} of {size} processes were ended before recording an error" if unknown > 0 else ""
    return plain("; ".join(filter(None, (headline, more, silent))))


def _done(run: RunData) -> list[str]:
    """Describes restarts, skipped updates, replaced pictures, and slow or stalled ranks."""
    found: list[str] = []
    starts = [event for event in run.events if event.kind in {"restarted", "regrouped"}]
    for event in starts[-_SHOWN:]:
        # The machine as recorded then: ranks may have moved since.
        at = f"{event.data['host']}, " if event.data.get("host") else ""
        how = "restarted" if event.kind == "restarted" else "restarted with another machine"
        found.append(f"{how} ({at}{ago(time.time() - event.time)}): {_both_ends(event.message)}")
    if len(starts) > _SHOWN:
        found.insert(0, f"{len(starts)} restarts in all; the last {_SHOWN}:")
    found += [event.message for event in run.events if event.kind == "undone"][-_SHOWN:]
    for kind, words in (("left-out", "skipped updates"), ("replaced", "replaced pictures")):
        events = run.counted(kind)
        if events:
            found.append(f"{len(events)} {words}; the last: {events[-1].message}")
    found += filter(None, [slow_rank(run)])
    for kind in ("slow", "stall"):
        alike: dict[str, list[str]] = {}
        for event in run.events:
            if event.kind == kind:
                alike.setdefault(re.sub(r"[\d.e+-]+ s|\d+%", "", event.message), []).append(event.message)
        most = sorted(alike.values(), key=len, reverse=True)[:_SHOWN]
        found += [f"{said[-1]}{f' ({len(said)} times)' if len(said) > 1 else ''}" for said in most]
    return [plain(line) for line in found]


def _both_ends(text: str) -> str:
    """Shortens a long text in the middle: the last line of a traceback says most."""
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]} … {text[-_LONGEST * 2 // 3 :]}"


def _resume_hint(run: RunData) -> str:
    step = kept_step(run.folder)
    if step is None:
        if any(event.kind == "saved" for event in run.events):
            return f"no checkpoint is left in {run.folder.checkpoints}: restore one from a copy, or use another --out"
        return "nothing was saved: run the same command to start from scratch"
    return f"resume from step {step}: {resume_command(run.folder.path)}"


def _place(run: RunData) -> str:
    return f"at step {run.steps[-1].step} of {run.steps[-1].total_steps}" if run.steps else "before its first update"


def _last_record(run: RunData) -> str:
    times = [record.time for record in (*run.steps[-1:], *run.evaluations[-1:], *run.events[-1:])]
    return f"; last record {ago(time.time() - max(times))}" if times else ""


def _who(failure: Failure) -> str:
    step = f" at step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase})" if failure.phase else ""
    return f"rank {failure.rank}{failure.host and f' on {plain(failure.host)}'}{step}{phase}"


def _file(failure: Failure) -> str:
    """Returns the line of the user's code that raised a failure, or the file that it is about."""
    if line := users_place(failure):
        return plain(line)
    where = failure.where.rpartition(", ")[0] or failure.where
    return plain(where) if "/" in where and Path(where).suffix else ""

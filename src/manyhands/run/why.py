"""Why a run ended, or how it goes on: who, where, when and what to do, from its records alone."""

import itertools
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.cluster.agents.claim import Term, agents_work, term_in
from manyhands.cluster.failures import users_place
from manyhands.core.errors import shortened
from manyhands.core.records import MACHINE_LOST, REPLACED, Event, Failure, Running
from manyhands.core.resuming import kept_step, names_resume, resume_command
from manyhands.core.terminal import plain
from manyhands.report import summary
from manyhands.report.read import RunData, read_run
from manyhands.report.summary import ago, duration
from manyhands.report.time_shares import slow_rank
from manyhands.run.find import find_reference
from manyhands.run.logs import read_places
from manyhands.run.registry import head_of

_SHOWN = 3
_LONGEST = 300


@dataclass(frozen=True)
class Why:
    """What is to be told of a run, in this order; what isn't known is empty.

    Attributes:
        run: its folder.
        state: "running", "finished", "stopped", "interrupted" (at once, unsaved), "failed", "killed" (without a word).
        headline: how far it is or came, in a sentence.
        cause: the first cause, in a sentence.
        rank: that it was on; None where it was on none, or isn't known.
        host: the machine of that.
        step: updates made by then.
        phase: what went on there.
        file: that it lies in.
        others: what became of the other processes.
        done: what was done by itself, and what else was noticed.
        do: what the user can do.
        machines: that take part in a run that goes on.
    """

    run: str
    state: str
    headline: str
    cause: str = ""
    rank: int | None = None
    host: str = ""
    step: int | None = None
    phase: str = ""
    file: str = ""
    others: str = ""
    done: list[str] = field(default_factory=list[str])
    do: list[str] = field(default_factory=list[str])
    machines: str = ""

    def lines(self) -> list[str]:
        """For people; who and what comes first."""
        named = [("why", self.cause), ("others", self.others), ("on", self.machines)]
        rows = [self.headline, *(f"{name}: {text}" for name, text in named if text)]
        return [*rows, *(f"done: {text}" for text in self.done), *(f"do: {text}" for text in self.do)]


def why(word: str) -> Why:
    """What is to be told of the run that a word means.

    Raises:
        UserError: there is none, or its records can't be read.
    """
    run = read_run(find_reference(word))
    return explained(run, head_of(run.folder.path))


def explained(run: RunData, head: Running | None = None) -> Why:
    """The same of a run that was read; `head` is the process that watches it, where one does."""
    state = _state(run, head)
    folder = str(run.folder.path)
    done, do = _done(run), []
    if state not in {"running", "finished"}:
        do = [_resume_hint(run)]
    if state == "running" and head:
        ours = "" if head.here else f" on {head.host}, unless that machine is down"
        headline = f"{folder} is running{ours}, {_place(run)}{_heard(run)}"
        do = [f"to see the output of the processes: manyhands logs {folder} --follow"]
        return Why(folder, state, headline, machines=_machines(run), done=done, do=do)
    if state == "running":
        headline = f"{folder} is running, {_place(run)}{_heard(run)}; the launcher is on another machine, or lost"
        do = [f"to save and stop, run on the launching machine: manyhands stop {folder}"]
        if term_in(run.folder.ranks) != Term():  # it is detached
            do = [
                f"to take over from a lost launcher: {resume_command(run.folder.path)}",
                f"to save and stop: manyhands stop {folder}",
            ]
        return Why(folder, state, headline, done=done, do=do)
    took = f"after {duration(summary.seconds(run))} of work, {_place(run)}"
    if state == "finished":
        return Why(folder, state, f"{folder} finished {took}", done=done)
    if state in {"stopped", "interrupted"}:
        end = next(event for event in reversed(run.events) if event.kind == state)
        how, cause = "was ended at once" if state == "interrupted" else "stopped", plain(end.message)
        if state == "stopped" and not end.data.get("rankless"):
            took += "; everything is saved"
            cause = "the run was asked to stop (Ctrl-C, manyhands stop, a signal), or lost its launcher"
        last = next((event for event in reversed(run.events) if event.kind in {REPLACED, *summary.STARTS}), None)
        if last and last.kind == REPLACED:
            cause = plain(last.message)
            do = [f"for the progress, run there: manyhands why {folder}", *(f"or, here: {line}" for line in do)]
        return Why(folder, state, f"{folder} {how} {took}", cause, done=done, do=do)
    if state == "killed":
        cause = (
            "no process recorded a reason: all processes were killed from outside, or the machine of the launcher went "
            "down"
        )
        headline = f"{folder} ended without a record {took}{_heard(run)}"
        do = ["look for out-of-memory kills with dmesg | tail, and for a shutdown of the machine with last -x", *do]
        return Why(folder, state, headline, cause, done=done, do=do)
    return _failed(run, f"{folder} failed {took}", done, do)


def _machines(run: RunData) -> str:
    """Who takes part in the last start; nothing where no command named machines."""
    ranks = [(place.host, place.ranks[0], sum(place.ranks) - 1) for place in read_places(run.folder)]
    return plain(", ".join(f"{host} (rank{f's {one} to' if one < last else ''} {last})" for host, one, last in ranks))


def _failed(run: RunData, headline: str, done: list[str], do: list[str]) -> Why:
    # What an earlier start failed of was overcome: the last one may have ended without a word of its head.
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
    others = _others(run, first)
    hints = [line for line in first.hints if not names_resume(line)]
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
    return Why(
        str(run.folder.path), "failed", headline, cause, rank, first.host, first.step, first.phase, file, others, done,
        [*hints, *do],
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
    """The first cause, as the head has found it, or the first that is no consequence."""
    same = [one for one in run.failures if event and (one.what, one.rank) == (event.message, event.rank)]
    if same or not event:
        return (same or run.failures)[0]
    # A rank's record of its own end may stand where the head's would.
    lost = re.match(r"(\S+) is lost: ", event.message)
    host = lost[1] if lost else str(event.data.get("host", ""))
    return Failure(
        time=event.time, rank=event.rank, host=host, pid=0, step=event.step,
        error=MACHINE_LOST if lost else "", what=event.message,
    )  # fmt: skip


def _others(run: RunData, first: Failure) -> str:
    """What the other processes were doing as it came about."""
    rest = [one for one in run.failures if one is not first and one.rank != first.rank]
    headline = "; ".join(
        f"{_who(one)} {'ended after another failed' if one.consequence else 'failed as well: ' + shortened(one.what)}"
        for one in rest[:_SHOWN]
    )
    size = run.environment.get("processes")
    unknown = size - 1 - len(rest) if isinstance(size, int) else 0
    more = f"{len(rest) - _SHOWN} more processes likewise" if len(rest) > _SHOWN else ""
    silent = f"{unknown} of {size} processes were ended before recording an error" if unknown > 0 else ""
    return plain("; ".join(filter(None, (headline, more, silent))))


def _done(run: RunData) -> list[str]:
    """Starts made by itself, updates and pictures that were left out, and who was slow or stood still."""
    found: list[str] = []
    starts = [event for event in run.events if event.kind in {"restarted", "regrouped"}]
    for event in starts[-_SHOWN:]:
        # Who has which rank by now says nothing of then.
        at = f"{event.data['host']}, " if event.data.get("host") else ""
        how = "restarted" if event.kind == "restarted" else "restarted with another machine"
        found.append(f"{how} ({at}{ago(time.time() - event.time)}): {_both_ends(event.message)}")
    if len(starts) > _SHOWN:
        found.insert(0, f"{len(starts)} restarts in all; the last {_SHOWN}:")
    found += [event.message for event in run.events if event.kind == "undone"][-_SHOWN:]
    for kind, words in (("left-out", "updates were skipped"), ("replaced", "times a picture was replaced")):
        events = run.counted(kind)
        if events:
            found.append(f"{len(events)} {words}; the last: {events[-1].message}")
    slow = slow_rank(run)
    found += [f"{slow}"] if slow else []
    for kind in ("slow", "stall"):
        said = Counter(_without_figures(event) for event in run.events if event.kind == kind)
        last = {_without_figures(event): event.message for event in run.events if event.kind == kind}
        found += [f"{last[key]}{f' ({count} times)' if count > 1 else ''}" for key, count in said.most_common(_SHOWN)]
    return [plain(line) for line in found]


def _both_ends(text: str) -> str:
    """A long text as it begins and ends: the last line of a traceback says most."""
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]} … {text[-_LONGEST * 2 // 3 :]}"


def _without_figures(event: Event) -> str:
    return re.sub(r"[\d.e+-]+ s|\d+%", "", event.message)


def _resume_hint(run: RunData) -> str:
    step = kept_step(run.folder)
    if step is None:
        if any(event.kind == "saved" for event in run.events):
            return f"restore a checkpoint in {run.folder.checkpoints}, where none is left, or use another --out"
        return "nothing was saved: run the same command to start from scratch"
    return f"resume from step {step}: {resume_command(run.folder.path)}"


def _place(run: RunData) -> str:
    if not run.steps:
        return "before its first update"
    last = run.steps[-1]
    return f"at step {last.step} of {last.total_steps}"


def _heard(run: RunData) -> str:
    times = [record.time for record in (*run.steps[-1:], *run.evaluations[-1:], *run.events[-1:])]
    return f"; last record {ago(time.time() - max(times))}" if times else ""


def _who(failure: Failure) -> str:
    step = f" at step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase})" if failure.phase else ""
    return f"rank {failure.rank}{failure.host and f' on {plain(failure.host)}'}{step}{phase}"


def _file(failure: Failure) -> str:
    """The file that a failure is about, or the line of the user's that it came from."""
    if line := users_place(failure):
        return plain(line)
    where = failure.where.rpartition(", ")[0] or failure.where
    return plain(where) if "/" in where and Path(where).suffix else ""

"""Finds runs that go on by the words that users have for them, and stops them."""

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from manyhands.core.claim import agents_here, agents_work
from manyhands.core.errors import RunError, UserError
from manyhands.core.folder import RunFolder
from manyhands.core.going_on import going_on
from manyhands.core.plugins import did_you_mean
from manyhands.core.records import Event
from manyhands.core.registry import Running, forget, goes_on, headed_here, headless, running, signal_head
from manyhands.core.shown import say
from manyhands.core.terms import Term, raise_term, term_in
from manyhands.report.now import look
from manyhands.report.read import newest_runs, no_run

RUNS = Path("runs")
# The word for the run that was started last.
LAST = "last"
POLL_S = 0.1
# A head takes up one signal before the next; two at once may arrive as one.
BETWEEN_SIGNALS_S = 0.5
# What the agent itself needs to kill its workers, and some.
KILL_S = 20.0
# A head on another machine that has written nothing for so long may have gone with it.
SILENT_S = 60.0
# A stop that takes no longer needs no words.
QUIET_S = 2.0


def find_running(word: str) -> Running:
    """The run that goes on and is meant: by its folder, the folder's name, or a part of that.

    Raises:
        UserError: none is, or several are.
    """
    headed = running()
    found = matches(word, [*headed, *headless()])
    if len(found) > 1:
        raise UserError(f'"{word}" may mean {len(found)} runs', word, tuple(f"{record.run}" for record in found))
    if found and found[0] in headed:
        return found[0]
    if found:
        run = shlex.quote(found[0].run)
        mend = (
            f"manyhands why {run} says what takes its place",
            f"manyhands stop {run} has the processes save and end",
        )
        raise UserError("the run's launcher is gone, and its processes work on", found[0].run, mend)
    ended = find_run(word).path
    mend = (
        f"manyhands why {shlex.quote(str(ended))} says how it ended",
        f"{going_on(ended)} goes on with it",
        "manyhands ps lists the runs that go on",
    )
    raise UserError("the run isn't going on", str(ended), mend)


def forget_elsewhere(word: str) -> list[Running]:
    """Takes runs off the list whose heads are on other machines: all that the word means, as none can be told apart.

    Raises:
        UserError: there is none, or one has written something just now.
    """
    elsewhere = [record for record in running() if not record.here]
    alike = matches(word, elsewhere)
    found = matches(word, elsewhere, parts=False) or (alike if len(alike) == 1 else [])
    if not found:
        mend = ("manyhands ps lists the runs that go on; manyhands stop RUN ends one whose head is on this machine",)
        raise UserError(f'no run that "{word}" may mean has its head on another machine', word, mend)
    for record in found:
        if (heard := look(record).heard) and (silent_s := time.time() - heard) < SILENT_S:
            mend = (
                f"manyhands why {shlex.quote(record.run)} says how it goes on",
                f"{going_on(Path(record.run))} takes its head's place, if that is lost",
                "or give the command again in a minute",
            )
            raise UserError(f"the run wrote something {silent_s:.0f} s ago, so it may go on", record.run, mend)
    forget(found)
    return found


def find_run(word: str, *, parts: bool = True) -> RunFolder:
    """The run that is meant, whether it goes on or not: a folder, its name, a part of that, or "last".

    With `parts` false the name is given from its beginning, since other words may be a data set's.

    Raises:
        UserError: there is none, or there are several.
    """
    for folder in (RunFolder(Path(word).expanduser()), RunFolder(RUNS / word)):
        if word and folder.exists():
            return folder
    runs = running()
    if word == LAST:
        listed = [Path(record.run) for record in [*runs, *headless()]]
        for newest in newest_runs((RUNS, Path()), listed, 1):
            say(f"the last run is {newest}")
            return RunFolder(newest)
    ended = [path.parent for path in RUNS.glob("*/job.toml")]
    known = {path.resolve(): path for path in (*ended, *(Path(record.run) for record in runs))}.values()
    names = named_by(word, [path.name for path in known], parts=parts)
    found = [path for path in known if path.name in names]
    if len(found) == 1:
        return RunFolder(found[0])
    if found:
        raise UserError(f'"{word}" may mean {len(found)} runs', word, tuple(map(str, found)))
    if "/" in word or Path(word).exists():
        raise no_run(Path(word))
    raise _unknown_run(word, sorted(path.name for path in known))


def matches(word: str, runs: Iterable[Running], *, parts: bool = True) -> list[Running]:
    """The runs that a word may mean, by the strictest reading that fits any."""
    runs = list(runs)
    path = str(Path(word).expanduser().resolve())
    by_path = [record for record in runs if record.run == path]
    names = named_by(word, [record.name for record in runs], parts=parts)
    return by_path or [record for record in runs if record.name in names]


def without_last(word: str) -> str:
    """The path of the last run for the word "last"; any other word as it is."""
    return str(find_run(word).path) if word == LAST else word


def named_by(word: str, names: Iterable[str], *, parts: bool = True) -> list[str]:
    """The names that a word stands for: the same one, else those that begin with it, else those that contain it."""
    known = sorted(set(names))
    readings: list[Callable[[str], bool]] = [word.__eq__, lambda name: name.startswith(word), lambda name: word in name]
    found = ([name for name in known if fits(name)] for fits in readings[: 3 if parts else 2])
    return next(filter(None, found), []) if word else []


def _unknown_run(word: str, names: Iterable[str]) -> UserError:
    """The error for a word that means no run."""
    known = list(dict.fromkeys(names))
    shown = f"runs: {', '.join(known[:8])}" if known else "manyhands ps lists the runs that go on: none now"
    return UserError(
        f'no run is called "{word}"', word or "RUN", tuple(filter(None, (did_you_mean(word, known), shown)))
    )


def stop_headless(word: str, say: Callable[[str], None], *, now: bool) -> Path | None:
    """Has a run stop whose processes work here, and whose head doesn't: they save and leave, and all others with them.

    With `now` those of this machine are ended unsaved; on others they save and leave.

    Returns:
        Its folder, once they have left; None where there is no such run.
    """
    without = headless()
    found = matches(word, [*running(), *without])
    left = {Path(record.run) for record in found if len(found) == 1 and record in without}
    for run in (Path(word).expanduser(), RUNS / word, *left):
        ranks = run / "ranks"
        term = term_in(ranks)
        # Of a run that isn't detached the head must be known to be gone: it may be on another machine.
        if (term == Term() and run.resolve() not in left) or headed_here(run) or not agents_work(ranks):
            continue
        how = "ending the processes" if now else "asked the processes"
        say(f"{how} of {run}{'' if now else ' to save and stop'}; the command that watched them isn't here")
        if term != Term():
            raise_term(ranks, Term(term.head + 1))
        # One that was stopped (SIGSTOP) can't have heard that its head is gone; its processes end with it.
        _signal_agents(ranks, signal.SIGKILL if now else signal.SIGCONT)
        while agents_work(ranks):
            time.sleep(POLL_S)
        return run
    return None


def _signal_agents(ranks: Path, number: int) -> None:
    for pid in agents_here(ranks):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def stop_run(record: Running, say: Callable[[str], None], *, now: bool) -> Event | None:
    """Has a run save and stop, or end at once, and waits until it has.

    Returns:
        The event that ended it; None where it was ended before it could write one.

    Raises:
        UserError: its head is on another machine.
        RunError: it could not be ended.
    """
    if not record.here:
        raise UserError(
            f"{record.name} is watched from {record.host}",
            record.run,
            (f"on {record.host}: manyhands stop {shlex.quote(record.name)}",),
        )
    signal_head(record, signal.SIGTERM)
    if now:
        say(f"ending {record.name} (pid {record.pid}) without a save")
        _end(record, say)
    else:
        say(f"asked {record.name} (pid {record.pid}) to save and stop")
        _wait_for_save(record, say)
    return look(record).end


def _wait_for_save(record: Running, say: Callable[[str], None]) -> None:
    asked, told = time.monotonic(), ""
    while goes_on(record):
        stopping = look(record).state == "stopping"
        words = "waiting for its last checkpoint" if stopping else "waiting for the update that goes on"
        if words != told and time.monotonic() - asked > QUIET_S:
            told = words
            say(f"{words}; --now ends it at once")
        time.sleep(POLL_S)


def _end(record: Running, say: Callable[[str], None]) -> None:
    """A second signal, of the kind that ends a process of its own too; then the one that nobody can refuse."""
    time.sleep(BETWEEN_SIGNALS_S)
    signal_head(record, signal.SIGINT)
    if _wait_until_gone(record, KILL_S):
        return
    say(f"it didn't end in {KILL_S:.0f} s and is killed")
    signal_head(record, signal.SIGKILL)
    if not _wait_until_gone(record, KILL_S):
        raise RunError(f"{record.name} can't be ended", f"pid {record.pid}", (f"kill -9 {record.pid}",))


def _wait_until_gone(record: Running, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while goes_on(record):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True

"""Stops runs, with the process that watches them or without."""

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyhands.cluster.agents.claim import Term, agents_here, agents_work, raise_term, term_in
from manyhands.core.errors import RunError, UserError
from manyhands.core.records import Event, Running
from manyhands.core.run_folder import RunFolder
from manyhands.report.follow import look
from manyhands.run.registry import headed_here, headless, is_running, signal_head

POLL_S = 0.1
# A head takes up one signal before the next; two at once may arrive as one.
BETWEEN_SIGNALS_S = 0.5
# What the agent itself needs to kill its workers, and some.
KILL_S = 20.0
# A stop that takes no longer needs no words.
QUIET_S = 2.0


def stop_headless(folder: RunFolder, say: Callable[[str], None], *, now: bool) -> bool:
    """Stops a run whose processes work here and whose head doesn't: they save and leave, and all others with them.

    With `now` those of this machine are ended unsaved; on others they save and leave.

    Returns:
        True once they have left; False for any other run.
    """
    run, ranks, term = folder.path, folder.ranks, term_in(folder.ranks)
    # Of a run that isn't detached the head must be known to be gone: it may be on another machine.
    known_gone = term != Term() or run.resolve() in {Path(record.run) for record in headless()}
    if not known_gone or headed_here(run) or not agents_work(ranks):
        return False
    how = "ending the processes" if now else "asked the processes"
    say(f"{how} of {run}{'' if now else ' to save and stop'}; the launcher is not on this machine")
    if term != Term():
        raise_term(ranks, Term(term.head + 1))
    # A stopped one (SIGSTOP) can't have noticed that its head is gone; its processes end with it.
    for pid in agents_here(ranks):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL if now else signal.SIGCONT)
    while agents_work(ranks):
        time.sleep(POLL_S)
    return True


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
            f"{record.name} was launched from {record.host}",
            record.run,
            (f"run this on {record.host}: manyhands stop {shlex.quote(record.name)}",),
        )
    signal_head(record, signal.SIGTERM)
    if now:
        say(f"ending {record.name} (pid {record.pid}) without saving")
        _end(record, say)
    else:
        say(f"asked {record.name} (pid {record.pid}) to save and stop")
        _wait_for_save(record, say)
    return look(record).end


def _wait_for_save(record: Running, say: Callable[[str], None]) -> None:
    asked, shown = time.monotonic(), ""
    while is_running(record):
        stopping = look(record).state == "stopping"
        words = "waiting for the last checkpoint" if stopping else "waiting for the current update"
        if words != shown and time.monotonic() - asked > QUIET_S:
            shown = words
            say(f"{words}; use --now to end the run at once")
        time.sleep(POLL_S)


def _end(record: Running, say: Callable[[str], None]) -> None:
    """A second signal, of the kind that ends a process of its own too; then the one that nobody can refuse."""
    time.sleep(BETWEEN_SIGNALS_S)
    signal_head(record, signal.SIGINT)
    if _wait_until_gone(record, KILL_S):
        return
    say(f"{record.name} did not end within {KILL_S:.0f} s: killing the run")
    signal_head(record, signal.SIGKILL)
    if not _wait_until_gone(record, KILL_S):
        raise RunError(f"{record.name} can't be ended", f"pid {record.pid}", (f"run kill -9 {record.pid}",))


def _wait_until_gone(record: Running, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while is_running(record):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True

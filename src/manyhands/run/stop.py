"""Stops runs, with or without their launcher."""

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
from manyhands.core.timeouts import KILL_RUN_S
from manyhands.report.follow import look
from manyhands.run.registry import headed_here, headless, is_running, signal_head

_POLL_S = 0.1
# Two signals at once may arrive as one.
_BETWEEN_SIGNALS_S = 0.5
# A stop that takes longer is explained.
_EXPLAIN_S = 2.0


def stop_headless(folder: RunFolder, say: Callable[[str], None], *, now: bool) -> bool:
    """Stops a run with processes but no launcher on this machine: all its processes, everywhere, save and leave.

    With `now`, local processes are killed without saving; processes on other machines save and exit.

    Returns:
        True once they have left; False for any other run.
    """
    run, ranks, term = folder.path, folder.ranks, term_in(folder.ranks)
    # The launcher of a run that isn't detached may be on another machine, unless it is known to be gone.
    known_gone = term != Term() or run.resolve() in {Path(record.run) for record in headless()}
    if not known_gone or headed_here(run) or not agents_work(ranks):
        return False
    how = "ending the processes" if now else "asked the processes"
    say(f"{how} of {run}{'' if now else ' to save and stop'}; the launcher is not on this machine")
    if term != Term():
        raise_term(ranks, Term(term.head + 1))
    # A suspended agent (SIGSTOP) has not noticed that its launcher is gone; its workers end with it.
    for pid in agents_here(ranks):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL if now else signal.SIGCONT)
    while agents_work(ranks):
        time.sleep(_POLL_S)
    return True


def stop_run(record: Running, say: Callable[[str], None], *, now: bool) -> Event | None:
    """Asks a run to save and stop, or ends it at once, and waits until it has ended.

    Returns:
        The event that ended it; None if it was killed before it could write one.

    Raises:
        UserError: its launcher is on another machine.
        RunError: it could not be ended.
    """
    if not record.here:
        hints = (f"run this on {record.host}: manyhands stop {shlex.quote(record.name)}",)
        raise UserError(f"{record.name} was launched from {record.host}", record.run, hints)
    signal_head(record, signal.SIGTERM)
    if now:
        say(f"ending {record.name} (pid {record.pid}) without saving")
        time.sleep(_BETWEEN_SIGNALS_S)
        signal_head(record, signal.SIGINT)
        if not _ends_within(KILL_RUN_S, record):
            say(f"{record.name} did not end within {KILL_RUN_S:.0f} s: killing the run")
            signal_head(record, signal.SIGKILL)
            if not _ends_within(KILL_RUN_S, record):
                raise RunError(f"{record.name} can't be ended", f"pid {record.pid}", (f"run kill -9 {record.pid}",))
        return look(record).end
    say(f"asked {record.name} (pid {record.pid}) to save and stop")
    shown, wait_s = "", _EXPLAIN_S
    while not _ends_within(wait_s, record):
        stopping = look(record).state == "stopping"
        words = "waiting for the last checkpoint" if stopping else "waiting for the current update"
        if words != shown:
            say(f"{words}; use --now to end the run at once")
        shown, wait_s = words, _POLL_S
    return look(record).end


def _ends_within(limit_s: float, record: Running) -> bool:
    until = time.monotonic() + limit_s
    while is_running(record) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return not is_running(record)

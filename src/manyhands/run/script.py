"""Runs of the user's own training script: what torchrun does, with our agents, addresses, logs and first cause."""

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyhands.cluster.agents.ending import Ending
from manyhands.cluster.hosts.machines import machines_of
from manyhands.cluster.hosts.this_process import participate
from manyhands.config.job import Job
from manyhands.config.load import LoadedJob
from manyhands.core.errors import EXIT_INTERRUPTED, ManyhandsError, UserError
from manyhands.core.files import write_all
from manyhands.core.records import Event, append
from manyhands.core.run_folder import RunFolder
from manyhands.report.screen import Screen

# Of the sections of a job these alone concern a script; the rest is what it decides by itself.
_SECTIONS = ("cluster.", "run.")


def check_script(loaded: LoadedJob) -> None:
    """Looks at what can be known before anything is started.

    Raises:
        UserError: there is no such script here, or an option was given that no script would hear of.
    """
    job = loaded.job
    script = job.run.script[0]
    given = [key for key, origin in loaded.origins.items() if origin == "flag" and not key.startswith(_SECTIONS)]
    if given:
        hints = (f"put options of the script after --: manyhands train {script} -n 2 -- --its-own-option 3",)
        raise UserError(f"{given[0]} has no effect on a script of your own", f"flag --{given[0]}", hints)
    if not machines_of(job.cluster) and not Path(script).is_file():
        raise UserError(f"there is no script {script}", str(Path.cwd()), ("write the path relative to this folder",))
    found = participate(job.cluster).process_info
    if found:
        what = f"this process is already rank {found.rank} of {found.size}, by {found.started_by}"
        hints = (f"start {script} without manyhands", f"or without a launcher: manyhands train {script} -n 2")
        raise UserError(what, script, hints)


def shown(job: Job, folder: RunFolder, screen: Screen, *, quiet: bool) -> Callable[[], None]:
    """What draws the screen: the run's progress, or the words of a script's rank 0."""
    if not job.run.script:
        return screen.update
    echo = Echo(folder.ranks / "0.log", quiet=quiet)

    def draw() -> None:
        screen.update()
        echo.update()

    return draw


def stopping(job: Job, usual: str) -> str:
    """What is said at a wish to stop: a script of the user's is not known to save."""
    return f"stopping {job.run.script[0]}; press Ctrl-C again to kill the script" if job.run.script else usual


def note_end(job: Job, folder: RunFolder, ending: Ending) -> None:
    """Records in the run's events how the run ended; failures are recorded elsewhere.

    Raises:
        ManyhandsError: the user stopped it.
    """
    kind = "stopped" if ending.interrupted else "finished" if ending.ok else ""
    if kind:
        with suppress(OSError):
            append(folder.events, Event(time=time.time(), kind=kind))
    if ending.interrupted:
        error = ManyhandsError(
            f"{job.run.script[0]} was stopped",
            hints=(f"for its output: manyhands logs {shlex.quote(str(folder.path))}",),
        )
        error.exit_code = EXIT_INTERRUPTED
        raise error


def result_lines(folder: RunFolder, job: Job) -> list[str]:
    """The last words on a script that came to its end."""
    logs = f"logs   manyhands logs {shlex.quote(str(folder.path))}"
    return [f"{job.run.script[0]} finished", f"run    {folder.path}", logs]


class Echo:
    """Shows on standard output what rank 0 writes from now on, byte by byte as it is this user's own program's.

    Args:
        log: its file, in the run folder here.
        quiet: show nothing.
    """

    def __init__(self, log: Path, *, quiet: bool) -> None:
        self._log, self._quiet = log, quiet
        self._shown = log.stat().st_size if log.is_file() else 0

    def update(self) -> None:
        """Shows what is new."""
        if self._quiet or not self._log.is_file() or self._log.stat().st_size <= self._shown:
            return
        with self._log.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        sys.stdout.flush()
        write_all(sys.stdout.fileno(), new)

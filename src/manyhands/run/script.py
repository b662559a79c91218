"""Runs a training script of the user's, as torchrun does, with our agents, addresses, logs and first cause."""

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

# The sections of a job that apply to a script.
_SECTIONS = ("cluster.", "run.")


def check_script(loaded: LoadedJob) -> None:
    """Checks a script and its options before anything is started.

    Raises:
        UserError: there is no such script here, or an option was given that does not apply to scripts.
    """
    job, script = loaded.job, loaded.job.run.script[0]
    given = [key for key, origin in loaded.origins.items() if origin == "flag" and not key.startswith(_SECTIONS)]
    if given:
        hints = (f"put options of the script after --: manyhands train {script} -n 2 -- --its-own-option 3",)
        raise UserError(f"{given[0]} has no effect on a script of your own", f"flag --{given[0]}", hints)
    if not machines_of(job.cluster) and not Path(script).is_file():
        raise UserError(f"there is no script {script}", str(Path.cwd()), ("write the path relative to this folder",))
    found = participate(job.cluster).process_info
    if found:
        what = f"this process is already rank {found.rank} of {found.size}, as set by {found.started_by}"
        hints = (f"start {script} without manyhands", f"or without a launcher: manyhands train {script} -n 2")
        raise UserError(what, script, hints)


def shown(job: Job, folder: RunFolder, screen: Screen, *, quiet: bool) -> Callable[[], None]:
    """Returns a function that draws the screen: the run's progress, and the output of a script's rank 0."""
    if not job.run.script:
        return screen.update
    echo = Echo(folder.ranks / "0.log", quiet=quiet)

    def draw() -> None:
        screen.update()
        echo.update()

    return draw


def stopping(job: Job, usual: str) -> str:
    """Returns the message at a stop request: a script of the user's may not save."""
    return f"stopping {job.run.script[0]}; press Ctrl-C again to kill the script" if job.run.script else usual


def note_end(job: Job, folder: RunFolder, ending: Ending) -> None:
    """Records how a script's run ended; failures are recorded elsewhere.

    Raises:
        ManyhandsError: the user stopped it.
    """
    kind = "stopped" if ending.interrupted else "finished" if ending.ok else ""
    if kind:
        with suppress(OSError):
            append(folder.events, Event(time=time.time(), kind=kind))
    if ending.interrupted:
        hints = (f"for its output: manyhands logs {shlex.quote(str(folder.path))}",)
        error = ManyhandsError(f"{job.run.script[0]} was stopped", hints=hints)
        error.exit_code = EXIT_INTERRUPTED
        raise error


def result_lines(folder: RunFolder, job: Job) -> list[str]:
    """Returns the final lines about a finished script."""
    logs = f"logs   manyhands logs {shlex.quote(str(folder.path))}"
    return [f"{job.run.script[0]} finished", f"run    {folder.path}", logs]


class Echo:
    """Copies the output of rank 0 from its log file to standard output unchanged; nothing if `quiet`."""

    def __init__(self, log: Path, *, quiet: bool) -> None:
        self._log, self._quiet = log, quiet
        self._shown = log.stat().st_size if log.is_file() else 0

    def update(self) -> None:
        """Shows new output."""
        if self._quiet or not self._log.is_file() or self._log.stat().st_size <= self._shown:
            return
        with self._log.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        sys.stdout.flush()
        write_all(sys.stdout.fileno(), new)

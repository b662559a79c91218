"""The launcher of a detached run: a process of its own, for which the command waits until the run trains."""

import os
import signal
import sys
from pathlib import Path

from manyhands.core.files import private_files
from manyhands.core.resuming import resume_command
from manyhands.core.stops import STOPS, handled
from manyhands.core.terminal import show, show_json

LOG = "head.log"


class Background:
    """Forks this process. The child, in which `elsewhere` is 0, launches the run; the parent waits.

    Attributes:
        elsewhere: the process id of the child, in the parent.
    """

    def __init__(self) -> None:
        self._heard, self._writer = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Signals that arrive before `wait` handles them are passed on then.
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.elsewhere = os.fork()
        if not self.elsewhere:
            os.setsid()  # Ctrl-C and the end of the terminal don't reach this process
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(self._heard)
            self._left = False
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)

    def leave(self, run: Path) -> None:
        """Leaves the terminal and writes further messages into the run folder; a second call changes nothing."""
        if self._left:
            return
        self._left = True
        with private_files(), (run / LOG).open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        os.write(self._writer, os.fsencode(run))
        os.close(self._writer)

    def wait(self, *, as_json: bool) -> int:
        """Waits until the run trains or has ended, and passes signals on to the launcher; returns the exit code."""
        os.close(self._writer)
        with handled(lambda number, _frame: os.kill(self.elsewhere, number)), os.fdopen(self._heard, "rb") as heard:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)
            run = Path(os.fsdecode(heard.read()))
            if not run.name:
                return os.waitstatus_to_exitcode(os.waitpid(self.elsewhere, 0)[1]) & 0xFF
        if as_json:
            show_json({"run": str(run), "status": "running", "pid": self.elsewhere, "log": str(run / LOG)})
            return 0
        lines = [
            f"{run} keeps training without this terminal; launcher log: {run / LOG}",
            f"to stop: manyhands stop {run}",
            f"to resume on another machine of the run, if this machine is lost: {resume_command(run)}",
        ]
        show(lines)
        return 0

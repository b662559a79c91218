"""The head of a detached run: a process of its own, which the command waits for until the run trains."""

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
    """Splits this process in two. In the one of which `elsewhere` is False all goes on; the other only waits.

    Attributes:
        elsewhere: the process id of the one that goes on, in the one that doesn't.
    """

    def __init__(self) -> None:
        self._heard, self._writer = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # What comes before `wait` hears it is heard then, and passed on.
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.elsewhere = os.fork()
        if not self.elsewhere:
            os.setsid()  # neither Ctrl-C nor the terminal's end comes here
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(self._heard)
            self._left = False
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)

    def leave(self, run: Path) -> None:
        """Lets go of the terminal; what is said from now on is in the run folder. The second time changes nothing."""
        if self._left:
            return
        self._left = True
        with private_files(), (run / LOG).open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        os.write(self._writer, os.fsencode(run))
        os.close(self._writer)

    def wait(self, *, as_json: bool) -> int:
        """Until the run trains, or has ended before that; what asks this command to stop is passed on."""
        os.close(self._writer)
        with handled(lambda number, _frame: os.kill(self.elsewhere, number)), os.fdopen(self._heard, "rb") as heard:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)
            run = Path(os.fsdecode(heard.read()))
            if not run.name:
                return os.waitstatus_to_exitcode(os.waitpid(self.elsewhere, 0)[1]) & 0xFF
        if as_json:
            show_json({"run": str(run), "status": "running", "pid": self.elsewhere, "log": str(run / LOG)})
            return 0
        show(
            [
                f"{run} keeps training without this terminal; launcher log: {run / LOG}",
                f"to stop: manyhands stop {run}",
                f"to resume on another machine of the run, if this machine is lost: {resume_command(run)}",
            ]
        )
        return 0

"""First things in a worker of an agent's: it dies with its agent and writes to a file of its own. Needs no torch."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TextIO, cast

from manyhands.core.streams import Tolerant

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Has the kernel end this process when `parent` ends; ends it now where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def write_to(path: Path) -> None:
    """Both output streams of this process go to the end of one file; standard input is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)
    # A log on a full disk loses lines; what wrote them, a library or the user's own code, must not fail by it.
    sys.stdout, sys.stderr = cast(TextIO, Tolerant(sys.stdout)), cast(TextIO, Tolerant(sys.stderr))

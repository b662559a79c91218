"""Temporary folders that processes lock. `scratch` also removes the unlocked folders of killed processes."""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from manyhands.core.records import FAILURE_FILE

PREFIX = "manyhands-"
ALIVE = ".alive"
NEW_S = 60.0  # an unlocked folder of this age is abandoned; a younger one may not be locked yet
# Waits for a line or for the end of the writing process. Processes that are still ending may create a file meanwhile.
_SWEEP = 'read -r _; rm -rf -- "$0" || { sleep 1; exec rm -rf -- "$0"; }'


@contextmanager
def scratch(purpose: str, *, swept: bool = False) -> Generator[Path]:
    """Creates a temporary folder that only this user can read, and removes the folder after the context.

    With `swept`, a shell removes the folder even if this process is killed. `purpose` is part of the folder's name.
    """
    for folder in abandoned():
        shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    shell = None
    try:
        with FileLock(folder / ALIVE):
            if swept:
                words, null = ["sh", "-c", _SWEEP, str(folder)], subprocess.DEVNULL
                shell = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
            yield folder
    finally:
        if shell:
            shell.communicate(b"\n")
        shutil.rmtree(folder, ignore_errors=True)


def workers_folder() -> Path | None:
    """Returns the scratch folder that this machine's workers share, or None if no agent started this process."""
    record = os.environ.get(FAILURE_FILE)
    return Path(record).parent if record else None


def abandoned() -> Iterator[Path]:
    """Yields this user's scratch folders whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, Timeout):
            state = folder.lstat()
            own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
            if own and time.time() - state.st_mtime > NEW_S and (folder / ALIVE).is_file():
                with FileLock(folder / ALIVE, timeout=0):
                    pass
                yield folder

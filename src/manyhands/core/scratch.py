"""Folders in the system's temporary folder that go with their process, also where that is killed.

A process that is killed can't remove its own. So it holds a lock in it, which the system frees, and whoever makes the
next one removes those of this user that nobody holds any more. Where no next one may come, a shell waits for its end.
"""

import multiprocessing.util
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from manyhands.core.errors import RunError
from manyhands.core.records import FAILURE_FILE

PREFIX = "manyhands-"
ALIVE = ".alive"
# A folder may be there for a moment before its lock is held.
NEW_S = 60.0
# A socket's path has at most 107 bytes; multiprocessing adds 32 of them.
MOST_OF_A_SOCKETS_PATH = 75
# Where sockets go if TMPDIR is too long.
_SHORT, _ENTER = ("/tmp", "/var/tmp", "/dev/shm"), os.W_OK | os.X_OK
# Waits for a line, or for the end of who should have written it. What still ended may put a file there meanwhile.
SWEEP = 'read -r _; rm -rf -- "$0" || { sleep 1; exec rm -rf -- "$0"; }'


@contextmanager
def scratch(purpose: str, *, swept: bool = False) -> Generator[Path]:
    """A folder that only this user can read, removed with the block; `swept` at once where this process is killed."""
    for folder in abandoned():
        shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    lock = FileLock(folder / ALIVE)
    try:
        with lock, _swept(folder) if swept else nullcontext():
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _swept(folder: Path) -> Generator[None]:
    words, nowhere = ["sh", "-c", SWEEP, str(folder)], subprocess.DEVNULL
    shell = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    try:
        yield
    finally:
        shell.communicate(b"\n")


def of_this_start() -> Path | None:
    """The folder that a run's processes on this machine share till they end; None where no agent of ours is."""
    record = os.environ.get(FAILURE_FILE)
    return Path(record).parent if record else None


def keep_sockets_of_this_start() -> None:
    """Puts multiprocessing's sockets into this start's folder: a loader's process that is killed leaves its own behind.

    Each process would make a folder of its own when it first passes a tensor on; those that are forked take this one.
    Where that folder's path is too long for a socket, and the temporary folder's too, they take a shorter place.

    Raises RunError: there is none.
    """
    before = tempfile.gettempdir()
    places = map(str, filter(None, (of_this_start(), before, *_SHORT)))
    short = [
        place for place in places if len(os.fsencode(place)) <= MOST_OF_A_SOCKETS_PATH and os.access(place, _ENTER)
    ]
    if not short:
        hints = ("set a shorter path: export TMPDIR=/tmp",)
        raise RunError(f"the path {before} is too long for Unix sockets", "TMPDIR", hints)
    tempfile.tempdir = short[0]
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def abandoned() -> Iterator[Path]:
    """This user's scratch folders whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            state = folder.lstat()
            own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
            if own and time.time() - state.st_mtime > NEW_S and (folder / ALIVE).is_file() and _is_free(folder):
                yield folder


def _is_free(folder: Path) -> bool:
    try:
        with FileLock(folder / ALIVE, timeout=0):
            return True
    except Timeout:
        return False

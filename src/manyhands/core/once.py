"""Work that one process of a host does while the others wait, and whose result stays in a file."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from manyhands.core.errors import UserError
from manyhands.core.private import usual_files

_HINTS = ("choose a writable folder: --data-dir for data, MANYHANDS_CACHE for the cache",)


@contextmanager
def one_at_a_time(path: Path, hints: tuple[str, ...] = _HINTS) -> Generator[None]:
    """Holds the lock beside `path` and makes its folder; the system frees the lock when a process dies.

    Raises:
        UserError: the folder can't be written; `hints` says what helps.
    """
    with usual_files(), _locked(path, hints):
        yield


@contextmanager
def _locked(path: Path, hints: tuple[str, ...]) -> Generator[None]:
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(f"{path.parent} can't be written: {error.strerror or error}", str(path), hints) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def temporary(path: Path) -> Generator[Path]:
    """Gives a name beside `path` to write to; what still lies there at the end is removed."""
    # Machines that share a disk have processes of the same number.
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Gives a name beside `path` to write to, and renames it to `path` when all went well; nobody sees half a file."""
    with temporary(path) as part:
        yield part
        part.replace(path)


@contextmanager
def committed(path: Path) -> Generator[Path]:
    """The same as `replacing`. Raises UserError: the disk is full, or can't be written."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        hints = ("free disk space or choose another folder: --data-dir for data, MANYHANDS_CACHE for the cache",)
        raise UserError(f"{path.name} can't be written: {error.strerror or error}", str(path), hints) from error

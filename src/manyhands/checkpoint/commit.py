"""Folders that appear whole or not at all, and vanish the same way; an interrupted one is left for `sweep`."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyhands.checkpoint import layout
from manyhands.core.files import sync


@contextmanager
def staging(folder: Path, step: int) -> Iterator[Path]:
    """A new temporary folder, locked while this process lives; what isn't committed at the end is removed."""
    path = folder / layout.temporary_name(step)
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems don't lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        if path.exists():
            remove_files(path)


def commit(staged: Path, target: Path) -> None:
    """Gives a staged folder, whose files are synced, its final name; a torn folder of that name makes way."""
    sync(staged)
    if target.exists():
        target.rename(target.with_name(layout.temporary_name(layout.step_of(target) or 0)))
    staged.rename(target)
    sync(target.parent)


def make_folder(folder: Path) -> None:
    """Makes the checkpoints folder, durably."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)


def sweep(path: Path) -> bool:
    """Removes an interrupted save's folder unless a process still works in it; True when it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return remove_files(path)


def remove(path: Path) -> bool:
    """Removes a checkpoint: first its name, in one stroke, then its files; True when it is gone.

    A folder without a manifest is not ours. One that holds another's file as well loses only our files.
    """
    if not (path / layout.MANIFEST).is_file():
        return False
    if not all(layout.is_ours(entry) for entry in path.iterdir()):
        return remove_files(path)
    doomed = path.with_name(layout.temporary_name(layout.step_of(path) or 0))
    try:
        path.rename(doomed)
    except OSError:
        return False
    remove_files(doomed)
    return True


def remove_files(path: Path) -> bool:
    """Removes our files, the manifest first, then the folder if nothing else is in it; True when it is gone."""
    with suppress(OSError):
        (path / layout.MANIFEST).unlink(missing_ok=True)
        for entry in list(path.iterdir()):
            if layout.is_ours(entry):
                entry.unlink(missing_ok=True)
        path.rmdir()
    return not path.exists()

"""Checkpoint folders: created in one step, found, pruned and deleted. No torch.

A folder appears complete or not at all; an interrupted save leaves a temporary folder for `sweep`.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from manyhands.checkpoint import files
from manyhands.checkpoint.files import read_plain, torn, verify
from manyhands.core.errors import UserError
from manyhands.core.files import sync


@contextmanager
def staging(folder: Path, step: int) -> Iterator[Path]:
    """A new temporary folder, locked while this process lives; what isn't committed at the end is removed."""
    path = folder / files.temporary_name(step)
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
        target.rename(target.with_name(files.temporary_name(files.step_of(target) or 0)))
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
    if not (path / files.MANIFEST).is_file():
        return False
    if not all(files.is_ours(entry) for entry in path.iterdir()):
        return remove_files(path)
    doomed = path.with_name(files.temporary_name(files.step_of(path) or 0))
    try:
        path.rename(doomed)
    except OSError:
        return False
    remove_files(doomed)
    return True


def remove_files(path: Path) -> bool:
    """Removes our files, the manifest first, then the folder if nothing else is in it; True when it is gone."""
    with suppress(OSError):
        (path / files.MANIFEST).unlink(missing_ok=True)
        for entry in list(path.iterdir()):
            if files.is_ours(entry):
                entry.unlink(missing_ok=True)
        path.rmdir()
    return not path.exists()


FOREIGN_SUFFIXES = (".pth.tar", ".pth", ".pt", ".tar", ".ckpt", ".safetensors")
_TRUST = "run this command only if you trust the folder, because the pickle may run code; then use weights.pth"


def newest(folder: Path, step_limit: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint up to the limit that verifies, and a sentence for each newer one that doesn't."""
    passed_over: list[str] = []
    for path in files.step_folders(folder):
        if step_limit is not None and (files.step_of(path) or 0) > step_limit:
            continue
        try:
            verify(path)
            read_state(path)
        except UserError as error:
            passed_over.append(f"{path.name} was skipped: {error.message}")
        else:
            return path, passed_over
    return None, passed_over


def resolve(reference: Path, which: Literal["best", "last"]) -> Path:
    """The checkpoint that a user means; see `choose`."""
    return choose(reference, which)[0]


def choose(reference: Path, which: Literal["best", "last"]) -> tuple[Path, list[str]]:
    """The checkpoint that a user means, and a sentence for each damaged one that was passed over for it.

    The reference is a run folder, a checkpoints folder, a checkpoint folder, or a .pth, .pth.tar, .pt or .safetensors
    file (for `foreign.read_foreign`). "best" is the best that the newest sound one knows of, or if that one is damaged
    the best of the others; the newest itself where none was evaluated. Raises UserError: there is none, or the one that
    is named doesn't verify.
    """
    if reference.is_file():
        if not reference.name.endswith(FOREIGN_SUFFIXES):
            raise UserError(f"{reference} is not a checkpoint", hints=(f"suffixes: {', '.join(FOREIGN_SUFFIXES)}",))
        if reference.name in files.CONTENTS and (reference.parent / files.MANIFEST).is_file():
            verify(reference.parent)  # a file of a checkpoint of ours
        return reference, []
    if not reference.is_dir():
        raise UserError(f"there is no {reference}", hints=("name a run folder, a checkpoint folder or a weights file",))
    if (reference / files.MANIFEST).exists() or files.step_of(reference) is not None:
        verify(reference)
        return reference, []
    folder = reference / "checkpoints" if (reference / "checkpoints").is_dir() else reference
    last, passed_over = newest(folder)
    if last is None:
        raise _no_checkpoint(reference, folder, passed_over)
    if which == "last":
        return last, _taken(last, passed_over)
    step = (read_state(last).get("best") or {}).get("step")
    best = last if step is None else folder / files.step_name(step)
    if best != last:
        try:
            verify(best)
        except UserError as error:
            passed_over.append(f"the best checkpoint, {best.name}, was skipped: {error.message}")
            best = _best_of_the_sound(folder, last)
    return best, _taken(best, passed_over)


def _no_checkpoint(reference: Path, folder: Path, passed_over: list[str]) -> UserError:
    if not any(folder.glob("*.distcp")):
        return UserError(f"{reference} holds no checkpoint that can be read", str(folder), tuple(passed_over))
    hints = (f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth", _TRUST)
    what = f"{reference} is not loaded: torch.distributed.checkpoint folders contain a pickle, .metadata"
    return UserError(what, str(folder), hints)


def _taken(path: Path, passed_over: list[str]) -> list[str]:
    return [*passed_over, f"{path.name} is used instead"] if passed_over else []


def _best_of_the_sound(folder: Path, last: Path) -> Path:
    """Of the checkpoints that verify the newest that was the best when it was made; the newest of all if none was."""
    for path in files.step_folders(folder):
        try:
            verify(path)
            best = read_state(path).get("best") or {}
        except UserError:
            continue  # it is not among the sound ones, which is all that is asked here
        if best.get("step") == files.step_of(path):
            return path
    return last


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's plain data, without tensors: step, epoch, best … Raises TornCheckpointError: it can't be read."""
    try:
        return read_plain(path / files.STATE)
    except (OSError, ValueError) as error:
        raise torn(path, f"has unreadable content: {error}") from error


Stamp = tuple[tuple[str, int, int, int], ...]
# What this process wrote or hashed: names, inodes, sizes and times of the files as they were then.
_known_good: dict[Path, Stamp] = {}


def prune(folder: Path, keep: int, best: Path | None) -> list[Path]:
    """Deletes and gives what `save` made but the newest `keep` that verify, and the best; none until so many do."""
    removed: list[Path] = []
    kept = 0
    for path in files.step_folders(folder):
        if kept >= keep and not (best is not None and path.name == best.name):
            if remove(path):
                removed.append(path)
                _known_good.pop(path, None)
        elif verifies(path):
            kept += 1
    if folder.is_dir():
        removed += [path for path in folder.iterdir() if files.is_temporary(path) and sweep(path)]
    return removed


def remove_step(folder: Path, step: int) -> None:
    """Deletes the checkpoint of a step, where there is one that `save` made."""
    path = folder / files.step_name(step)
    if path.is_dir() and remove(path):
        _known_good.pop(path, None)


def verifies(path: Path) -> bool:
    """True for a sound checkpoint; hashed once in a process, then only if a file's inode, size or time changed."""
    try:
        stamp = _stamp(path)
        if _known_good.get(path) != stamp:
            verify(path)
            _known_good[path] = stamp
    except (UserError, OSError):
        _known_good.pop(path, None)
        return False
    return True


def remember(path: Path) -> None:
    """Notes that this process has just written and read back a whole checkpoint, so that it needs no hashing soon."""
    _known_good[path] = _stamp(path)


def _stamp(path: Path) -> Stamp:
    entries = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in entries)

"""Commits, finds, prunes and deletes checkpoint folders; finds the saved steps of a run. Imports no torch.

A checkpoint folder appears complete or not at all. `sweep_interrupted_save` removes interrupted saves.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

from manyhands.checkpoint import files
from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_SAVED, ManyhandsError, UserError
from manyhands.core.files import parse_json, read_bytes, sync_to_disk
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder, resume_command

FOREIGN_SUFFIXES = (".pth.tar", ".pth", ".pt", ".tar", ".ckpt", ".safetensors")
_TRUST = "run this command only if you trust the folder, because the pickle may run code; then use weights.pth"
Stamp = tuple[tuple[str, int, int, int], ...]
# Stamps of checkpoints that this process wrote or verified: name, inode, size and time of each file.
_known_good: dict[Path, Stamp] = {}


@contextmanager
def staging_folder(folder: Path, step: int) -> Iterator[Path]:
    """Creates a locked temporary folder for a checkpoint. Removes the folder at the end unless it was committed."""
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
            remove_checkpoint_files(path)


def commit_folder(staged: Path, target: Path) -> None:
    """Renames a staging folder, whose files are on disk, to `target`. First moves a damaged `target` away."""
    sync_to_disk(staged)
    if target.exists():
        target.rename(target.with_name(files.temporary_name(files.step_of(target) or 0)))
    staged.rename(target)
    sync_to_disk(target.parent)


def sweep_interrupted_save(path: Path) -> bool:
    """Removes a staging folder, unless a process has locked it. Returns True if the folder no longer exists."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        return remove_checkpoint_files(path)
    return False


def remove_checkpoint(path: Path) -> bool:
    """Removes a checkpoint with a manifest, except files that aren't its own. Returns True if the folder is gone."""
    _known_good.pop(path, None)
    if not (path / files.MANIFEST).is_file():
        return False
    if not all(map(files.is_checkpoint_file, path.iterdir())):
        return remove_checkpoint_files(path)
    doomed = path.with_name(files.temporary_name(files.step_of(path) or 0))
    with suppress(OSError):
        path.rename(doomed)
        remove_checkpoint_files(doomed)
        return True
    return False


def remove_checkpoint_files(path: Path) -> bool:
    """Removes checkpoint files, manifest first, then the folder if it is empty. Returns True if it no longer exists."""
    with suppress(OSError):
        (path / files.MANIFEST).unlink(missing_ok=True)
        for entry in list(path.iterdir()):
            if files.is_checkpoint_file(entry):
                entry.unlink(missing_ok=True)
        path.rmdir()
    return not path.exists()


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Returns the newest valid checkpoint or None, and a list of messages about newer, damaged checkpoints."""
    passed_over: list[str] = []
    for path in files.step_folders(folder):
        try:
            files.verify_checkpoint(path)
            read_state(path)
        except UserError as error:
            passed_over.append(f"{path.name} was skipped: {error.message}")
        else:
            return path, passed_over
    return None, passed_over


def find_checkpoint(reference: Path, which: Literal["best", "last"]) -> Path:
    return choose_checkpoint(reference, which)[0]


def choose_checkpoint(reference: Path, which: Literal["best", "last"]) -> tuple[Path, list[str]]:
    """Returns the checkpoint that a user refers to, and a list of messages about skipped damaged checkpoints.

    `reference`: a run folder, a checkpoints folder, a checkpoint folder or a weights file. "best" selects the
    best checkpoint that the newest valid one records. If that is damaged, "best" selects the newest valid checkpoint
    that was best when saved, else the newest. Raises UserError if no checkpoint is valid, or `reference` is damaged.
    """
    if reference.is_file():
        if not reference.name.endswith(FOREIGN_SUFFIXES):
            raise UserError(f"{reference} is not a checkpoint", hints=(f"use {', '.join(FOREIGN_SUFFIXES)}",))
        if reference.name in files.CONTENTS and (reference.parent / files.MANIFEST).is_file():
            files.verify_checkpoint(reference.parent)  # a file of our own checkpoint
        return reference, []
    if not reference.is_dir():
        raise UserError(f"there is no {reference}", hints=("name a run folder, a checkpoint folder or a weights file",))
    if (reference / files.MANIFEST).exists() or files.step_of(reference) is not None:
        files.verify_checkpoint(reference)
        return reference, []
    folder = reference / "checkpoints" if (reference / "checkpoints").is_dir() else reference
    last, passed_over = newest_checkpoint(folder)
    if last is not None:
        found = last if which == "last" else _best_checkpoint(folder, last, passed_over)
        return found, [*passed_over, f"{found.name} is used instead"] if passed_over else []
    if not any(folder.glob("*.distcp")):
        raise UserError(f"{reference} holds no checkpoint that can be read", str(folder), tuple(passed_over))
    hints = (f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth", _TRUST)
    what = f"{reference} is not loaded: torch.distributed.checkpoint folders contain a pickle, .metadata"
    raise UserError(what, str(folder), hints)


def _best_checkpoint(folder: Path, last: Path, passed_over: list[str]) -> Path:
    """Returns the best checkpoint that `last` records. If damaged, returns an earlier best checkpoint, or `last`."""
    step = (read_state(last).get("best") or {}).get("step")
    best = last if step is None else folder / files.step_name(step)
    if best == last:
        return last
    try:
        files.verify_checkpoint(best)
        return best
    except UserError as error:
        passed_over.append(f"the best checkpoint, {best.name}, was skipped: {error.message}")
    for path in files.step_folders(folder):
        try:
            files.verify_checkpoint(path)
            best = read_state(path).get("best") or {}
        except UserError:
            continue
        if best.get("step") == files.step_of(path):
            return path
    return last


def read_state(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's plain data: step, epoch, best … Raises TornCheckpointError if it can't be read."""
    try:
        return files.read_plain(path / files.STATE)
    except (OSError, ValueError) as error:
        raise files.torn_error(path, f"has unreadable content: {error}") from error


def prune_checkpoints(folder: Path, keep: int, best: Path | None) -> list[Path]:
    """Deletes interrupted saves, and checkpoints before the newest `keep` valid ones except `best`. Returns paths."""
    removed: list[Path] = []
    kept = 0
    for path in files.step_folders(folder):
        if kept >= keep and not (best is not None and path.name == best.name):
            removed += [path] if remove_checkpoint(path) else []
        elif is_intact(path):
            kept += 1
    if folder.is_dir():
        removed += [path for path in folder.iterdir() if files.is_temporary(path) and sweep_interrupted_save(path)]
    return removed


def remove_saved_step(folder: Path, step: int) -> None:
    remove_checkpoint(folder / files.step_name(step))


def is_intact(path: Path) -> bool:
    """Returns True for a valid checkpoint. Hashes files once per process; again if an inode, size or time changes."""
    try:
        stamp = _file_stamp(path)
        if _known_good.get(path) != stamp:
            files.verify_checkpoint(path)
            _known_good[path] = stamp
    except (UserError, OSError):
        _known_good.pop(path, None)
        return False
    return True


def mark_intact(path: Path) -> None:
    _known_good[path] = _file_stamp(path)


def _file_stamp(path: Path) -> Stamp:
    entries = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in entries)


def saved_steps(folder: RunFolder) -> list[int]:
    names = [path.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*")]
    return [int(name) for name in names if name.isdecimal()]


def saved_step(folder: RunFolder) -> int | None:
    """Returns the newest saved step on this disk or, without one, in the run's events, or None if nothing was saved."""
    recorded = [line.get("step") for line in read_lines(folder.events) if line.get("kind") == "saved"]
    steps = saved_steps(folder) or [step for step in recorded if isinstance(step, int)]
    return max(steps, default=None)


def available_step(folder: RunFolder) -> int | None:
    """Returns the newest saved step if the checkpoint still exists, here or on rank 0's machine, else None."""
    elsewhere = False  # True if rank 0 and its disk are on another machine
    with suppress(OSError, ValueError, LookupError, TypeError):
        elsewhere = not cast(list[dict[str, Any]], parse_json(read_bytes(folder.machines)))[0]["local"]
    return saved_step(folder) if saved_steps(folder) or elsewhere else None


def unsaved_error(run: Path, step: int | None, why: str = "", *, idle: bool = False) -> ManyhandsError:
    """Creates the error for a run that the user stopped before its state was saved.

    `step`: the last saved step. `why`: the reason of a failed save; empty if a second stop request skipped the save.
    `idle`: True if no process was training, so there was nothing to save.
    """
    since = f" (could not save: {why})" if why else ""
    if step is None:
        hints = ("run the same command again to start from the beginning",)
        error = ManyhandsError(f"stopped before anything was saved{since}", hints=hints)
    else:
        how = "while no process was training" if idle else f"without a save{since}"
        what = f"stopped {how}; the last checkpoint is step {step}"
        error = ManyhandsError(what, hints=(f"resume from step {step}: {resume_command(run)}",))
    error.exit_code = EXIT_SAVED if idle and step is not None else EXIT_INTERRUPTED
    return error

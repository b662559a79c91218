"""Saves a run's state, all or nothing: written beside, synced to disk, committed by a rename."""

import errno
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from manyhands.checkpoint import commit, layout
from manyhands.checkpoint.load import verify
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.tensors import flatten_optimizer, write_tensors
from manyhands.core.errors import RunError, UserError

_MARGIN_BYTES = 64 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Stamp = tuple[tuple[str, int, int, int], ...]
# What this process wrote or hashed: names, inodes, sizes and times of the files as they were then.
_known_good: dict[Path, Stamp] = {}


class NotFiniteError(RunError):
    """A weight is NaN or infinite."""


class SaveError(RunError):
    """The disk is full or failing. Earlier checkpoints are untouched, so training may go on."""


def save(folder: Path, step: int, snapshot: Snapshot) -> Path:
    """Commits folder/step-NNNNNNNN with a manifest; does nothing where that step is there and verifies.

    Args:
        folder: the checkpoints folder, made where it is missing.
        step: updates made so far.
        snapshot: must not change until this returns.

    Returns:
        The committed folder.

    Raises:
        RunError: a weight is NaN or infinite; nothing is written.
        SaveError: no room, or the disk fails; nothing is left behind, training may go on.
        TypeError: the state or the optimizer's state is not plain data.
    """
    refuse_non_finite(snapshot)
    target = folder / layout.step_name(step)
    if verifies(target):
        return target
    contents = _contents(snapshot)
    try:
        commit.make_folder(folder)
        _refuse_too_little_space(folder, contents)
        with commit.staging(folder, step) as staged:
            _write(staged, step, contents)
            commit.commit(staged, target)
        remember(target)  # `_write` has read every file back
    except (OSError, SafetensorError) as error:
        raise save_error(folder, error) from error
    return target


def prune(folder: Path, keep: int, best: Path | None) -> list[Path]:
    """Deletes what is no longer needed; never anything that `save` didn't make.

    Args:
        folder: the checkpoints folder.
        keep: as many of the newest that verify are kept.
        best: is kept whatever its age.

    Returns:
        The deleted checkpoints and leftovers of interrupted saves. Nothing is deleted until `keep` verify.
    """
    removed: list[Path] = []
    kept = 0
    for path in layout.step_folders(folder):
        if kept >= keep and not (best is not None and path.name == best.name):
            if commit.remove(path):
                removed.append(path)
                _known_good.pop(path, None)
        elif verifies(path):
            kept += 1
    if folder.is_dir():
        removed += [path for path in folder.iterdir() if layout.is_temporary(path) and commit.sweep(path)]
    return removed


def remove_step(folder: Path, step: int) -> None:
    """Deletes the checkpoint of a step, where there is one that `save` made."""
    path = folder / layout.step_name(step)
    if path.is_dir() and commit.remove(path):
        _known_good.pop(path, None)


def refuse_non_finite(snapshot: Snapshot) -> None:
    """Raises a RunError that names the first tensor of the network with a NaN or an infinity that was finite once."""
    for name, tensor in snapshot.model.items():
        if name in snapshot.endless or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.float() if tensor.element_size() == 1 else tensor
        if not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            what = f"{name} has {count} of {tensor.numel()} values that are NaN or infinite; it was not saved"
            raise NotFiniteError(what, name, ("lower train.lr, clip gradients, or resume from an earlier checkpoint",))


def _contents(snapshot: Snapshot) -> dict[str, dict[str, Tensor] | bytes]:
    """Each file's name and what it holds: tensors by name, or text."""
    contents: dict[str, dict[str, Tensor] | bytes] = {
        layout.MODEL: snapshot.model,
        layout.STATE: layout.text(snapshot.state),
    }
    if snapshot.optimizer is not None:
        branches, tensors = flatten_optimizer(snapshot.optimizer)
        contents |= {layout.OPTIMIZER_PLAN: layout.text(branches), layout.OPTIMIZER: tensors}
    return contents


def _write(staged: Path, step: int, contents: dict[str, dict[str, Tensor] | bytes]) -> None:
    files = {}
    for name, content in contents.items():
        if isinstance(content, bytes):
            (staged / name).write_bytes(content)
        else:
            write_tensors(staged / name, content)
        files[name] = seal(staged / name)
    write_manifest(staged, step, files, layout.FORMAT)


def seal(file: Path) -> dict[str, Any]:
    """A file's entry in the manifest, once its bytes are on the disk; it is read back for it."""
    commit.sync_file(file)
    return {"size": file.stat().st_size, "sha256": layout.digest(file)}


def write_manifest(staged: Path, step: int, files: dict[str, Any], number: int) -> None:
    """Writes a staged folder's last file.

    Args:
        staged: the folder.
        step: updates made so far.
        files: what `seal` returned of each other file.
        number: of the format.
    """
    manifest = {"format": number, "step": step, "torch": torch.__version__, "manyhands": _own_version()}
    (staged / layout.MANIFEST).write_bytes(layout.manifest_text({**manifest, "files": files}))
    commit.sync_file(staged / layout.MANIFEST)


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


def _refuse_too_little_space(folder: Path, contents: dict[str, dict[str, Tensor] | bytes]) -> None:
    sizes = [
        len(content) if isinstance(content, bytes) else sum(t.numel() * t.element_size() for t in content.values())
        for content in contents.values()
    ]
    refuse_too_little_space(folder, sum(sizes))


def refuse_too_little_space(folder: Path, size_bytes: int) -> None:
    """Raises an OSError where a folder's disk has no room for so many bytes of tensors."""
    needed = size_bytes + _MARGIN_BYTES
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def save_error(folder: Path, error: OSError | SafetensorError) -> SaveError:
    """The error for users. Says what the disk said; the safetensors library reports its errors as text only."""
    text = (error.strerror if isinstance(error, OSError) else "") or str(error)
    full = getattr(error, "errno", None) in _FULL or "os error 28" in text.lower() or "no space left" in text.lower()
    if full:
        mend = ("free some space, or point --out at another disk", "earlier checkpoints are kept; training can go on")
        return SaveError(f"the disk is full, the checkpoint was not saved ({text})", str(folder), mend)
    return SaveError(f"the checkpoint was not saved: {text}", str(folder), ("earlier checkpoints are kept",))


def _own_version() -> str:
    try:
        return version("manyhands")
    except PackageNotFoundError:
        return "unknown"

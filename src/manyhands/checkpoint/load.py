"""Finds and reads checkpoints. A torn or altered one is refused; nothing that is read can run code."""

from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from manyhands.checkpoint import layout
from manyhands.checkpoint.plain_files import read_plain
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.source import open_checkpoint
from manyhands.checkpoint.tensors import read_tensors, unflatten
from manyhands.checkpoint.verify import TornCheckpointError, torn, verify
from manyhands.core.errors import UserError

__all__ = ["FOREIGN_SUFFIXES", "TornCheckpointError", "load", "newest", "read_state", "resolve", "verify"]

FOREIGN_SUFFIXES = (".pth.tar", ".pth", ".pt", ".tar", ".safetensors")


def load(path: Path) -> Snapshot:
    """Verifies a checkpoint folder, whole or in pieces, then reads all of it.

    Raises:
        TornCheckpointError: it doesn't verify.
        UserError: a newer version of manyhands wrote it.
    """
    verify(path)
    if (path / layout.PIECES).exists():
        return open_checkpoint(path, verified=True).snapshot()
    try:
        return Snapshot(read_tensors(path / layout.MODEL), _read_optimizer(path), read_state(path))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise torn(path, f"holds what can't be read: {error}") from error


def newest(folder: Path, step_limit: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a sentence for each newer one that doesn't.

    Args:
        folder: the checkpoints folder; it need not exist.
        step_limit: steps above it are left out without a word.
    """
    passed_over: list[str] = []
    for path in layout.step_folders(folder):
        if step_limit is not None and (layout.step_of(path) or 0) > step_limit:
            continue
        try:
            verify(path)
        except UserError as error:
            passed_over.append(f"{path.name} was passed over: {error.what}")
        else:
            return path, passed_over
    return None, passed_over


def resolve(reference: Path, which: Literal["best", "last"]) -> Path:
    """Finds the checkpoint that a user means.

    Args:
        reference: a run folder, a checkpoints folder, a checkpoint folder, or a .pth, .pth.tar, .pt or .safetensors
            file (for `foreign.read_foreign`).
        which: "best" is the best that the newest one knows of; the newest itself where none was evaluated.

    Raises:
        UserError: there is none, or it doesn't verify.
    """
    if reference.is_file():
        if not reference.name.endswith(FOREIGN_SUFFIXES):
            raise UserError(f"{reference} is not a checkpoint", mend=(f"known files: {', '.join(FOREIGN_SUFFIXES)}",))
        return reference
    if not reference.is_dir():
        raise UserError(f"there is no {reference}", mend=("name a run folder, a checkpoint folder or a file",))
    if (reference / layout.MANIFEST).exists() or layout.step_of(reference) is not None:
        verify(reference)
        return reference
    folder = reference / "checkpoints" if (reference / "checkpoints").is_dir() else reference
    last, passed_over = newest(folder)
    if last is None:
        raise UserError(f"{reference} holds no checkpoint that can be read", str(folder), tuple(passed_over))
    step = (read_state(last).get("best") or {}).get("step") if which == "best" else None
    if step is None:
        return last
    best = folder / layout.step_name(step)
    verify(best)
    return best


def read_state(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint folder: step, epoch, best and so on; read without its tensors.

    Raises:
        TornCheckpointError: it is missing or damaged.
    """
    try:
        return read_plain(path / layout.STATE)
    except (OSError, ValueError) as error:
        raise torn(path, f"holds what can't be read: {error}") from error


def _read_optimizer(path: Path) -> dict[str, Any] | None:
    if not (path / layout.OPTIMIZER_PLAN).exists():
        return None
    plan = read_plain(path / layout.OPTIMIZER_PLAN)
    return unflatten(plan, read_tensors(path / layout.OPTIMIZER))

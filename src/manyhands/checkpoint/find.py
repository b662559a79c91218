"""Finds the checkpoint that is meant, and reads its plain data; without torch. A torn or altered one is refused."""

from pathlib import Path
from typing import Any, Literal

from manyhands.checkpoint import layout
from manyhands.checkpoint.plain_files import read_plain
from manyhands.checkpoint.verify import torn, verify
from manyhands.core.errors import UserError

FOREIGN_SUFFIXES = (".pth.tar", ".pth", ".pt", ".tar", ".ckpt", ".safetensors")
_TRUST = "only if you trust the folder, whose code this runs; then name weights.pth"


def newest(folder: Path, step_limit: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint up to the limit that verifies, and a sentence for each newer one that doesn't."""
    passed_over: list[str] = []
    for path in layout.step_folders(folder):
        if step_limit is not None and (layout.step_of(path) or 0) > step_limit:
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
        if reference.name in layout.CONTENTS and (reference.parent / layout.MANIFEST).is_file():
            verify(reference.parent)  # a file of a checkpoint of ours
        return reference, []
    if not reference.is_dir():
        raise UserError(f"there is no {reference}", hints=("name a run folder, a checkpoint folder or a file",))
    if (reference / layout.MANIFEST).exists() or layout.step_of(reference) is not None:
        verify(reference)
        return reference, []
    folder = reference / "checkpoints" if (reference / "checkpoints").is_dir() else reference
    last, passed_over = newest(folder)
    if last is None:
        raise _no_checkpoint(reference, folder, passed_over)
    if which == "last":
        return last, _taken(last, passed_over)
    step = (read_state(last).get("best") or {}).get("step")
    best = last if step is None else folder / layout.step_name(step)
    if best != last:
        try:
            verify(best)
        except UserError as error:
            passed_over.append(f"{best.name}, the best, was skipped: {error.message}")
            best = _best_of_the_sound(folder, last)
    return best, _taken(best, passed_over)


def _no_checkpoint(reference: Path, folder: Path, passed_over: list[str]) -> UserError:
    if not any(folder.glob("*.distcp")):
        return UserError(f"{reference} holds no checkpoint that can be read", str(folder), tuple(passed_over))
    hints = (f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth", _TRUST)
    what = f"{reference} is a folder of torch.distributed.checkpoint, whose .metadata is a pickle"
    return UserError(what, str(folder), hints)


def _taken(path: Path, passed_over: list[str]) -> list[str]:
    return [*passed_over, f"{path.name} is used instead"] if passed_over else []


def _best_of_the_sound(folder: Path, last: Path) -> Path:
    """Of the checkpoints that verify the newest that was the best when it was made; the newest of all if none was."""
    for path in layout.step_folders(folder):
        try:
            verify(path)
            best = read_state(path).get("best") or {}
        except UserError:
            continue  # it is not among the sound ones, which is all that is asked here
        if best.get("step") == layout.step_of(path):
            return path
    return last


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's plain data, without tensors: step, epoch, best … Raises TornCheckpointError: it can't be read."""
    try:
        return read_plain(path / layout.STATE)
    except (OSError, ValueError) as error:
        raise torn(path, f"has unreadable content: {error}") from error

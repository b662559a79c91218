"""The steps that a run has saved, and the error of a run that was stopped without a save."""

from pathlib import Path
from typing import Any, cast

from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_SAVED, ManyhandsError
from manyhands.core.files import parse_json, read_bytes
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder, resume_command


def saved_steps(folder: RunFolder) -> list[int]:
    """Returns the steps of the checkpoints in a folder."""
    names = [path.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*")]
    return [int(name) for name in names if name.isdecimal()]


def saved_step(folder: RunFolder) -> int | None:
    """Returns the newest step that was saved, here or on the machine of rank 0; None if none was."""
    recorded = [line.get("step") for line in read_lines(folder.events) if line.get("kind") == "saved"]
    steps = saved_steps(folder) or [step for step in recorded if isinstance(step, int)]
    return max(steps, default=None)


def kept_step(folder: RunFolder) -> int | None:
    """Returns the newest step whose checkpoint still exists; None if all were removed."""
    return saved_step(folder) if saved_steps(folder) or _saves_elsewhere(folder) else None


def _saves_elsewhere(folder: RunFolder) -> bool:
    """Returns True if the checkpoints are on the disk of another machine, that of rank 0."""
    try:
        places = cast(list[dict[str, Any]], parse_json(read_bytes(folder.machines)))
        return not places[0]["local"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def unsaved(run: Path, step: int | None, why: str = "", *, idle: bool = False) -> ManyhandsError:
    """Makes the error of a run that the user stopped without a save.

    Args:
        run: its folder.
        step: the last step that was saved; None if none was.
        why: the reason that it could not be saved; empty if the user asked twice.
        idle: no process was training, so that there was nothing to save.
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

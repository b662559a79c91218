"""What a run has saved, and how the user resumes it: `manyhands resume`, or the user's own program."""

import shlex
from pathlib import Path
from typing import Any, cast

from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_SAVED, ManyhandsError
from manyhands.core.files import parse_json, parse_toml, read_bytes
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder

# The name of data that the user's program passes as objects.
OBJECTS = "objects"
_COMMAND, _PROGRAM = "manyhands resume", "the same program with out="


def in_python(path: Path) -> tuple[str, ...]:
    """Returns which parts of a run were objects of the user's program: "data", "network", both or none."""
    folder = RunFolder(path)
    data, network = _table(folder.job).get("data"), _table(folder.network)
    of_data = isinstance(data, dict) and cast(dict[str, Any], data).get("name") == OBJECTS
    passed = {"data": of_data, "network": network.get("made_in_python") is True}
    return tuple(what for what, is_object in passed.items() if is_object)


def resume_command(path: Path, flags: str = "", settings: str = "") -> str:
    """Returns what resumes a run; `flags` are for the command, `settings` mean the same in Python."""
    if in_python(path):
        return f"{_PROGRAM}{str(path)!r}{settings and ', '}{settings}"
    return f"{_COMMAND} {shlex.quote(str(path))}{flags and ' '}{flags}"


def names_resume(line: str) -> bool:
    """Returns True for a line that contains a `resume_command`."""
    return _COMMAND in line or _PROGRAM in line


def _table(file: Path) -> dict[str, Any]:
    """Reads a JSON or TOML file; empty if it can't be read."""
    try:
        content = read_bytes(file)
        found = parse_toml(content) if file.suffix == ".toml" else parse_json(content)
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


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

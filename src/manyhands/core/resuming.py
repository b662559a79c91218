"""How the user resumes a run: with `manyhands resume`, or with the user's own program."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from manyhands.core.files import parse_toml, read_bytes, read_object
from manyhands.core.run_folder import RunFolder

# The name of data that the user's program passes as objects.
OBJECTS = "objects"
_COMMAND, _PROGRAM = "manyhands resume", "the same program with out="


def in_python(path: Path) -> tuple[str, ...]:
    """Returns which parts of a run were objects of the user's program: "data", "network", both or none."""
    folder, data = RunFolder(path), None
    with suppress(OSError, ValueError):
        data = parse_toml(read_bytes(folder.job)).get("data")
    of_data = isinstance(data, dict) and cast(dict[str, Any], data).get("name") == OBJECTS
    passed = {"data": of_data, "network": (read_object(folder.network) or {}).get("made_in_python") is True}
    return tuple(what for what, is_object in passed.items() if is_object)


def resume_command(path: Path, flags: str = "", settings: str = "") -> str:
    """Returns what resumes a run; `flags` are for the command, `settings` mean the same in Python."""
    if in_python(path):
        return f"{_PROGRAM}{str(path)!r}{settings and ', '}{settings}"
    return f"{_COMMAND} {shlex.quote(str(path))}{flags and ' '}{flags}"


def names_resume(line: str) -> bool:
    """Returns True for a line that contains a `resume_command`."""
    return _COMMAND in line or _PROGRAM in line

"""How one goes on with a run: by `manyhands resume`, unless only the user's own program has what it is made of."""

import shlex
from pathlib import Path
from typing import Any, cast

from manyhands.core.folder import RunFolder
from manyhands.core.outside import parse_json, parse_toml, read_bytes

# The name of data that a program of the user's brings as objects.
OBJECTS = "objects"
_COMMAND, _PROGRAM = "manyhands resume", "the same program with out="


def in_python(path: Path) -> tuple[str, ...]:
    """What of the run in a folder was an object of the user's program: "data", "network", both or nothing."""
    folder = RunFolder(path)
    data, network = _table(folder.job).get("data"), _table(folder.network)
    of_data = isinstance(data, dict) and cast(dict[str, Any], data).get("name") == OBJECTS
    brought = {"data": of_data, "network": network.get("made_in_python") is True}
    return tuple(what for what, is_object in brought.items() if is_object)


def resume_command(path: Path, flags: str = "", settings: str = "") -> str:
    """What goes on with the run in a folder; `flags` are for the command, `settings` mean the same in Python."""
    if in_python(path):
        return f"{_PROGRAM}{str(path)!r}{settings and ', '}{settings}"
    return f"{_COMMAND} {shlex.quote(str(path))}{flags and ' '}{flags}"


def names_resume(line: str) -> bool:
    """True of a line that says already what goes on with a run."""
    return _COMMAND in line or _PROGRAM in line


def _table(file: Path) -> dict[str, Any]:
    """Of JSON or TOML; nothing where it can't be read."""
    try:
        content = read_bytes(file)
        found = parse_toml(content) if file.suffix == ".toml" else parse_json(content)
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}

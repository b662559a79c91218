"""What git knows of a folder, asked so that nothing runs that the folder's own configuration names.

A work tree's .git/config may name programs: for its file system's changes, for filters, for fetching what is missing.
Whoever wrote the folder wrote that too, and we only look at it.
"""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 10.0
# For questions that the work tree's own configuration has to be read for: no program of it is run.
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")


def revision(folder: Path) -> str:
    """The short name of the commit that a folder is at; empty without git."""
    with suppress(OSError, subprocess.SubprocessError):
        return os.fsdecode(_ask(folder, "rev-parse", "--short", "HEAD")).strip()
    return ""


def listed_files(folder: Path) -> list[Path] | None:
    """What git tracks of a folder or would add; None where it is no work tree's, or git can't say."""
    if not (folder / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        listed = _ask(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        return [folder / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return None


def _ask(folder: Path, *words: str) -> bytes:
    command = ["git", "-C", str(folder), *_QUIET, *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    return subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S, env=environment).stdout

"""Which files of a folder are a job's code: small texts, and nothing that is hidden, an environment or a run.

Nor is it what lies elsewhere, where a link leads out of the folder, or what holds passwords or keys.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from manyhands.core.credentials import holds_credentials, named_like_credentials
from manyhands.core.folder import holds_run

SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml", ".json", ".cfg", ".ini"})
LEFT_OUT = frozenset({"runs", "node_modules", "__pycache__", "site-packages"})
CREDENTIALS = "may hold passwords or keys"
ELSEWHERE = "leads out of the folder"
# A larger file is data.
FILE_BYTES = 1 << 20


class TooManyFoldersError(ValueError):
    """The folder has more folders than were to be looked at."""


def code_files(
    folder: Path,
    suffixes: frozenset[str] = SUFFIXES,
    *,
    most_folders: int | None = None,
    leave: Callable[[Path, str], object] = lambda _path, _why: None,
) -> Iterator[Path]:
    """The code below a folder, in a fixed order; folders that links lead to aren't entered.

    Args:
        folder: where to look.
        suffixes: of files that are code.
        most_folders: to look at; None for all.
        leave: told of each file that is left behind, and why: CREDENTIALS or ELSEWHERE.

    Raises:
        TooManyFoldersError: there are more than `most_folders`; what was found before has been given.
    """
    top = folder.resolve()
    for count, (place, folders, names) in enumerate(os.walk(folder)):
        if most_folders is not None and count > most_folders:
            raise TooManyFoldersError
        here = Path(place)
        folders[:] = sorted(name for name in folders if not _left_out(here / name))
        for name in sorted(names):
            path = here / name
            if why := _reason_to_leave(path, top):
                leave(path, why)
            elif _is_code(path, suffixes):
                if holds_credentials(path):
                    leave(path, CREDENTIALS)
                else:
                    yield path


def _is_code(path: Path, suffixes: frozenset[str]) -> bool:
    wanted = path.suffix in suffixes and not path.name.startswith(".") and path.is_file()
    return wanted and path.stat().st_size <= FILE_BYTES and os.access(path, os.R_OK)


def _reason_to_leave(path: Path, top: Path) -> str:
    """Why a file isn't code whatever is in it, from its name and from where it really lies; empty where it may be."""
    if named_like_credentials(path.name):
        return CREDENTIALS
    if not path.is_symlink():
        return ""
    real = path.resolve()
    if not real.is_relative_to(top):
        return ELSEWHERE
    inside = real.relative_to(top)
    return CREDENTIALS if inside.name.startswith(".") or named_like_credentials(inside.name) else ""


def _left_out(folder: Path) -> bool:
    hidden = folder.name in LEFT_OUT or folder.name.startswith(".")
    return hidden or (folder / "pyvenv.cfg").exists() or holds_run(folder)

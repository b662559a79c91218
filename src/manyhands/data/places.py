"""Where data lies on this machine."""

import os
import stat
from pathlib import Path

from platformdirs import user_cache_dir

from manyhands.core.errors import UserError
from manyhands.data.options import DataOptions


def cache_folder() -> Path:
    """MANYHANDS_CACHE, or the user's cache folder as this system has it; not made here."""
    named = os.environ.get("MANYHANDS_CACHE", "")
    return Path(named).expanduser() if named else Path(user_cache_dir("manyhands"))


def data_folder(options: DataOptions) -> Path:
    """Where named data sets lie: the option, MANYHANDS_DATA, or below the cache; not made here."""
    named = options.dir or os.environ.get("MANYHANDS_DATA", "")
    return Path(named).expanduser() if named else cache_folder() / "data"


def own_folder(name: str) -> Path:
    """Where what is run lies: people may share a cache, and nobody runs what another could have put there.

    Raises UserError: others can write to it.
    """
    folder = Path()
    for base in (cache_folder(), Path(user_cache_dir("manyhands"))):
        folder = base / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours_alone(folder) and not any(others_move(place.stat()) for place in folder.resolve().parents):
            return folder
    raise UserError(
        "other users can write to the folder that manyhands loads code from",
        str(folder),
        ("set MANYHANDS_CACHE to a private folder",),
    )


def others_move(folder: os.stat_result) -> bool:
    """True where another than root may put something else in the place of what a folder holds."""
    mode, user = folder.st_mode, os.getuid()
    # Many systems give each user a group of his own, which has his number.
    writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and folder.st_gid not in {0, user})
    # Where a sticky bit is, as in /tmp, nobody but its owner moves what is another's.
    return folder.st_uid not in {0, user} or bool(writable and not mode & stat.S_ISVTX)


def is_ours_alone(path: Path) -> bool:
    """True for a file or folder, no link, that is this user's own and that nobody else can write to."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISLNK(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022

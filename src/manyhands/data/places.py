"""Folders for data and caches on this machine."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_dir

from manyhands.core.errors import UserError
from manyhands.data.options import DataOptions


def cache_folder() -> Path:
    """Returns MANYHANDS_CACHE or the user's cache folder, without creating it."""
    named = os.environ.get("MANYHANDS_CACHE", "")
    return Path(named).expanduser() if named else Path(user_cache_dir("manyhands"))


def data_folder(options: DataOptions) -> Path:
    """Returns the folder of named data sets: the option, MANYHANDS_DATA, or in the cache. Doesn't create it."""
    named = options.dir or os.environ.get("MANYHANDS_DATA", "")
    return Path(named).expanduser() if named else cache_folder() / "data"


def own_folder(name: str) -> Path:
    """Creates a cache folder for executable code. Raises UserError: other users can write to the folder."""
    folder = Path()
    for base in (cache_folder(), Path(user_cache_dir("manyhands"))):
        folder = base / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours_alone(folder) and not any(others_move(place.stat()) for place in folder.resolve().parents):
            return folder
    what = "other users can write to the folder that manyhands loads code from"
    raise UserError(what, str(folder), ("set MANYHANDS_CACHE to a private folder",))


def others_move(folder: os.stat_result) -> bool:
    """True if a user other than root may replace the content of a folder."""
    mode, user = folder.st_mode, os.getuid()
    # Many systems give each user a group with the same ID as the user.
    writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and folder.st_gid not in {0, user})
    # With the sticky bit, as on /tmp, only owners can move their files.
    return folder.st_uid not in {0, user} or bool(writable and not mode & stat.S_ISVTX)


def is_ours_alone(path: Path) -> bool:
    """True for a file or folder (no symbolic link) that this user owns and no other user can write to."""
    with suppress(FileNotFoundError):
        state = path.lstat()
        return not stat.S_ISLNK(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022
    return False

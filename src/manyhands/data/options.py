"""The [data] section of a job, and the folders for data and caches on this machine. Imports no torch."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_dir

from manyhands.core.errors import UserError
from manyhands.core.options import Options, option


class DataOptions(Options):
    """Options of the data set and its preprocessing."""

    name: str = option(
        "digits", "name of a data set, folder of pictures, or file.py:function that returns your own data"
    )
    dir: str = option("", "folder for named data sets; empty: the user's cache folder")
    download: bool = option(True, "download a named data set if it is missing")
    image_size: int = option(0, "picture size in pixels; 0: the default of the data set or model", ge=0, le=4096)
    channels: Literal[0, 1, 3] = option(0, "number of channels of a picture; 0: the default of the data set or model")
    mean: tuple[float, ...] = option(
        (), "mean of each channel, for pixel values in [0, 1]; empty: the default of the data set"
    )
    std: tuple[float, ...] = option(
        (), "standard deviation of each channel, for pixel values in [0, 1]; empty: the default of the data set"
    )
    augment: Literal["auto", "none", "crop", "crop-flip", "resized-crop-flip"] = option(
        "auto",
        "augmentation of training pictures; crop: random shift; crop-flip: random shift and mirroring; "
        "resized-crop-flip: random resized crop and mirroring, as for ImageNet; auto: the default of the data set",
    )
    shift: int = option(0, "largest shift by crop or crop-flip, in pixels; 0: an eighth of the picture size", ge=0)
    shift_fill: Literal["black", "reflect"] = option(
        "black", "fill of the pixels that a shift exposes; black: zeros; reflect: the mirrored edge of the picture"
    )
    mirror: Literal["random", "alternate"] = option(
        "random", "when to mirror a training picture; random: with probability 0.5; alternate: in every second epoch"
    )
    validation: float = option(
        0.1,
        "fraction of the training samples to hold out for evaluation if the data has no evaluation set (for example, "
        "a folder with neither val/ nor test/)",
        gt=0.0,
        lt=1.0,
    )
    held_out: str = option(
        "",
        "data set for a final test at the end, never used to select a checkpoint: a folder of class folders, the name "
        "of a data set or file.py:function; empty: the test/ folder of the data set, if there is also a val/ folder",
    )
    skip_corrupt: bool = option(
        False,
        "skip pictures that are unreadable at startup, and replace training (not evaluation) pictures that become "
        "unreadable later; the run ends if over 10 pictures and over 0.1 % of all pictures are unreadable",
    )
    packed: bool = option(True, "read the packed copy of a folder (FOLDER.pack) if it is up to date")
    workers: int = option(-1, "decoding processes per rank; -1: derived from the number of CPU cores", ge=-1, le=256)
    machine_workers: int = option(
        0, "decoding processes per machine, divided among its ranks; 0: data.workers for each rank", ge=0, le=1024
    )
    memory_limit_mib: int = option(
        2048, "keep small square pictures (up to 64 pixels) decoded in memory if they need at most this many MiB", ge=0
    )
    train_samples: int = option(0, "number of training samples to use, the same random choice each time; 0: all", ge=0)
    test_samples: int = option(0, "number of evaluation samples to use, the same random choice each time; 0: all", ge=0)


def cache_folder() -> Path:
    """Returns the path in MANYHANDS_CACHE, or of the user's cache folder. Doesn't create the folder."""
    named = os.environ.get("MANYHANDS_CACHE", "")
    return Path(named).expanduser() if named else Path(user_cache_dir("manyhands"))


def data_folder(options: DataOptions) -> Path:
    """Returns the path for named data sets: options.dir, MANYHANDS_DATA, or data/ in the cache folder."""
    named = options.dir or os.environ.get("MANYHANDS_DATA", "")
    return Path(named).expanduser() if named else cache_folder() / "data"


def private_folder(name: str) -> Path:
    """Creates a private cache folder for executable code. Raises UserError if other users can write to it."""
    folder = Path()
    for base in (cache_folder(), Path(user_cache_dir("manyhands"))):
        folder = base / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder) and not any(others_can_write(place.stat()) for place in folder.resolve().parents):
            return folder
    what = "other users can write to the folder that manyhands loads code from"
    raise UserError(what, str(folder), ("set MANYHANDS_CACHE to a private folder",))


def others_can_write(folder: os.stat_result) -> bool:
    """Returns True if a user other than root and the current user may replace the content of a folder."""
    mode, user = folder.st_mode, os.getuid()
    # Many systems give each user a group with the same ID as the user.
    writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and folder.st_gid not in {0, user})
    # With the sticky bit, as on /tmp, only owners can move their files.
    return folder.st_uid not in {0, user} or bool(writable and not mode & stat.S_ISVTX)


def is_private(path: Path) -> bool:
    """Returns True for a file or folder (not a symbolic link) that the current user owns and no other can write to."""
    with suppress(FileNotFoundError):
        state = path.lstat()
        return not stat.S_ISLNK(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022
    return False

"""Creation of the run folder of a new run, and its removal if the run doesn't start."""

import contextlib
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder, writing_into


def free_run_folder(base: Path, data: str, model: str, now: datetime) -> Path:
    """Returns the first of runs/<date>-<data>-<model>, …-2, …-3 that doesn't exist yet."""
    plain = [word.removeprefix("torchvision:").split(":")[0] for word in (data, model)]
    words = [re.sub(r"[^\w.-]+", "-", Path(word).stem).strip("-") or "run" for word in plain]
    stem = f"{now:%Y-%m-%d}-{words[0]}-{words[1]}"
    for number in range(1, 10_000):
        path = base / (stem if number == 1 else f"{stem}-{number}")
        if not os.path.lexists(path):
            return path
    raise UserError(f"{base} has 10,000 runs of this name for today", str(base), ("choose a run folder: --out DIR",))


def new_run_folder(base: Path, data: str, model: str, now: datetime) -> RunFolder:
    """Creates the folder that `free_run_folder` names."""
    while True:
        path = free_run_folder(base, data, model, now)
        with writing_into(path), contextlib.suppress(FileExistsError):  # another run has just created it
            path.mkdir(parents=True)
            return RunFolder(path)


def topmost_missing(path: Path) -> Path | None:
    """Returns the missing folder closest to the root among `path` and its parents; None if `path` exists."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    return missing[-1] if missing else None


def remove_new(folder: Path, topmost: Path) -> None:
    """Removes a new folder, and the empty ones above it up to `topmost`."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for place in folder.parents:
            if place == topmost.parent:
                break
            place.rmdir()

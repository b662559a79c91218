"""Opens a run folder and replaces its job file."""

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.files import MOST_TOML_BYTES, decoded, free_name, parse_toml, read_bytes, temporary
from manyhands.core.run_folder import RunFolder


def holds_run(path: Path) -> bool:
    """Returns True for a folder of an active or ended run."""
    return (path / "job.toml").is_file() and (path / "ranks").is_dir()


def use_run_folder(path: Path) -> RunFolder:
    """Opens or creates a run folder named by the user. Raises UserError: not writable, or it has files but no run."""
    with writing_into(path):
        path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    if not folder.exists() and any(entry.name != "ranks" for entry in path.iterdir()):
        hints = ("choose a new folder or the folder of an earlier run",)
        raise UserError(f"{path} is not empty and contains no run", "--out", hints)
    with writing_into(path):
        if not os.access(path, os.W_OK):
            raise PermissionError("no permission to write")
    return folder


@contextlib.contextmanager
def writing_into(path: Path) -> Generator[None]:
    """Converts an OSError of the block to a UserError with the reason why the run folder can't be written."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            hints = ("free space on this disk, or choose a folder on another disk: --out DIR",)
            raise UserError(f"the run folder {path} can't be written: {error.strerror}", str(path), hints) from error
        what = f"the run folder {path} can't be created: {error.strerror or error}"
        if path.is_file():
            what = f"{path} is a file, not a folder"
        raise UserError(what, "--out", ("choose another folder: --out DIR",)) from error


def write_job(folder: RunFolder, text: str) -> None:
    """Calls `replace_job`. Raises UserError: the file can't be written."""
    with writing_into(folder.path):
        replace_job(folder, text)


def replace_job(folder: RunFolder, text: str) -> None:
    """Writes the job file; keeps the file of an earlier trained job as job-1.toml … unless only comments differ."""
    with temporary(folder.job) as part:
        part.write_text(text, encoding="utf-8")
        if folder.has_trained() and folder.job.is_file():
            same = False
            with contextlib.suppress(ValueError):
                same = parse_toml(decoded(read_bytes(folder.job, MOST_TOML_BYTES))) == parse_toml(text)
            if not same:
                folder.job.rename(free_name(folder.path, "job", ".toml"))
        part.replace(folder.job)

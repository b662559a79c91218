"""The user's code for other machines: the small text files of a folder, and nothing that is data or a result."""

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.folder import holds_run

SUFFIXES = {".py", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ".ini", ".md"}
LEFT_OUT = {"runs", "node_modules", "__pycache__", "site-packages"}
# A larger file is data.
FILE_BYTES = 1 << 20
TOTAL_BYTES = 16 << 20


def code_files(folder: Path) -> dict[str, str]:
    """The folder's code by relative path, in base64.

    What git ignores is left out where the folder is a git work tree; hidden folders, environments and runs always.

    Raises:
        UserError: there is more than a head should carry.
    """
    found: dict[str, str] = {}
    total = 0
    for path in sorted(_candidates(folder)):
        size = path.stat().st_size
        if size > FILE_BYTES:
            continue
        total += size
        if total > TOTAL_BYTES:
            raise UserError(
                f"{folder} has more than {TOTAL_BYTES >> 20} MiB of code",
                "--sync-code",
                ("start in the folder that holds the code alone", "or copy it yourself: rsync -a . n2:job/"),
            )
        found[path.relative_to(folder).as_posix()] = base64.b64encode(path.read_bytes()).decode()
    return found


def _candidates(folder: Path) -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=False,
    ) if (folder / ".git").exists() else None  # fmt: skip
    if listed and listed.returncode == 0:
        paths = (folder / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name)
    else:
        paths = _walked(folder)
    for path in paths:
        inside = path.relative_to(folder)
        left_out = LEFT_OUT & set(inside.parts) or any(part.startswith(".") for part in inside.parts)
        if any(holds_run(folder / parent) for parent in list(inside.parents)[:-1]):
            continue
        if path.suffix in SUFFIXES and path.is_file() and not left_out:
            yield path


def _walked(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = [
            name for name in folders
            if name not in LEFT_OUT and not name.startswith(".") and not (here / name / "pyvenv.cfg").exists()
            and not holds_run(here / name)
        ]  # fmt: skip
        yield from (here / name for name in files if not name.startswith("."))


def with_absolute_paths(job: Job) -> Job:
    """The job with the data's relative paths as seen from here: the workers will stand in another folder."""
    name, folder = job.data.name, job.data.dir
    changed = {
        "name": str(Path(name).absolute()) if Path(name).is_dir() else name,
        "dir": str(Path(folder).expanduser().absolute()) if folder else folder,
    }
    resume = job.checkpoint.resume
    checkpoint = {"resume": str(Path(resume).absolute()) if Path(resume).exists() else resume}
    return job.model_copy(
        update={
            "data": job.data.model_copy(update=changed),
            "checkpoint": job.checkpoint.model_copy(update=checkpoint),
        }
    )

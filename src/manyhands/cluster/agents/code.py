"""The user's code for other machines: the small text files of a folder, and nothing that is data or a result."""

import base64
import binascii
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from manyhands.cluster.code_files import SUFFIXES as CODE_SUFFIXES
from manyhands.cluster.code_files import code_files as files_of
from manyhands.cluster.code_files import listed_files
from manyhands.config.job import Job
from manyhands.core.errors import UserError

SUFFIXES = CODE_SUFFIXES | {".txt", ".md"}
TOTAL_BYTES = 16 << 20
# An agent takes no more than this.
CODE_BYTES = 32 << 20
# Names in one line.
SHOWN = 6


def code_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The folder's code by relative path, in base64, and what the user should know of what was left behind.

    What git ignores is left out where the folder is a git work tree; hidden folders, environments and runs always, and
    what may hold passwords or keys, or leads out of the folder.

    Raises:
        UserError: there is more than a head should carry.
    """
    found: dict[str, str] = {}
    left: dict[str, list[str]] = {}
    total = 0

    def leave(path: Path, why: str) -> None:
        left.setdefault(why, []).append(path.relative_to(folder).as_posix())

    for path in sorted(_candidates(folder, leave)):
        total += path.stat().st_size
        if total > TOTAL_BYTES:
            raise UserError(
                f"{folder} has more than {TOTAL_BYTES >> 20} MiB of code",
                "--sync-code",
                ("start in a folder with nothing but code", "or copy the code yourself: rsync -a . n2:job/"),
            )
        found[path.relative_to(folder).as_posix()] = base64.b64encode(path.read_bytes()).decode()
    return found, [_left_behind(names, why) for why, names in left.items()]


def _left_behind(names: list[str], why: str) -> str:
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"--sync-code skips files that {why}: {shown}; copy files that the job needs yourself"


def _candidates(folder: Path, leave: Callable[[Path, str], object]) -> Iterator[Path]:
    every, listed = files_of(folder, SUFFIXES, leave=leave), listed_files(folder)
    if listed is None:
        return every
    kept = set(listed)
    return (path for path in every if path in kept)


def with_absolute_paths(job: Job) -> Job:
    """The job with the data's relative paths as seen from here: the workers will stand in another folder."""
    name, held_out, folder = job.data.name, job.data.held_out, job.data.dir
    changed = {
        "name": str(Path(name).absolute()) if Path(name).is_dir() else name,
        "held_out": str(Path(held_out).absolute()) if held_out and Path(held_out).is_dir() else held_out,
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


def write_code(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes what isn't there as it should be; a job that ran there before may have changed it."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder.parent):
        place.chmod(0o700)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(content)
            temporary.replace(path)
    os.utime(folder)


def checked_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a head's code by their path, which must stay inside the folder.

    Raises:
        UserError: one doesn't, or isn't whole, or there is too much.
    """
    found: dict[str, bytes] = {}
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise UserError(f"the path {name!r} leads out of the folder")
        try:
            found[name] = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise UserError(f"{name} is incomplete after the transfer") from None
    if sum(map(len, found.values())) > CODE_BYTES:
        raise UserError(f"the code exceeds the limit of {CODE_BYTES >> 20} MiB")
    return found

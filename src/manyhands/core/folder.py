"""The run folder: where everything about one run is kept, and the only meeting place of its programs."""

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TOML_BYTES, decoded, parse_toml, read_bytes

_FULL_BYTES = 64 << 10
# A folder that was moved has a link in its old place by then; see `run.folder`.
_LINKED_S, _POLL_S = 5.0, 0.05


class _Path:
    """A file or folder in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", _owner: type["RunFolder"]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Names the files of a run; making one touches nothing."""

    path: Path  # the folder
    job = _Path("job.toml")  # the job with all defaults
    plan = _Path("plan.json")  # how the work is split
    network = _Path("network.json")  # the description of the trained network; see `core.trained`
    environment = _Path("env.json")  # versions, devices, hosts and the revision of the user's code
    metrics = _Path("metrics.jsonl")  # one line per logged step and per evaluation
    events = _Path("events.jsonl")  # one line per join, loss, save and decision
    ranks = _Path("ranks")  # the output of each process: 0.log, 1.log …
    failures = _Path("ranks/failures")  # a record of each process that failed: 0.json …
    machines = _Path("machines.json")  # the ranks and log folders of each machine, in runs on several machines
    checkpoints = _Path("checkpoints")  # one folder per checkpoint
    evaluations = _Path("evaluations")  # best.json and last.json: counts per class and the confusion matrix
    report = _Path("report.html")  # the report for the user
    trace = _Path("trace.json")  # a Chrome trace of a few updates, if requested
    pictures = _Path("pictures")  # the figures of the report as PNG

    def exists(self) -> bool:
        """True when the folder holds a run (its job file is written first)."""
        return self.job.is_file()

    def wait_for_link(self) -> None:
        """Waits up to 5 s for the head to link a moved run folder from its old path."""
        until = time.monotonic() + _LINKED_S
        while not self.exists() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def has_trained(self) -> bool:
        """True when at least one update was recorded, or an evaluation."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def has_checkpoints(self) -> bool:
        """True when something was saved, whole or not."""
        return any(self.checkpoints.glob("step-*"))


# Of what is kept nowhere, or not yet known where.
NOWHERE = RunFolder(Path(os.devnull))


def holds_run(path: Path) -> bool:
    """True for a folder that a run is or was kept in."""
    return (path / "job.toml").is_file() and (path / "ranks").is_dir()


def free_run_folder(base: Path, data: str, model: str, now: datetime) -> Path:
    """The first of runs/<date>-<data>-<model>, …-2, …-3 that doesn't exist yet."""
    plain = [word.removeprefix("torchvision:").split(":")[0] for word in (data, model)]
    words = [re.sub(r"[^\w.-]+", "-", Path(word).stem).strip("-") or "run" for word in plain]
    stem = f"{now:%Y-%m-%d}-{words[0]}-{words[1]}"
    for number in range(1, 10_000):
        path = base / (stem if number == 1 else f"{stem}-{number}")
        if not os.path.lexists(path):
            return path
    raise UserError(f"{base} has 10,000 runs of this name for today", str(base), ("choose a run folder: --out DIR",))


def new_run_folder(base: Path, data: str, model: str, now: datetime) -> RunFolder:
    """Creates runs/<date>-<data>-<model>, with a number behind it where that exists already."""
    while True:
        path = free_run_folder(base, data, model, now)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # another run has just taken it
        except OSError as error:
            raise _unwritable(path, error) from error
        return RunFolder(path)


def use_run_folder(path: Path) -> RunFolder:
    """Opens the folder that the user named, making it where it is missing.

    Raises:
        UserError: it can't be written, or holds something that is not a run.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    folder = RunFolder(path)
    if not folder.exists() and any(entry.name not in {"ranks"} for entry in path.iterdir()):
        hints = ("choose a new folder or the folder of an earlier run",)
        raise UserError(f"{path} is not empty and holds no run", "--out", hints)
    if not os.access(path, os.W_OK):
        raise _unwritable(path, PermissionError("no permission to write"))
    return folder


def free_name(folder: Path, stem: str, suffix: str = "", first: int = 1) -> Path:
    """The first of <stem>-<number><suffix> in a folder that isn't taken."""
    return next(path for number in itertools.count(first) if not (path := folder / f"{stem}-{number}{suffix}").exists())


def is_full(path: Path) -> bool:
    """True where the disk of a folder has less than 64 KiB of room for this user; False where that isn't known."""
    try:
        state = os.statvfs(path)
    except OSError:
        return False
    # Some file systems keep a part for the system's own user.
    blocks = state.f_bfree if os.geteuid() == 0 else state.f_bavail
    return state.f_blocks > 0 and blocks * state.f_frsize < _FULL_BYTES


def topmost_missing(path: Path) -> Path | None:
    """The first folder, counted from the root, that is to be made for `path` to be there; None if it is."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    return missing[-1] if missing else None


def remove_new(folder: Path, topmost: Path) -> None:
    """Removes a folder that was made just now, and the empty ones above it, up to `topmost`."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for place in folder.parents:
            if place == topmost.parent:
                break
            place.rmdir()


@contextlib.contextmanager
def writing_into(path: Path) -> Generator[None]:
    """Says of a run folder on a full disk, or one that can't be written, which it is.

    Raises:
        UserError: where an OSError came up.
    """
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        hints = ("free space on this disk, or choose a folder on another disk: --out DIR",)
        return UserError(f"the run folder {path} can't be written: {error.strerror}", str(path), hints)
    if path.is_file():
        return UserError(f"{path} is a file, not a folder", "--out", ("choose another folder: --out DIR",))
    what = f"the run folder {path} can't be created: {error.strerror or error}"
    return UserError(what, "--out", ("choose another folder: --out DIR",))


def _says_the_same(path: Path, text: str) -> bool:
    """True where a job file differs in comments at most."""
    try:
        return parse_toml(decoded(read_bytes(path, MOST_TOML_BYTES))) == parse_toml(text)
    except ValueError:
        return False


def write_job(folder: RunFolder, text: str) -> None:
    """Writes the job file; see `replace_job`.

    Raises:
        UserError: there is no room for it; what was there before still is.
    """
    with writing_into(folder.path):
        replace_job(folder, text)


def replace_job(folder: RunFolder, text: str) -> None:
    """Writes the job file; an earlier one that says otherwise is kept as job-1.toml … if something was trained by it.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    path = folder.job
    temporary = path.with_name(f".job.toml.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if folder.has_trained() and path.is_file() and not _says_the_same(path, text):
            path.rename(free_name(folder.path, "job", ".toml"))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

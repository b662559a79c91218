"""The run folder: all files of one run, which its processes and commands share."""

import contextlib
import errno
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.files import MOST_TOML_BYTES, decoded, free_name, parse_toml, read_bytes, temporary

# The head links a folder that was moved from its old path within this time; see `run.folder`.
_LINKED_S, _POLL_S = 5.0, 0.05


class _Path:
    """A file or folder in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", _owner: type["RunFolder"]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files of a run. Creating the object touches no file."""

    path: Path  # the folder
    job = _Path("job.toml")  # the job with all defaults
    plan = _Path("plan.json")  # how the work is split
    network = _Path("network.json")  # the description of the trained network; see `checkpoint.trained`
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
        """Returns True if the folder holds a run, whose first file is the job."""
        return self.job.is_file()

    def wait_for_link(self) -> None:
        """Waits up to 5 s for the head to link a moved run folder from its old path."""
        until = time.monotonic() + _LINKED_S
        while not self.exists() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def has_trained(self) -> bool:
        """Returns True if an update or an evaluation was recorded."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def has_checkpoints(self) -> bool:
        """Returns True if there are checkpoints, complete or not."""
        return any(self.checkpoints.glob("step-*"))


# Stands for no run folder, or for one that isn't known yet.
NOWHERE = RunFolder(Path(os.devnull))


def holds_run(path: Path) -> bool:
    """Returns True for a folder of an active or ended run."""
    return (path / "job.toml").is_file() and (path / "ranks").is_dir()


def use_run_folder(path: Path) -> RunFolder:
    """Opens a run folder named by the user, and creates it if it is missing.

    Raises:
        UserError: the folder can't be written, or holds something that is not a run.
    """
    with writing_into(path):
        path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    if not folder.exists() and any(entry.name != "ranks" for entry in path.iterdir()):
        hints = ("choose a new folder or the folder of an earlier run",)
        raise UserError(f"{path} is not empty and holds no run", "--out", hints)
    with writing_into(path):
        if not os.access(path, os.W_OK):
            raise PermissionError("no permission to write")
    return folder


@contextlib.contextmanager
def writing_into(path: Path) -> Generator[None]:
    """Explains why a run folder can't be written.

    Raises:
        UserError: in place of an OSError.
    """
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
    """Writes the job file; see `replace_job`.

    Raises:
        UserError: the file can't be written; its earlier content is kept.
    """
    with writing_into(folder.path):
        replace_job(folder, text)


def replace_job(folder: RunFolder, text: str) -> None:
    """Writes the job file. An earlier job that was trained is kept as job-1.toml … unless it says the same.

    Raises:
        OSError: the file can't be written; its earlier content is kept.
    """
    with temporary(folder.job) as part:
        part.write_text(text, encoding="utf-8")
        if folder.has_trained() and folder.job.is_file() and not _says_the_same(folder.job, text):
            folder.job.rename(free_name(folder.path, "job", ".toml"))
        part.replace(folder.job)


def _says_the_same(path: Path, text: str) -> bool:
    """Returns True if a job file differs at most in comments."""
    try:
        return parse_toml(decoded(read_bytes(path, MOST_TOML_BYTES))) == parse_toml(text)
    except ValueError:
        return False

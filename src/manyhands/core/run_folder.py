"""The run folder, which contains all files of a run, and the command that resumes the run."""

import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from manyhands.core.files import parse_toml, read_bytes, read_object

OBJECTS = "objects"  # the value of data.name for a data set from the user's program
_COMMAND, _PROGRAM = "manyhands resume", "the same program with out="


class _Path:
    """A descriptor that returns the path of a file or folder in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", _owner: type["RunFolder"]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files of a run. Creating a RunFolder touches no file."""

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
        """Returns True if the folder contains a run, that is, its first file, job.toml."""
        return self.job.is_file()

    def wait_for_link(self) -> None:
        """Waits up to 5 s until this path exists. The launcher creates a link here if the run folder was moved."""
        until = time.monotonic() + 5.0
        while not self.exists() and time.monotonic() < until:
            time.sleep(0.05)

    def has_trained(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def has_checkpoints(self) -> bool:
        """Returns True if there are checkpoints, complete or not."""
        return any(self.checkpoints.glob("step-*"))


NOWHERE = RunFolder(Path(os.devnull))  # no run folder, or an unknown one


def parts_made_in_python(path: Path) -> tuple[str, ...]:
    """Returns those of "data" and "network" that were Python objects of the user's program."""
    folder, data = RunFolder(path), None
    with suppress(OSError, ValueError):
        data = parse_toml(read_bytes(folder.job)).get("data")
    of_data = isinstance(data, dict) and cast(dict[str, Any], data).get("name") == OBJECTS
    passed = {"data": of_data, "network": (read_object(folder.network) or {}).get("made_in_python") is True}
    return tuple(what for what, is_object in passed.items() if is_object)


def resume_command(path: Path, flags: str = "", settings: str = "") -> str:
    """Returns the command that resumes a run, with `flags`, or for a run of `fit` its arguments, with `settings`."""
    if parts_made_in_python(path):
        return f"{_PROGRAM}{str(path)!r}{settings and ', '}{settings}"
    return f"{_COMMAND} {shlex.quote(str(path))}{flags and ' '}{flags}"


def mentions_resume(line: str) -> bool:
    return _COMMAND in line or _PROGRAM in line

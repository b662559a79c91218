"""The run folder: all files of one run, which its processes and commands share."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

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

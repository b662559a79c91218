"""Loads a run to resume or evaluate, and announces the code and commands of its own job.toml that will be executed."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import read_state
from manyhands.checkpoint.trained import TrainedNetwork, find_record
from manyhands.cluster.hosts.machines import machines_of
from manyhands.config.job import ClusterOptions
from manyhands.config.load import LoadedJob, flatten, load_job
from manyhands.config.named_code import announce, refuse_other_users
from manyhands.core.errors import UserError
from manyhands.core.resuming import in_python, resume_command
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import say
from manyhands.report.read import read_run
from manyhands.run.folder import already_running
from manyhands.run.registry import find_reference, headed_here, remembered_reach

# Options whose values may be code of the user's, in this order.
_MAY_NAME_CODE = (
    "model.name", "data.name", "data.held_out", "train.loss", "train.optimizer", "train.schedule", "train.metrics",
)  # fmt: skip


def record_of(checkpoint: Path) -> TrainedNetwork | None:
    """Returns what a checkpoint, or its run, records of the network.

    Raises:
        UserError: the record is damaged.
    """
    return find_record(checkpoint, read_state(checkpoint) if checkpoint.is_dir() else {})


def load_resumed(name: str, flags: Mapping[str, Any]) -> LoadedJob:
    """Loads the job of a run that is to be resumed, with the options that the user changes.

    Raises:
        UserError: there is no such run, it is active, it can't be read, or `announce_resumed` refuses it.
    """
    folder = RunFolder(find_reference(name))
    if headed_here(folder.path):
        raise already_running(folder)
    read_run(folder.path)
    loaded = load_job({"run.out": str(folder.path), "checkpoint.resume": "auto", **flags}, file=folder.job)
    announce_resumed(folder, loaded)
    return loaded


def announce_resumed(folder: RunFolder, loaded: LoadedJob) -> None:
    """Announces the code files that a resumed run executes because its own job.toml names them.

    Raises:
        UserError: the folder or the code is another user's, or only a program of the user's has the trained objects.
    """
    keys = {"data": "data.name", "network": "model.name"}
    lost = [what for what in in_python(folder.path) if loaded.origins.get(keys[what]) == str(folder.job)]
    if lost:
        longer = 'to train longer: here.epochs(20), or fit(…, epochs=20, checkpoint__resume="auto")'
        hints = (f"to resume, run {resume_command(folder.path)}", longer)
        what = f"this run can be resumed only by the Python program that creates its {' and '.join(lost)}"
        raise UserError(what, str(folder.path), hints)
    try:
        record = find_record(folder.checkpoints / "any", {})
    except UserError:
        record = None  # it is written anew, and the announcement says what isn't known
    values = flatten(loaded.job.model_dump())
    for key in _MAY_NAME_CODE:
        if loaded.origins.get(key) == str(folder.job):
            words = [values[key]] if isinstance(values[key], str) else values[key]
            announce(words, folder.path, record, f"--set {key}={{}}")


def announce_reach(loaded: LoadedJob) -> None:
    """Announces the command that reaches the machines, if a run's job.toml names it rather than the user.

    Raises:
        UserError: the file that names the command is another user's.
    """
    standard = ClusterOptions()
    for name in ("ssh", "python"):
        wanted, file = getattr(loaded.job.cluster, name), Path(loaded.origins.get(f"cluster.{name}", ""))
        known = {getattr(standard, name), (remembered_reach(file.parent) or {}).get(name)}
        if wanted in known or not file.is_file() or not machines_of(loaded.job.cluster):
            continue
        refuse_other_users(shlex.quote(wanted), file, file, f"--set cluster.{name}={shlex.quote(wanted)}")
        if RunFolder(file.parent).ranks.is_dir():
            say(f"connecting to the machines with {shlex.quote(wanted)}, as specified in {file}")

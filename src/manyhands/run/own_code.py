"""What a run that is taken up says of its network, and what of its own job.toml it will run."""

import shlex
from pathlib import Path

from manyhands.checkpoint.folders import read_state
from manyhands.checkpoint.trained import TrainedNetwork, find_record
from manyhands.cluster.hosts.machines import machines_of
from manyhands.config.job import ClusterOptions
from manyhands.config.load import LoadedJob
from manyhands.core.errors import UserError
from manyhands.core.resuming import in_python, resume_command
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import say
from manyhands.core.user_code import announce, refuse_other_users
from manyhands.run.registry import remembered_reach


def record_of(checkpoint: Path) -> TrainedNetwork | None:
    """What a checkpoint, or the run that it lies in, says of its network.

    Raises:
        UserError: that is damaged.
    """
    return find_record(checkpoint, read_state(checkpoint) if checkpoint.is_dir() else {})


def announce_resumed(folder: RunFolder, loaded: LoadedJob) -> None:
    """Says which code files of its own job.toml a run that goes on will run.

    Raises:
        UserError: the folder or the code is another user's, or only a program of the user's has what is trained.
    """
    _refuse_objects(folder, loaded)
    try:
        record = find_record(folder.checkpoints / "any", {})
    except UserError:
        record = None  # it is written anew, and what isn't known is said
    job = loaded.job
    named = [
        ("model.name", job.model.name),
        ("data.name", job.data.name),
        ("data.held_out", job.data.held_out),
        ("train.loss", job.train.loss),
        ("train.optimizer", job.train.optimizer),
        ("train.schedule", job.train.schedule),
        *(("train.metrics", word) for word in job.train.metrics),
    ]
    for key, word in named:
        if loaded.origins.get(key) == str(folder.job):
            announce([word], folder.path, record, f"--set {key}={{}}")


def announce_reach(loaded: LoadedJob) -> None:
    """Says which command will reach the machines, where a run's job.toml names it rather than the user.

    Raises:
        UserError: the file that names the command is another user's.
    """
    standard = ClusterOptions()
    for name in ("ssh", "python"):
        wanted, file = getattr(loaded.job.cluster, name), Path(loaded.origins.get(f"cluster.{name}", ""))
        mine = remembered_reach(file.parent) or {}
        if (
            wanted in {getattr(standard, name), mine.get(name)}
            or not file.is_file()
            or not machines_of(loaded.job.cluster)
        ):
            continue
        refuse_other_users(shlex.quote(wanted), file, file, f"--set cluster.{name}={shlex.quote(wanted)}")
        if RunFolder(file.parent).ranks.is_dir():
            say(f"reaching the machines with {shlex.quote(wanted)}, as {file} specifies")


def _refuse_objects(folder: RunFolder, loaded: LoadedJob) -> None:
    keys = {"data": "data.name", "network": "model.name"}
    lost = [what for what in in_python(folder.path) if loaded.origins.get(keys[what]) == str(folder.job)]
    if lost:
        longer = 'to train longer: here.epochs(20), or fit(…, epochs=20, checkpoint__resume="auto")'
        hints = (f"to resume, run {resume_command(folder.path)}", longer)
        what = f"only the Python program that trained this run has its {' and '.join(lost)}"
        raise UserError(what, str(folder.path), hints)

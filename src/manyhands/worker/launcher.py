"""Functions that need torch and run in the launcher's process: describe data, count devices, rewrite checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.data.folder import list_folder
from manyhands.data.known import is_published
from manyhands.data.open import is_unsplit_folder, open_data
from manyhands.data.order import large_batch_note
from manyhands.data.splits import describe_samples

__all__ = ["convert_checkpoint", "default_processes", "describe_data", "describe_pickled", "is_unsplit_folder"]


def describe_data(job: Job) -> tuple[str, str]:
    """Returns a description of the data, and a message if the batch is larger than the training split.

    Both are empty if the data requires a download or user code. Raises UserError if a data folder is unusable.
    """
    root = Path(job.data.name).expanduser()
    if is_published(job.data.name):
        try:
            splits = open_data(job.data.model_copy(update={"download": False}))
        except UserError:
            return "", ""  # the data isn't on this machine yet
        samples, evaluated, classes = len(splits.train), len(splits.test), splits.classes
    elif root.is_dir():
        parts, _ = list_folder(root, job.data.model_copy(update={"packed": False}))
        samples, evaluated = (len(part) for part in parts[:2])
        samples = min(samples, job.data.train_samples or samples)
        evaluated, classes = min(evaluated, job.data.test_samples or evaluated), parts[0].classes
    else:
        return "", ""
    return describe_samples(samples, evaluated, classes), large_batch_note(job.train.batch, samples)


def default_processes(job: Job) -> int:
    """Returns the number of processes to start on this machine by default."""
    from manyhands.cluster.agents.elastic import detect_devices  # imports torch's elastic agent

    return detect_devices(job.cluster.device, 1)[1]


def describe_pickled(path: Path) -> dict[str, Any]:
    from manyhands.checkpoint.read import open_checkpoint

    return open_checkpoint(path).as_plain()


def convert_checkpoint(use_source: Callable[[Any], Any], target: Path, plan: Path | None) -> tuple[str, ...]:
    """Writes a copy of a checkpoint, sharded by `plan` or unsharded. `use_source` calls its argument with a path.

    Returns messages about omitted data.
    """
    from manyhands.checkpoint import reshard
    from manyhands.checkpoint.read import open_checkpoint
    from manyhands.checkpoint.snapshot import EXTRA_STATE

    reshard.refuse_existing(target)
    layout = reshard.read_network_layout(plan) if plan else None

    def convert(path: Path) -> tuple[str, ...]:
        source = open_checkpoint(path, verified=path.is_dir(), wanted=layout.layouts if layout else ())
        if layout:
            reshard.reshard(source, target, layout)
            return source.notes
        reshard.merge(source, target)
        notes = list(source.notes)
        if source.optimizer is not None and reshard.is_single_file(target):
            notes.append("the optimizer state is omitted: the file holds only weights")
        if EXTRA_STATE in source.state and target.name.endswith(reshard.SAFETENSORS):
            why = ".safetensors files hold only tensors (do: choose a .pth file)"
            notes.append(f"the modules' extra state is omitted: {why}")
        return tuple(notes)

    return use_source(convert)

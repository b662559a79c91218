"""Checks of a job's data and processes before a start that need torch."""

from pathlib import Path

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.data.folder import list_folder
from manyhands.data.known import is_published
from manyhands.data.open import is_plain_folder, open_data
from manyhands.data.order import batch_noted
from manyhands.data.splits import describe_samples

__all__ = ["describe_data", "is_plain_folder", "processes_here"]


def describe_data(job: Job) -> tuple[str, str]:
    """Returns a description of the data, and a warning if the batch is larger than the training split.

    Both are empty if they require a download or user code. Raises UserError if the folder can't be trained on.
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
    return describe_samples(samples, evaluated, classes), batch_noted(job.train.batch, samples)


def processes_here(job: Job) -> int:
    """Returns the number of processes to start on this machine by default."""
    from manyhands.cluster.agents.elastic import devices_here  # imports torch's elastic agent

    return devices_here(job.cluster.device, 1)[1]

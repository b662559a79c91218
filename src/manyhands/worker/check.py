"""What can be checked of a job before anything is started or read, where torch is needed to know the names."""

import contextlib
from pathlib import Path

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.plugins import module_names, unknown_choice
from manyhands.data.folder import divided, list_parts
from manyhands.data.open import find_choice, is_plain_folder, is_published, open_data
from manyhands.data.order import told_of_batch
from manyhands.data.pack_choice import of_pack
from manyhands.data.packed import is_pack
from manyhands.models.build import describe
from manyhands.parallel.apply import MODES
from manyhands.sync.choose import check_method

__all__ = ["check_names", "is_plain_folder", "warning_of_batch"]


def check_names(job: Job) -> None:
    """Looks up the data set, network, mode and method that a job names; reads no data and builds nothing.

    Raises:
        UserError: one of them doesn't exist.
    """
    find_choice(job.data.name)
    describe(job.model, job.data.image_size or 32)
    modes = module_names(MODES)
    if job.parallel.mode not in modes:
        raise unknown_choice("parallel mode", job.parallel.mode, modes, "parallel.mode")
    check_method(job.sync.method)
    if job.cluster.processes > job.train.batch:
        raise UserError(
            f"train.batch is {job.train.batch}, and there are {job.cluster.processes} processes to share it",
            "train.batch",
            (f"--batch {job.cluster.processes} or more", "or fewer processes"),
        )


def warning_of_batch(job: Job) -> str:
    """Says that the batch is larger than the training split; empty where it isn't, or where that takes a download.

    Pictures of a folder are counted and not read.
    """
    root, samples = Path(job.data.name).expanduser(), job.train.batch
    if is_published(job.data.name):
        with contextlib.suppress(UserError):  # the data isn't on this machine yet
            samples = len(open_data(job.data.model_copy(update={"download": False})).train)
    elif root.is_dir():
        parts = of_pack(root)[0] if is_pack(root) else list_parts(root)
        samples = len(divided(parts, job.data.validation)[0])
        samples = min(samples, job.data.train_samples or samples)
    return told_of_batch(job.train.batch, samples)

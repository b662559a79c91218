"""What can be checked of a job before anything is started or read, where torch is needed to know the names."""

from pathlib import Path

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh
from manyhands.core.plugins import module_names, unknown_choice
from manyhands.data.folder import divided, list_parts
from manyhands.data.open import find_choice, is_plain_folder, is_published, open_data
from manyhands.data.order import told_of_batch
from manyhands.data.pack_choice import of_pack
from manyhands.data.packed import is_pack
from manyhands.data.splits import describe_samples
from manyhands.models.build import describe
from manyhands.parallel.apply import MODES
from manyhands.sync.choose import check_method

__all__ = ["check_names", "is_plain_folder", "look_at_data", "processes_here"]


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
    one_machine = not (job.cluster.hosts or job.cluster.hostfile or job.cluster.world_size)
    if job.parallel.mesh and job.cluster.processes and one_machine:
        parse_mesh(job.parallel.mesh).check_size(job.cluster.processes)
    if job.cluster.processes > job.train.batch:
        raise UserError(
            f"train.batch ({job.train.batch}) is smaller than the number of processes ({job.cluster.processes})",
            "train.batch",
            (f"set --batch {job.cluster.processes} or higher", "or start fewer processes"),
        )


def look_at_data(job: Job) -> tuple[str, str]:
    """What the job trains on, and a warning where the batch is larger than the training split.

    Pictures of a folder are counted and not read. Both are empty where looking takes a download or the user's own code.

    Raises:
        UserError: the folder can't be trained on.
    """
    root = Path(job.data.name).expanduser()
    if is_published(job.data.name):
        try:
            splits = open_data(job.data.model_copy(update={"download": False}))
        except UserError:
            return "", ""  # the data isn't on this machine yet
        samples, evaluated, classes = len(splits.train), len(splits.test), splits.classes
    elif root.is_dir():
        parts = divided(of_pack(root)[0] if is_pack(root) else list_parts(root), job.data.validation)
        samples, evaluated = (len(part) for part in parts[:2])
        samples = min(samples, job.data.train_samples or samples)
        evaluated, classes = min(evaluated, job.data.test_samples or evaluated), parts[0].classes
    else:
        return "", ""
    return describe_samples(samples, evaluated, classes), told_of_batch(job.train.batch, samples)


def processes_here(job: Job) -> int:
    """How many processes a run starts on this machine where the job leaves their number open."""
    from manyhands.cluster.agents.elastic import devices_here  # torch's elastic agent comes with it

    return devices_here(job.cluster.device, 1)[1]

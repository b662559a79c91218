"""What can be checked of a job before anything is started or read, where torch is needed to know the names."""

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh
from manyhands.core.plugins import module_names, unknown_choice
from manyhands.data.open import find_choice, is_plain_folder
from manyhands.models.build import describe
from manyhands.parallel.apply import MODES
from manyhands.sync.choose import check_method

__all__ = ["check_names", "is_plain_folder"]


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
            f"train.batch is {job.train.batch}, and there are {job.cluster.processes} processes to share it",
            "train.batch",
            (f"--batch {job.cluster.processes} or more", "or fewer processes"),
        )

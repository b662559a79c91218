"""Reads the rank that mpirun gives a process: OpenMPI, MVAPICH, and MPICH and others with PMI."""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

from manyhands.cluster.hosts.inventory import LauncherPlace
from manyhands.cluster.hosts.variables import check_rank, derived_port, first_set, master_address, master_port, number
from manyhands.core.errors import UserError

# Before Slurm: in a batch job, mpirun's daemons are tasks of srun, and Slurm's variables belong to the daemons.
PRECEDENCE = 1
# Equal for all processes of one mpirun.
JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")


class _Family(NamedTuple):
    """Variables of one kind of MPI, and the command that passes a variable to all processes."""

    name: str
    rank: str
    size: str
    local_ranks: tuple[str, ...]
    local_sizes: tuple[str, ...]
    passing: str


_FAMILIES = (
    _Family("OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
            ("OMPI_COMM_WORLD_LOCAL_SIZE",), "mpirun -x MASTER_ADDR=ADDRESS …"),
    _Family("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",),
            ("MV2_COMM_WORLD_LOCAL_SIZE",), "mpirun_rsh … MASTER_ADDR=ADDRESS manyhands …"),
    _Family("MPICH", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
            ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), "mpiexec -genv MASTER_ADDR ADDRESS …"),
)  # fmt: skip


def place(environment: Mapping[str, str]) -> LauncherPlace | None:
    """Returns the rank; None for a single process. Raises UserError: a variable is missing, such as MASTER_ADDR."""
    family = next((family for family in _FAMILIES if family.rank in environment), None)
    if family is None or number(environment, family.size) == 1 or _is_slurms_own(environment, family):
        return None
    choices = {"rank": (family.rank,), "size": (family.size,),
               "local_rank": family.local_ranks, "local_size": family.local_sizes}  # fmt: skip
    names = {key: first_set(environment, words) or words[0] for key, words in choices.items()}
    rank, size, local_rank, local_size = (number(environment, name) for name in names.values())
    check_rank(rank, size, names["rank"], names["size"])
    check_rank(local_rank, local_size, names["local_rank"], names["local_size"])
    master = master_address(environment, alone=size == local_size)
    if not master:
        message = f"{family.name} started processes on several machines without the address of rank 0"
        hints = (f"pass an address of rank 0's machine, usually the first host: {family.passing}",)
        raise UserError(message, "MASTER_ADDR", hints)
    # The port comes from the job's name if it has one, so that two jobs on one machine don't connect.
    job = first_set(environment, JOB_NAMES)
    port, origin = master_port(environment)
    if job and origin == "default":
        port, origin = derived_port(zlib.crc32(environment[job].encode())), f"from {job}"
    return LauncherPlace(
        rank, size, local_rank, local_size, started_by=family.name, master_address=master[0], master_port=port,
        origins={**names, "master_address": master[1], "master_port": origin},
    )  # fmt: skip


def _is_slurms_own(environment: Mapping[str, str], family: _Family) -> bool:
    """Returns True if srun set PMI's variables; Slurm's own variables have more information."""
    return (
        family.name == "MPICH"
        and not first_set(environment, family.local_ranks)
        and environment.get("SLURM_PROCID") == environment[family.rank]
        and environment.get("SLURM_STEP_NUM_TASKS") == environment.get(family.size)
    )

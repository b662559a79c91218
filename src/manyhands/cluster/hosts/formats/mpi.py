"""Reads the rank that mpirun gives a process: OpenMPI, MVAPICH, and MPICH and others with PMI."""

from collections.abc import Mapping
from typing import NamedTuple

from manyhands.cluster.hosts.inventory import LauncherPlace
from manyhands.cluster.hosts.variables import (
    DEFAULT_PORT,
    check_rank,
    first_set,
    master_address,
    master_port,
    number,
    port_from_name,
)
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
    local_rank_name = first_set(environment, family.local_ranks) or family.local_ranks[0]
    local_size_name = first_set(environment, family.local_sizes) or family.local_sizes[0]
    rank, size = number(environment, family.rank), number(environment, family.size)
    local_rank, local_size = number(environment, local_rank_name), number(environment, local_size_name)
    check_rank(rank, size, family.rank, family.size)
    check_rank(local_rank, local_size, local_rank_name, local_size_name)
    master = master_address(environment, alone=size == local_size)
    if not master:
        message = f"{family.name} started processes on several machines without the address of rank 0"
        hints = (f"pass an address of rank 0's machine, usually the first host: {family.passing}",)
        raise UserError(message, "MASTER_ADDR", hints)
    # The port comes from the job's name if it has one, so that two jobs on one machine don't connect.
    job = first_set(environment, JOB_NAMES)
    default = (port_from_name(environment[job]), f"from {job}") if job else (DEFAULT_PORT, "default")
    port, port_origin = master_port(environment, *default)
    origins = {
        "rank": family.rank, "size": family.size, "local_rank": local_rank_name, "local_size": local_size_name,
        "master_address": master[1], "master_port": port_origin,
    }  # fmt: skip
    return LauncherPlace(
        rank, size, local_rank, local_size,
        started_by=family.name, master_address=master[0], master_port=port, origins=origins,
    )  # fmt: skip


def _is_slurms_own(environment: Mapping[str, str], family: _Family) -> bool:
    """Returns True if srun set PMI's variables; Slurm's own variables have more information."""
    return (
        family.name == "MPICH"
        and not first_set(environment, family.local_ranks)
        and environment.get("SLURM_PROCID") == environment[family.rank]
        and environment.get("SLURM_STEP_NUM_TASKS") == environment.get(family.size)
    )

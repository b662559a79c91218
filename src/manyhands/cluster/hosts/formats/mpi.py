"""The place that mpirun gives a process: OpenMPI, MVAPICH, and MPICH with its relatives (PMI)."""

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.cluster.hosts.inventory import LauncherPlace
from manyhands.cluster.hosts.variables import check_rank, first_set, number, port, port_from_name
from manyhands.core.errors import UserError

# Before Slurm: inside a batch job mpirun's daemons are tasks of srun, and Slurm's variables are theirs.
PRECEDENCE = 1
DEFAULT_PORT = 29500
# Equal for all processes of one mpirun.
JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")


@dataclass(frozen=True)
class _Family:
    """The names that one kind of MPI uses, and how it hands a variable on."""

    name: str
    rank: str
    size: str
    local_ranks: tuple[str, ...]
    local_sizes: tuple[str, ...]
    hand_on: str


_FAMILIES = (
    _Family("OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
            ("OMPI_COMM_WORLD_LOCAL_SIZE",), "mpirun -x MASTER_ADDR=ADDRESS …"),
    _Family("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",),
            ("MV2_COMM_WORLD_LOCAL_SIZE",), "mpirun_rsh … MASTER_ADDR=ADDRESS manyhands …"),
    _Family("MPICH", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
            ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), "mpiexec -genv MASTER_ADDR ADDRESS …"),
)  # fmt: skip


def place(environment: Mapping[str, str]) -> LauncherPlace | None:
    """One process of several. Raises UserError: variables lack, such as MASTER_ADDR over several machines."""
    family = next((family for family in _FAMILIES if family.rank in environment), None)
    if family is None or number(environment, family.size) == 1 or _is_slurms_own(environment, family):
        return None
    local_rank_name = first_set(environment, family.local_ranks) or family.local_ranks[0]
    local_size_name = first_set(environment, family.local_sizes) or family.local_sizes[0]
    rank, size = number(environment, family.rank), number(environment, family.size)
    local_rank, local_size = number(environment, local_rank_name), number(environment, local_size_name)
    check_rank(rank, size, family.rank, family.size)
    check_rank(local_rank, local_size, local_rank_name, local_size_name)
    address, address_origin = _master(environment, family, alone=size == local_size)
    master_port, port_origin = _port(environment)
    origins = {
        "rank": family.rank, "size": family.size, "local_rank": local_rank_name, "local_size": local_size_name,
        "master_address": address_origin, "master_port": port_origin,
    }  # fmt: skip
    return LauncherPlace(rank, size, local_rank, local_size, address, master_port, None, family.name, origins)


def _is_slurms_own(environment: Mapping[str, str], family: _Family) -> bool:
    """True where srun itself set PMI's variables for its tasks; Slurm's own say more."""
    return (
        family.name == "MPICH"
        and not first_set(environment, family.local_ranks)
        and environment.get("SLURM_PROCID") == environment[family.rank]
        and environment.get("SLURM_STEP_NUM_TASKS") == environment.get(family.size)
    )


def _master(environment: Mapping[str, str], family: _Family, *, alone: bool) -> tuple[str, str]:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], "MASTER_ADDR"
    if alone:
        return "127.0.0.1", "all processes are on one machine"
    what = f"{family.name} started processes on several machines without the address of rank 0"
    hints = (f"pass an address of rank 0's machine, usually the first host: {family.hand_on}",)
    raise UserError(what, "MASTER_ADDR", hints)


def _port(environment: Mapping[str, str]) -> tuple[int, str]:
    """Two mpiruns on one machine must not meet, so the port comes from the job's name where there is one."""
    name = first_set(environment, JOB_NAMES)
    found = port(environment, port_from_name(environment[name]) if name else DEFAULT_PORT)
    return found, "MASTER_PORT" if environment.get("MASTER_PORT") else f"from {name}" if name else "default"

"""Reads the rank that mpirun gives a process: OpenMPI, MVAPICH, and MPICH or other MPIs with PMI."""

import zlib
from collections.abc import Mapping

from manyhands.cluster.hosts import inventory
from manyhands.core.errors import UserError

PRECEDENCE = 1  # before Slurm, whose variables belong to mpirun's daemons in a batch job
# Equal for all processes of one mpirun.
JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")
# Variables of each MPI: rank, size, local rank, local size. Below: commands that pass a variable to processes.
_FAMILIES = {
    "OpenMPI": (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
                ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    "MVAPICH": (("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",),
                ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    "MPICH": (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
              ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
}  # fmt: skip
_PASSING = {"OpenMPI": "mpirun -x MASTER_ADDR=ADDRESS …", "MVAPICH": "mpirun_rsh … MASTER_ADDR=ADDRESS manyhands …",
            "MPICH": "mpiexec -genv MASTER_ADDR ADDRESS …"}  # fmt: skip


def place(environment: Mapping[str, str]) -> inventory.LauncherPlace | None:
    """Returns the rank by mpirun's variables; None for a single process. Raises UserError if a variable is missing."""
    family = next((name for name, variables in _FAMILIES.items() if variables[0][0] in environment), "")
    if not family:
        return None
    words = [inventory.first_set(environment, choices) or choices[0] for choices in _FAMILIES[family]]
    here = environment[words[0]], environment.get(words[1])
    # srun sets PMI's variables too; Slurm's own variables have more information.
    by_srun = family == "MPICH" and not environment.get(words[2])
    slurm = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
    if inventory.number(environment, words[1]) == 1 or (by_srun and slurm == here):
        return None
    rank, size, local_rank, local_size = (inventory.number(environment, word) for word in words)
    inventory.check_rank(rank, size, *words[:2])
    inventory.check_rank(local_rank, local_size, *words[2:])
    master = inventory.master_address(environment, alone=size == local_size)
    if not master:
        message = f"{family} started processes on several machines without the address of rank 0"
        hints = (f"pass an address of rank 0's machine, usually the first host: {_PASSING[family]}",)
        raise UserError(message, "MASTER_ADDR", hints)
    job = inventory.first_set(environment, JOB_NAMES)  # the port depends on it, so that two jobs don't connect
    port = inventory.master_port(environment)
    if job and port[1] == "default":
        port = inventory.derived_port(zlib.crc32(environment[job].encode())), f"from {job}"
    return inventory.LauncherPlace.from_values(
        family, rank=(rank, words[0]), size=(size, words[1]), local_rank=(local_rank, words[2]),
        local_size=(local_size, words[3]), master_address=master, master_port=port,
    )  # fmt: skip

"""Slurm: reads the rank of a task and the list of nodes, and writes a script for sbatch."""

import itertools
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from manyhands.cluster.hosts import inventory
from manyhands.cluster.hosts.inventory import derived_port, first_set, master_address, master_port, number
from manyhands.core.errors import EXIT_SAVED, UserError
from manyhands.core.files import MOST_TEXT_BYTES, decode_text, read_bytes

PRECEDENCE = 2  # after MPI: in mpirun's batch job, Slurm's variables belong to mpirun's daemons
# Variables that hide accelerators from a process.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
SAVE_S = 120  # seconds before the time limit at which a run saves, after its current update
MOST = 100_000  # more machines than any cluster has; a longer list is a mistake or an attack
_PART = re.compile(r"(?P<plain>[^\[\],\s]+)|\[(?P<ranges>[^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


def place(environment: Mapping[str, str]) -> inventory.LauncherPlace | None:
    """Returns the rank of a task; None for a single task or a batch script. Raises UserError if variables disagree."""
    if not _started_by_srun(environment) or (size := number(environment, "SLURM_STEP_NUM_TASKS")) == 1:
        return None
    rank, local_rank = number(environment, "SLURM_PROCID"), number(environment, "SLURM_LOCALID")
    name = first_set(environment, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")) or "SLURM_STEP_TASKS_PER_NODE"
    tasks, node = expand_counts(environment.get(name, ""), name), number(environment, "SLURM_NODEID", 0)
    if sum(tasks) != size or node >= len(tasks) or local_rank >= tasks[node] or rank >= size:
        here = f"task {rank} of {size}, local task {local_rank} of node {node}"
        hints = ("unset SLURM_* variables that srun did not set",)
        raise UserError(f"Slurm's variables contradict each other: {here}", f"{name}={environment.get(name)}", hints)
    # Steps of one job may run at the same time, so each has its own port.
    step_port = derived_port(number(environment, "SLURM_JOB_ID") + number(environment, "SLURM_STEP_ID", 0))
    return inventory.LauncherPlace.from_values(
        "Slurm", rank=(rank, "SLURM_PROCID"), size=(size, "SLURM_STEP_NUM_TASKS"),
        local_rank=(local_rank, "SLURM_LOCALID"), local_size=(tasks[node], name),
        master_address=master_address(environment, alone=len(tasks) == 1) or _first_host(environment),
        master_port=master_port(environment, step_port, "15000 + end of SLURM_JOB_ID + step"),
        device_index=_device(environment, tasks[node]),
    )  # fmt: skip


def missing_launcher_error(environment: Mapping[str, str]) -> UserError | None:
    """Returns an error if a job has several tasks and this process was started without srun."""
    if not environment.get("SLURM_JOB_ID") or _started_by_srun(environment):
        return None
    tasks, nodes = number(environment, "SLURM_NTASKS", 1), number(environment, "SLURM_NNODES", 1)
    if max(tasks, nodes) == 1:
        return None
    message = f"Slurm job {environment['SLURM_JOB_ID']} has {max(tasks, nodes)} tasks, but only one runs without srun"
    one = "or start one process on this machine: manyhands train -n 1 … (in Python: fit(…, processes=1))"
    return UserError(message, "batch script or salloc shell", ("start all tasks: srun manyhands train …", one))


def _started_by_srun(environment: Mapping[str, str]) -> bool:
    """Returns True for a process that srun started. Batch scripts, too, have SLURM_PROCID, so this tests more."""
    # Steps that Slurm starts for its own purposes, such as an interactive shell, have ids from 0xFFFFFFF0 on.
    return number(environment, "SLURM_STEP_ID", 0xFFFFFFF0) < 0xFFFFFFF0 and "SLURM_PROCID" in environment


def _first_host(environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns (machine of task 0, origin for messages): the first line of SLURM_HOSTFILE, or the first node."""
    if not (environment.get("SLURM_DISTRIBUTION") == "arbitrary" and environment.get("SLURM_HOSTFILE")):
        name = first_set(environment, NODE_LISTS) or NODE_LISTS[0]
        return expand_hosts(environment.get(name, ""), name)[0], f"first of {name}"
    name = environment["SLURM_HOSTFILE"]
    try:
        lines = decode_text(read_bytes(Path(name), MOST_TEXT_BYTES)).splitlines()
    except (OSError, ValueError) as error:
        hints = ("set MASTER_ADDR to an address of the first machine in the file",)
        message = f"can't read the SLURM_HOSTFILE {name}: {error}"
        raise UserError(message, "SLURM_HOSTFILE", hints) from error
    hosts = [host for line in lines if (host := line.partition("#")[0].partition("*")[0].strip())]
    return expand_hosts(hosts[0] if hosts else "", "SLURM_HOSTFILE")[0], "first of SLURM_HOSTFILE"


def _device(environment: Mapping[str, str], local_size: int) -> tuple[int | None, str]:
    """Returns (device 0, its origin) if Slurm gave each task its own devices (--gpus-per-task); else (None, "")."""
    name = first_set(environment, VISIBLE)
    if not name:
        return None, ""
    seen = len(environment[name].split(","))
    here = number(environment, "SLURM_GPUS_ON_NODE", 0) or number(environment, "SLURM_GPUS_PER_TASK", 0) * local_size
    return (0, f"{name}: this task's own") if here and seen * local_size <= here else (None, "")


def script(job: inventory.Submission) -> str:
    """Returns a script for sbatch that starts all processes by srun, saves before the time limit and requeues."""
    settings = {
        "job-name": job.name, "nodes": job.wanted.nodes, "ntasks-per-node": job.processes,
        "gpus-per-task": 1 if job.wanted.accelerators else None, "cpus-per-task": job.threads or None,
        "time": job.wanted.time_limit or None, "signal": f"TERM@{SAVE_S}", "output": f"{job.name}-%j.out",
        "open-mode": "append", "requeue": "",
    }  # fmt: skip
    lines = [f"#SBATCH --{key}{f'={value}' if value else ''}" for key, value in settings.items() if value is not None]
    lines += [f"#SBATCH {option}" for option in job.wanted.options]
    command = shlex.join(job.command).replace(inventory.JOB, "$SLURM_JOB_ID")
    return f"""#!/bin/bash
{chr(10).join(lines)}

srun {command}
code=$?
# Exit code {EXIT_SAVED}: the run was stopped and saved. Requeue the job to resume.
if [ $code -eq {EXIT_SAVED} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def nodes(environment: Mapping[str, str]) -> inventory.Cluster | None:
    """Returns the machines of a job or step with their task counts; None outside a job. Raises UserError if invalid."""
    listed = first_set(environment, NODE_LISTS)
    if not listed:
        return None
    counted = first_set(environment, ("SLURM_STEP_TASKS_PER_NODE",) if "STEP" in listed else ("SLURM_TASKS_PER_NODE",))
    hosts = expand_hosts(environment[listed], listed)
    tasks = expand_counts(environment[counted], counted) if counted else [0] * len(hosts)
    if len(tasks) != len(hosts):
        message = f"{listed} lists {len(hosts)} machines, but {counted} lists tasks for {len(tasks)} machines"
        raise UserError(message, "environment", ("unset SLURM_* variables left over from another job",))
    return inventory.Cluster(tuple(map(inventory.Machine, hosts, tasks)), source=listed)


def expand_hosts(text: str, where: str) -> list[str]:
    """Expands a list such as "a[01-03]b[1-2],c"; the last bracket varies fastest. Raises UserError if invalid."""

    def invalid_list_error(at: str) -> UserError:
        message = f'{where} is not a list of machines such as "node[01-03,7],other": "{text}"'
        return UserError(message, f"{where}, at {at}", (f"check the list with: scontrol show hostnames '{text}'",))

    def numbers(ranges: str) -> list[str]:
        """Expands "01-03,7" to 01, 02, 03, 7. All numbers of a range are as wide as its first one."""
        found: list[str] = []
        for match in map(_RANGE.fullmatch, ranges.split(",")):
            low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
            if not 0 <= int(high) - int(low) <= MOST:
                raise invalid_list_error(f"[{ranges}]")
            found += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
        return found

    hosts: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text.strip()):  # at commas outside brackets
        parts = [*_PART.finditer(entry)]
        if not entry or "".join(part[0] for part in parts) != entry:
            raise invalid_list_error(entry or "an empty name")
        choices = [[part["plain"]] if part["plain"] else numbers(part["ranges"]) for part in parts]
        if len(hosts) + math.prod(map(len, choices)) > MOST:
            raise invalid_list_error(entry)
        hosts += ("".join(words) for words in itertools.product(*choices))
    return hosts


def expand_counts(text: str, where: str) -> list[int]:
    """Expands a list such as "2(x3),1" to 2, 2, 2, 1. Raises UserError if the list is invalid."""
    found: list[int] = []
    for match in map(_COUNT.fullmatch, text.strip().split(",")):
        if not match or int(match[2] or 1) > MOST:
            raise UserError(f'{where} is not a list such as "2(x3),1": "{text}"', where)
        found += [int(match[1])] * int(match[2] or 1)
    return found

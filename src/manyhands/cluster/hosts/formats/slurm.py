"""Slurm: the place that srun gives a process, its short notations of lists, and the script that sbatch takes."""

import itertools
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from manyhands.cluster.hosts.inventory import JOB, Cluster, LauncherPlace, Machine, Submission
from manyhands.cluster.hosts.variables import FIRST_PORT, PORTS, first_set, number, port
from manyhands.core.errors import EXIT_SAVED, UserError
from manyhands.core.files import MOST_TEXT_BYTES, decoded, read_bytes

# mpirun in a batch job starts its own daemons by srun, so inside it Slurm's variables are the daemon's.
PRECEDENCE = 2
# Steps that Slurm opens for itself, such as the shell of an interactive job, are numbered from here.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Variables that limit a process to some accelerators.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Before the time limit the processes have this long to save; a run saves after its current update.
SAVE_S = 120

# More machines than any cluster has: a list that is longer is a mistake or an attack.
MOST = 100_000
_PART = re.compile(r"(?P<plain>[^\[\],\s]+)|\[(?P<ranges>[^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?", re.ASCII)


def place(environment: Mapping[str, str]) -> LauncherPlace | None:
    """One task of a step with several; None in a batch script or shell. Raises UserError: variables contradict."""
    if not _in_step(environment):
        return None
    size = number(environment, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return None
    rank, local_rank = number(environment, "SLURM_PROCID"), number(environment, "SLURM_LOCALID")
    name = first_set(environment, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")) or "SLURM_STEP_TASKS_PER_NODE"
    tasks, node = expand_counts(environment.get(name, ""), name), number(environment, "SLURM_NODEID", 0)
    if sum(tasks) != size or node >= len(tasks) or local_rank >= tasks[node] or rank >= size:
        what = f"Slurm's variables contradict each other: task {rank} of {size}, local task {local_rank} of node {node}"
        raise UserError(what, f"{name}={environment.get(name)}", ("unset SLURM_* variables that srun did not set",))
    address, address_origin = _master(environment, alone=len(tasks) == 1)
    device, device_origin = _device(environment, tasks[node])
    origins = {
        "rank": "SLURM_PROCID", "size": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID",
        "local_size": name, "master_address": address_origin, "device": device_origin,
        "master_port": "MASTER_PORT" if environment.get("MASTER_PORT") else "15000 + end of SLURM_JOB_ID + step",
    }  # fmt: skip
    master_port = port(environment, _job_port(environment))
    return LauncherPlace(rank, size, local_rank, tasks[node], address, master_port, device, "Slurm", origins)


def alone(environment: Mapping[str, str]) -> UserError | None:
    """What is wrong where a job has several tasks and one process runs, since srun was forgotten."""
    if not environment.get("SLURM_JOB_ID") or _in_step(environment):
        return None
    tasks, nodes = number(environment, "SLURM_NTASKS", 1), number(environment, "SLURM_NNODES", 1)
    if max(tasks, nodes) == 1:
        return None
    return UserError(
        f"Slurm job {environment['SLURM_JOB_ID']} has {max(tasks, nodes)} tasks, but only one runs without srun",
        "batch script or salloc shell",
        (
            "start all tasks: srun manyhands train …",
            "or start one process on this machine: manyhands train -n 1 … (in Python: fit(…, processes=1))",
        ),
    )


def _in_step(environment: Mapping[str, str]) -> bool:
    """True for what srun started; SLURM_PROCID and SLURM_NTASKS are there in batch scripts too."""
    step = environment.get("SLURM_STEP_ID", "")
    return bool(step) and number(environment, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP and "SLURM_PROCID" in environment


def _master(environment: Mapping[str, str], *, alone: bool) -> tuple[str, str]:
    """The address where rank 0 listens, and where that is from."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], "MASTER_ADDR"
    if alone:
        return "127.0.0.1", "all tasks are on one machine"
    if environment.get("SLURM_DISTRIBUTION") == "arbitrary" and environment.get("SLURM_HOSTFILE"):
        return _first_of_file(environment["SLURM_HOSTFILE"]), "first of SLURM_HOSTFILE"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = first_set(environment, names) or names[0]
    return expand_hosts(environment.get(name, ""), name)[0], f"first of {name}"


def _first_of_file(name: str) -> str:
    """The machine of task 0, whose order of tasks is a file's; lists of nodes are sorted."""
    try:
        lines = decoded(read_bytes(Path(name), MOST_TEXT_BYTES)).splitlines()
    except (OSError, ValueError) as error:
        hints = ("set MASTER_ADDR to an address of the first machine in the file",)
        raise UserError(
            f"{name}, the file of SLURM_HOSTFILE, can't be read: {error}", "SLURM_HOSTFILE", hints
        ) from error
    hosts = [host for line in lines if (host := line.partition("#")[0].partition("*")[0].strip())]
    return expand_hosts(hosts[0] if hosts else "", "SLURM_HOSTFILE")[0]


def _job_port(environment: Mapping[str, str]) -> int:
    """Steps of one job may run at the same time, so each has a port of its own."""
    last_digits = number(environment, "SLURM_JOB_ID") % PORTS
    return FIRST_PORT + (last_digits + number(environment, "SLURM_STEP_ID", 0)) % PORTS


def _device(environment: Mapping[str, str], local_size: int) -> tuple[int | None, str]:
    """The first of its own where Slurm shows each task only its own accelerators (--gpus-per-task, --gpu-bind)."""
    name = first_set(environment, VISIBLE)
    if not name:
        return None, ""
    seen = len(environment[name].split(","))
    here = number(environment, "SLURM_GPUS_ON_NODE", 0) or number(environment, "SLURM_GPUS_PER_TASK", 0) * local_size
    return (0, f"{name}: this task's own") if here and seen * local_size <= here else (None, "")


def script(job: Submission) -> str:
    """The text for sbatch: starts all processes by srun, saves before the time limit, and goes on in another turn."""
    settings = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes,
        "gpus-per-task": 1 if job.accelerators else None,
        "cpus-per-task": job.threads or None,
        "time": job.time_limit or None,
        "signal": f"TERM@{SAVE_S}",
        "output": f"{job.name}-%j.out",
        "open-mode": "append",
        "requeue": "",
    }
    lines = [f"#SBATCH --{key}{f'={value}' if value else ''}" for key, value in settings.items() if value is not None]
    lines += [f"#SBATCH {option}" for option in job.options]
    command = shlex.join(job.command).replace(JOB, "$SLURM_JOB_ID")
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


def nodes(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the machines of a job or step with their numbers of tasks, for writing them down; None outside a job.

    Raises:
        UserError: A list is broken, or the lists don't match.
    """
    listed = first_set(environment, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if not listed:
        return None
    counted = first_set(environment, ("SLURM_STEP_TASKS_PER_NODE",) if "STEP" in listed else ("SLURM_TASKS_PER_NODE",))
    hosts = expand_hosts(environment[listed], listed)
    tasks = expand_counts(environment[counted], counted) if counted else [0] * len(hosts)
    if len(tasks) != len(hosts):
        message = f"{listed} lists {len(hosts)} machines, but {counted} lists tasks for {len(tasks)} machines"
        raise UserError(message, "environment", ("unset SLURM_* variables left over from another job",))
    return Cluster(tuple(map(Machine, hosts, tasks)), source=listed)


def expand_hosts(text: str, where: str) -> list[str]:
    """The names of a list such as "a[01-03]b[1-2],c", varied from the right. Raises UserError: the list is broken."""
    hosts: list[str] = []
    for entry in _split(text, where):
        choices: list[list[str]] = []
        position = 0
        while position < len(entry):
            part = _PART.match(entry, position)
            if not part:
                raise _broken(text, where, entry[position:])
            choices.append([part["plain"]] if part["plain"] else _numbers(part["ranges"], text, where))
            position = part.end()
        if len(hosts) + math.prod(map(len, choices)) > MOST:
            raise _broken(text, where, entry)
        hosts += ("".join(words) for words in itertools.product(*choices))
    return hosts


def _split(text: str, where: str) -> list[str]:
    """The entries between the commas that no bracket holds."""
    entries = re.split(r",(?![^\[]*\])", text.strip())
    if not all(entries):
        raise _broken(text, where, "an empty name")
    return entries


def _numbers(ranges: str, text: str, where: str) -> list[str]:
    """The numbers of "01-03,7": 01, 02, 03, 7, as wide as a range's first one is written."""
    found: list[str] = []
    for written in ranges.split(","):
        match = _RANGE.fullmatch(written)
        if not match:
            raise _broken(text, where, f"[{ranges}]")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) > MOST:
            raise _broken(text, where, f"[{ranges}]")
        found += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return found


def expand_counts(text: str, where: str) -> list[int]:
    """The numbers of a list such as "2(x3),1": 2, 2, 2, 1. Raises UserError: the list is broken."""
    found: list[int] = []
    for entry in text.strip().split(","):
        match = _COUNT.fullmatch(entry)
        if not match or int(match[2] or 1) > MOST:
            raise UserError(f'{where} is not a list such as "2(x3),1": "{text}"', where)
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _broken(text: str, where: str, at: str) -> UserError:
    what = f'{where} is not a list of machines such as "node[01-03,7],other": "{text}"'
    return UserError(what, f"{where}, at {at}", (f"check the list with: scontrol show hostnames '{text}'",))

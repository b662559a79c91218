"""MindSpore's msrun command line. Its numbers count processes: --worker_num all, --local_worker_num this machine's."""

import shlex
from collections.abc import Sequence

from manyhands.cluster.descriptions.command_cluster import Start, joined, lines
from manyhands.cluster.descriptions.command_cluster import fit as fit_commands
from manyhands.cluster.descriptions.command_lines import (
    Command,
    CommandFlags,
    commands,
    has_command,
    number,
    visible_devices,
)
from manyhands.cluster.descriptions.holding import canonical, must_hold
from manyhands.cluster.descriptions.inventory import Cluster, Machine
from manyhands.core.errors import UserError

NAMES = ("msrun",)
DEFAULT_WORKERS = "8"

_VALUED = (
    "worker_num local_worker_num master_addr master_port node_rank log_dir join cluster_time_out bind_core sim_level "
    "sim_rank_id rank_table_file worker_log_name tail_worker_log numa_bind"
)
_FLAGS = CommandFlags(valued=frozenset(_VALUED.split()))
_MOST = 65536


def recognise(_path: str, text: str) -> bool:
    """Whether one of its lines is an msrun command."""
    return has_command(text, _is_msrun)


def read(text: str, where: str) -> Cluster:
    """Reads a script's msrun commands. Raises UserError: none, a wrong flag, or they contradict each other."""
    found = commands(text, where, _is_msrun, "msrun --worker_num 8 --local_worker_num 4 …")
    said = [_FLAGS.read(command.words[1:], command.where) for command in found]
    starts = [_start(command, flags, said) for command, flags in zip(found, said, strict=True)]
    cluster = joined(starts, "--node_rank", "--master_addr")
    return Cluster(**{**vars(cluster), "source": f"msrun {where}".rstrip()})


def write(cluster: Cluster) -> str:
    """Writes each machine's msrun command, or this one's alone if known. Raises UserError: it can't be told so."""
    plain = canonical(cluster)
    if not all(machine.slots for machine in plain.machines):
        what = "msrun needs the number of processes on each machine"
        raise UserError(what, cluster.source, ("write the number as slots: n1 slots=8",))
    size = plain.size

    def command(rank: int, machine: Machine, address: str) -> str:
        flags: dict[str, object] = {"worker_num": size, "local_worker_num": machine.slots}
        if address:
            flags["master_addr"] = address
        if plain.master_port:
            flags["master_port"] = plain.master_port
        if len(plain.machines) > 1 or plain.machine is not None:
            flags["node_rank"] = rank
        words = " ".join(f"--{name}={shlex.quote(str(value))}" for name, value in flags.items())
        visible = ",".join(map(str, machine.devices))
        before = f"ASCEND_RT_VISIBLE_DEVICES={visible} " if visible else ""
        return f"{before}msrun {words} train.py"

    return must_hold(lines(plain, command), plain, read, "msrun's command")


def fit(cluster: Cluster) -> tuple[Cluster, list[str]]:
    return fit_commands(cluster, "msrun")


def _is_msrun(words: Sequence[str]) -> bool:
    return bool(words) and words[0].rsplit("/", 1)[-1] == "msrun"


def _start(command: Command, flags: dict[str, str], all_flags: Sequence[dict[str, str]]) -> Start:
    where = command.where
    workers, local = _workers(flags, where)
    machines = len(all_flags)
    if machines == 1:
        if workers % local:
            what = f"--worker_num is {workers}, not a multiple of --local_worker_num, which is {local}"
            mend = ("list the commands of all machines, where they have different numbers of processes",)
            raise UserError(what, where, mend)
        machines = workers // local
    else:
        total = sum(_workers(other, where)[1] for other in all_flags)
        if total != workers:
            what = f"--worker_num is {workers}, but --local_worker_num of all {machines} commands is {total}"
            raise UserError(what, where, ("correct one of them, or add the missing command",))
    rank = number(flags, "node_rank", -1, _MOST, where) if "node_rank" in flags else -1
    return Start(
        command,
        machines,
        local,
        None if rank < 0 else rank,
        flags.get("master_addr", ""),
        number(flags, "master_port", 0, 65535, where) if "master_port" in flags else 0,
        visible_devices(command, "ASCEND_RT_VISIBLE_DEVICES"),
    )


def _workers(flags: dict[str, str], where: str) -> tuple[int, int]:
    values = {name: flags.get(name, DEFAULT_WORKERS) for name in ("worker_num", "local_worker_num")}
    workers, local = (number(values, name, 1, _MOST, where) for name in values)
    if local > workers:
        what = f"--local_worker_num is {local}, more than --worker_num, which is {workers}"
        raise UserError(what, where, ("--worker_num counts the processes of all machines",))
    return workers, local

"""torchrun's command line, and the PET_* variables that stand for it (Kubeflow sets them on each machine).

`--nproc-per-node auto` is read as one process per accelerator, or one where there is none. A port that is not given is
0, for one that is free.
"""

import shlex
from collections.abc import Mapping, Sequence

from manyhands.cluster.descriptions.command_cluster import fit as fit_commands
from manyhands.cluster.descriptions.command_cluster import joined, lines
from manyhands.cluster.descriptions.command_lines import Command, commands, has_command
from manyhands.cluster.descriptions.holding import canonical, must_hold
from manyhands.cluster.descriptions.inventory import Cluster, Machine
from manyhands.cluster.descriptions.torchrun_flags import FLAGS, PREFIX, program, read_command, read_flags

NAMES = ("torchrun",)


def recognise(_path: str, text: str) -> bool:
    """Whether one of its lines is a torchrun command."""
    return has_command(text, _is_torchrun)


def read(text: str, where: str) -> Cluster:
    """Reads a script's torchrun commands. Raises UserError: none, a wrong flag, or they contradict each other."""
    found = commands(text, where, _is_torchrun, "torchrun --nnodes 2 --nproc-per-node 4 …")
    cluster = joined([read_command(command) for command in found], "--node-rank", "--master-addr")
    return Cluster(**{**vars(cluster), "source": f"torchrun {where}".rstrip()})


def from_environment(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that PET_* describe, with this machine's place in it, if PET_NNODES is set. Raises UserError."""
    if not environment.get(f"{PREFIX}NNODES"):
        return None
    values = {name: environment[key] for name in FLAGS.valued if environment.get(key := f"{PREFIX}{name.upper()}")}
    cluster = joined([read_flags(Command((), where="environment, PET_*"), values)], "PET_NODE_RANK", "PET_MASTER_ADDR")
    return Cluster(**{**vars(cluster), "source": "PET_* in the environment"})


def write(cluster: Cluster) -> str:
    """Writes each machine's torchrun command, or this one's alone if known. Raises UserError: it can't be told so."""
    plain = canonical(cluster)

    def command(rank: int, machine: Machine, address: str) -> str:
        flags: dict[str, object] = {}
        if len(plain.machines) > 1:
            flags["nnodes"] = len(plain.machines)
        if len(plain.machines) > 1 or plain.machine is not None:
            flags["node-rank"] = rank
        flags["nproc-per-node"] = machine.slots or "auto"
        if address:
            flags["master-addr"] = address
        if plain.master_port:
            flags["master-port"] = plain.master_port
        standalone = [] if set(flags) - {"nproc-per-node"} else ["--standalone"]
        words = [*standalone, *(f"--{name}={shlex.quote(str(value))}" for name, value in flags.items())]
        visible = ",".join(map(str, machine.devices))
        before = f"CUDA_VISIBLE_DEVICES={visible} " if visible else ""
        return f"{before}torchrun {' '.join(words)} -m manyhands train job.toml"

    return must_hold(lines(plain, command), plain, read, "torchrun's command")


def fit(cluster: Cluster) -> tuple[Cluster, list[str]]:
    return fit_commands(cluster, "torchrun")


def _is_torchrun(words: Sequence[str]) -> bool:
    return bool(words) and program(words) is not None

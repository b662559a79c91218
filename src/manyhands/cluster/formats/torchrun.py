"""torchrun's command line, and the PET_* variables that stand for it (Kubeflow sets them on each machine).

`--nproc-per-node auto` is read as one process per accelerator, or one where there is none. A port that is not given is
0, for one that is free.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from manyhands.cluster.command_cluster import Start, joined, lines
from manyhands.cluster.command_cluster import fit as fit_commands
from manyhands.cluster.command_lines import Command, Flags, commands, number, visible_devices
from manyhands.cluster.holding import canonical, must_hold
from manyhands.cluster.inventory import Cluster, Machine
from manyhands.core.errors import UserError

NAMES = ("torchrun",)
PREFIX = "PET_"
DEFAULT_RENDEZVOUS_PORT = 29400

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_VALUED = (
    "nnodes nproc_per_node node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts "
    "monitor_interval start_method role log_dir redirects tee local_ranks_filter local_addr logs_specs "
    "event_log_handler numa_binding signals_to_handle virtual_local_rank duplicate_stdout_filters "
    "duplicate_stderr_filters shutdown_timeout log_line_prefix_template print_completion"
)
_FLAGS = Flags(
    valued=frozenset(_VALUED.split()),
    switches=frozenset(("standalone", "module", "no_python", "run_path", "use_env")),
    short={"m": "module", "r": "redirects", "t": "tee"},
)
_MOST_MACHINES, _MOST_SLOTS = 65536, 1024


def recognise(_path: str, text: str) -> bool:
    """Whether one of its lines is a torchrun command."""
    try:
        return bool(commands(text, "", _is_torchrun))
    except UserError:
        return True


def read(text: str, where: str) -> Cluster:
    """Reads the torchrun commands of a script; the other lines are passed over.

    Raises:
        UserError: there is none, a flag is wrong, or the commands contradict each other.
    """
    found = commands(text, where, _is_torchrun)
    if not found:
        raise UserError("there is no torchrun command in it", where, ("torchrun --nnodes 2 --nproc-per-node 4 …",))
    cluster = joined([_start(command) for command in found], "--node-rank", "--master-addr")
    return Cluster(**{**vars(cluster), "source": f"torchrun {where}".rstrip()})


def from_environment(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that PET_* variables describe, with this machine's place in it; None without PET_NNODES.

    Raises:
        UserError: one of them is wrong.
    """
    if not environment.get(f"{PREFIX}NNODES"):
        return None
    values = {name: environment[key] for name in _FLAGS.valued if environment.get(key := f"{PREFIX}{name.upper()}")}
    cluster = joined([_said(Command((), where="environment, PET_*"), values)], "PET_NODE_RANK", "PET_MASTER_ADDR")
    return Cluster(**{**vars(cluster), "source": "PET_* in the environment"})


def write(cluster: Cluster) -> str:
    """Writes the torchrun command of each machine, or of this one alone where the cluster says which that is.

    Raises:
        UserError: torchrun can't be started like this.
    """
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
    """The nearest cluster that torchrun's commands can hold, and what of it had to be left out."""
    return fit_commands(cluster, "torchrun")


def _is_torchrun(words: Sequence[str]) -> bool:
    if not words:
        return False
    return _program(words) is not None


def _program(words: Sequence[str]) -> int | None:
    """Where torchrun's own flags begin; None if it is another program."""
    name = words[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return 1
    if re.fullmatch(r"python[0-9.]*", name) and "-m" in words[:4]:
        position = words.index("-m") + 1
        if words[position : position + 1] and words[position] in _MODULES:
            return position + 1
    return None


def _start(command: Command) -> Start:
    flags = _FLAGS.read(command.words[_program(command.words) :], command.where)
    petted = {
        key.removeprefix(PREFIX).lower(): value for key, value in command.variables.items() if key.startswith(PREFIX)
    }
    return _said(command, {**petted, **flags})


def _said(command: Command, flags: Mapping[str, str]) -> Start:
    where = command.where
    machines = _machines(flags.get("nnodes", "1"), where)
    address, port = _master(flags, where)
    return Start(
        command,
        machines,
        _slots(flags.get("nproc_per_node", "1"), where),
        number(flags, "node_rank", 0, _MOST_MACHINES, where) if "node_rank" in flags else None,
        address,
        port,
        visible_devices(command, "CUDA_VISIBLE_DEVICES"),
    )


def _machines(text: str, where: str) -> int:
    least, colon, most = text.partition(":")
    if colon and least != most:
        raise UserError(
            f'--nnodes is "{text}", a number that may change while the job runs; here it is fixed',
            where,
            (f"write --nnodes {most}, the number of machines that take part",),
        )
    return number({"nnodes": least}, "nnodes", 1, _MOST_MACHINES, where)


def _slots(text: str, where: str) -> int:
    if text in {"auto", "gpu", "xpu"}:
        return 0
    if text == "cpu":
        raise UserError(
            '--nproc-per-node is "cpu", one process for each core; here it is a number, or auto',
            where,
            ("write the number; each process takes its share of the cores as threads anyway",),
        )
    return number({"nproc_per_node": text}, "nproc_per_node", 1, _MOST_SLOTS, where)


def _master(flags: Mapping[str, str], where: str) -> tuple[str, int]:
    if "standalone" in flags:
        return "", 0
    backend = flags.get("rdzv_backend", "static")
    if backend not in {"static", "c10d"}:
        what = f'--rdzv-backend is "{backend}"; only static and c10d say where the machines meet'
        raise UserError(what, where, ("give --master-addr and --master-port instead",))
    port = number(flags, "master_port", 0, 65535, where) if "master_port" in flags else 0
    endpoint = flags.get("rdzv_endpoint", "")
    if not endpoint or "master_addr" in flags:
        return flags.get("master_addr", ""), port
    matched = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?", endpoint)
    if matched is None:
        raise UserError(f'--rdzv-endpoint is "{endpoint}"; expected host:port', where, ("write it as n1:29400",))
    usual = DEFAULT_RENDEZVOUS_PORT if backend == "c10d" else 0
    return matched[1] or matched[3], int(matched[2] or matched[4] or usual)

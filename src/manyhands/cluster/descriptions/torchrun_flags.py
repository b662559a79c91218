"""torchrun's flags, in a command or in the environment: how many machines and processes, and where they meet."""

import re
from collections.abc import Mapping, Sequence

from manyhands.cluster.descriptions.command_cluster import Start
from manyhands.cluster.descriptions.command_lines import Command, CommandFlags, number, visible_devices
from manyhands.core.errors import UserError

PREFIX = "PET_"
DEFAULT_RENDEZVOUS_PORT = 29400
MODULES = ("torch.distributed.run", "torch.distributed.launch")
_VALUED = (
    "nnodes nproc_per_node node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts "
    "monitor_interval start_method role log_dir redirects tee local_ranks_filter local_addr logs_specs "
    "event_log_handler numa_binding signals_to_handle virtual_local_rank duplicate_stdout_filters "
    "duplicate_stderr_filters shutdown_timeout log_line_prefix_template print_completion"
)
FLAGS = CommandFlags(
    valued=frozenset(_VALUED.split()),
    switches=frozenset(("standalone", "module", "no_python", "run_path", "use_env")),
    short={"m": "module", "r": "redirects", "t": "tee"},
)
_MOST_MACHINES, _MOST_SLOTS = 65536, 1024


def program(words: Sequence[str]) -> int | None:
    """Where torchrun's own flags begin; None if it is another program."""
    name = words[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return 1
    if re.fullmatch(r"python[0-9.]*", name) and "-m" in words[:4]:
        position = words.index("-m") + 1
        if words[position : position + 1] and words[position] in MODULES:
            return position + 1
    return None


def read_command(command: Command) -> Start:
    """What torchrun, or python -m with its module, says in a command. Raises UserError: a flag is unknown or wrong."""
    flags = FLAGS.read(command.words[program(command.words) :], command.where)
    petted = {
        key.removeprefix(PREFIX).lower(): value for key, value in command.variables.items() if key.startswith(PREFIX)
    }
    return read_flags(command, {**petted, **flags})


def read_flags(command: Command, flags: Mapping[str, str]) -> Start:
    """What flags with underscores in their names say, wherever they are from. Raises UserError: one is wrong."""
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
        what = f'--nnodes is "{text}", a number that may change while the job runs; here it is fixed'
        raise UserError(what, where, (f"write --nnodes {most}, the number of machines that take part",))
    return number({"nnodes": least}, "nnodes", 1, _MOST_MACHINES, where)


def _slots(text: str, where: str) -> int:
    if text in {"auto", "gpu", "xpu"}:
        return 0
    if text == "cpu":
        what = '--nproc-per-node is "cpu", one process for each core; here it is a number, or auto'
        raise UserError(what, where, ("write the number; each process takes its share of the cores as threads anyway",))
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

"""Types for machines, clusters and ranks; parses launchers' variables, host names and addresses strictly."""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.config.job import SubmitOptions
from manyhands.core.errors import UserError
from manyhands.core.files import parse_count
from manyhands.core.world import ProcessInfo

LOOPBACK, DEFAULT_PORT = "127.0.0.1", 29500
JOB = "@JOB@"  # placeholder in a command for the scheduler's id or name of the job
DEVICE_INDEX = "MANYHANDS_DEVICE_INDEX"  # variable with the index of a worker's device
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Machine:
    """One machine of a cluster."""

    host: str  # name or address; for ssh it may be user@name
    slots: int = 0  # number of processes; 0 for one per accelerator, or one without accelerators
    devices: tuple[int, ...] = ()  # device indices of its processes, by rank; empty for 0, 1, 2 …
    port: int = 0  # of its ssh server, which differs for machines behind one address; 0 for ssh's default

    @property
    def address(self) -> str:
        """The host name or address, without the user."""
        return self.host.rpartition("@")[2]

    @property
    def name(self) -> str:
        """The unique name of a machine: its address, and its port if it has one."""
        return f"{in_brackets(self.address)}:{self.port}" if self.port else self.address

    @property
    def target(self) -> str:
        """The machine as written in a hostfile or list: user@host, or ssh://user@host:port if it has a port."""
        user = self.host.removesuffix(self.address)
        return f"ssh://{user}{self.name}" if self.port else user + in_brackets(self.address)


@dataclass(frozen=True)
class Cluster:
    """All machines of a job, in the order of their ranks."""

    machines: tuple[Machine, ...]  # the first one has rank 0
    master_port: int = 0  # of rank 0's store, on the first machine; 0 for a free port
    machine: int | None = None  # index of this machine in `machines`; None if the description doesn't have it
    source: str = field(default="", compare=False)  # file or variables that the cluster was read from, for messages
    # settings of the job in the same file: the line, and the matching option and value, or ""
    requests: tuple[tuple[str, str, str], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class LauncherPlace(ProcessInfo):
    """This process's rank and size, read from flags or a launcher's environment, without the job's options."""

    master_address: str = ""  # of rank 0's store, if `init` is empty
    master_port: int = 0
    # by field: the variable or rule that its value came from, for `manyhands explain`
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_values(cls, started_by: str, **values: tuple[Any, str]) -> "LauncherPlace":
        """Creates a LauncherPlace from a (value, origin) pair for each field."""
        origins = {key.removesuffix("_index"): origin for key, (_, origin) in values.items()}
        return cls(started_by=started_by, origins=origins, **{key: value for key, (value, _) in values.items()})


@dataclass(frozen=True)
class Rendezvous:
    """The number of processes on each machine, the index of this machine, and the store of the process group."""

    sizes: tuple[int, ...]  # processes on each machine, in the order of their ranks
    machine: int = 0  # index of this machine in `sizes`
    address: str = LOOPBACK  # where the store listens, on the first machine
    port: int = 0  # of the store; 0 for a free one
    devices: tuple[int, ...] = ()  # device indices of this machine's processes; empty for 0, 1, 2 …
    file: str = ""  # file:///PATH of a store on a shared disk, instead of a store at `address`


@dataclass(frozen=True)
class Address:
    """The network interface and address at which other machines reach a machine."""

    interface: str  # its name; empty if all processes are on one machine
    address: str  # of that interface

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that make Gloo, NCCL and HCCL use this interface."""
        return dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}


@dataclass(frozen=True)
class Submission:
    """A job to submit to a scheduler such as Slurm or Kubernetes."""

    name: str  # of the job, in the scheduler's lists
    command: tuple[str, ...]  # of each process; an argument may contain JOB
    wanted: SubmitOptions  # with the number of accelerators on each machine, 0 for none
    processes: int  # on each machine
    threads: int  # CPU cores for each process; 0 for the scheduler's own default


def in_brackets(address: str) -> str:
    """Puts an IPv6 address into brackets, so that a port can follow."""
    return f"[{address}]" if ":" in address else address


def at_line(where: str, line: int) -> str:
    """Formats "FILE, line N" for an error message. Omits an empty `where`, and a `line` of 0."""
    return ", ".join(filter(None, (where, f"line {line}" if line else "")))


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host(text: str) -> bool:
    if is_address(text):  # behind % Python accepts any text as the name of an interface
        return bool(re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]{1,64})?", text))
    return bool(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?", text)) and not text.isdecimal()


def number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Reads an integer >= 0 from a variable. Raises UserError if it is invalid, or unset and `default` is None."""
    text = variables.get(name, "").strip()
    if not text and default is not None:
        return default
    if (found := parse_count(text)) is None:
        message = f'{name} is not a number: "{text}"' if text else f"{name} is not set"
        raise UserError(message, "environment", (f"export {name}=0, 1, 2 …",))
    return found


def parse_bounded_number(name: str, text: str, least: int, most: int, where: str, hint: str) -> int:
    """Parses an integer. Raises UserError if the text is not an integer from `least` to `most`."""
    found = parse_count(text)
    if found is None or not least <= found <= most:
        raise UserError(f'{name} is "{text}"; expected a number from {least} to {most}', where, (hint,))
    return found


def first_set(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """Returns the name of the first variable that is set, or an empty string."""
    return next((name for name in names if variables.get(name)), "")


def master_port(variables: Mapping[str, str], default: int = DEFAULT_PORT, origin: str = "default") -> tuple[int, str]:
    """Returns (MASTER_PORT or the default, origin for messages). Raises UserError if MASTER_PORT is not a port."""
    text, hint = variables.get("MASTER_PORT", "").strip(), "set a valid port: export MASTER_PORT=29500"
    if not text:
        return default, origin
    return parse_bounded_number("MASTER_PORT", text, 1, 65535, "environment", hint), "MASTER_PORT"


def master_address(variables: Mapping[str, str], *, alone: bool) -> tuple[str, str] | None:
    """Returns (MASTER_ADDR, its origin). Without it, returns loopback if all processes share a machine (`alone`)."""
    if variables.get("MASTER_ADDR"):
        return variables["MASTER_ADDR"], "MASTER_ADDR"
    return (LOOPBACK, "all processes are on one machine") if alone else None


def derived_port(job: int) -> int:
    """Returns a port derived from a job's id, so that all processes of the job use it, and other jobs rarely do."""
    return 15000 + job % 10000  # above the well-known ports, below the ephemeral ones


def check_rank(rank: int, size: int, rank_word: str, size_word: str) -> None:
    """Raises UserError if a rank is out of range; `rank_word` and `size_word` name the flags or variables."""
    if not 0 <= rank < size:
        hint = f"number the ranks from 0 to {size - 1}" if size else f"set {size_word} to the number of processes"
        raise UserError(f"{rank_word} {rank} is out of range for {size_word} {size}", rank_word, (hint,))

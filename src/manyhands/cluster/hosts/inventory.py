"""Types for machines, clusters and ranks, as read from cluster files and launchers' environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.core.world import ProcessInfo

LOOPBACK = "127.0.0.1"
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
        """The host without the user."""
        return self.host.rpartition("@")[2]

    @property
    def name(self) -> str:
        """The unique name of a machine: its address, and its port if it has one."""
        return f"{in_brackets(self.address)}:{self.port}" if self.port else self.address

    @property
    def target(self) -> str:
        """The host as users write it, or an ssh address with its port."""
        user = self.host[: -len(self.address)] if self.address else self.host
        return f"ssh://{user}{self.name}" if self.port else self.host


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
    """This process's rank, as read from flags or a launcher's environment, without the job's options."""

    master_address: str = ""  # of rank 0's store, if `init` is empty
    master_port: int = 0
    # by field: the variable or rule that its value came from, for `manyhands explain`
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, started_by: str, **values: tuple[Any, str]) -> "LauncherPlace":
        """Returns an instance from each field's value and origin."""
        origins = {key.removesuffix("_index"): origin for key, (_, origin) in values.items()}
        return cls(started_by=started_by, origins=origins, **{key: value for key, (value, _) in values.items()})


@dataclass(frozen=True)
class Rendezvous:
    """The processes of all machines, and the index of this machine."""

    sizes: tuple[int, ...]  # processes on each machine, in the order of their ranks
    machine: int = 0  # index of this machine in `sizes`
    address: str = "127.0.0.1"  # where the store listens, on the first machine
    port: int = 0  # of the store; 0 for a free one
    devices: tuple[int, ...] = ()  # device indices of this machine's processes; empty for 0, 1, 2 …
    file: str = ""  # file:///PATH of a store on a shared disk, instead of a store at `address`


@dataclass(frozen=True)
class Address:
    """The address of a machine for the other machines."""

    interface: str  # its name; empty if all processes are on one machine
    address: str  # of that interface

    def environment(self) -> dict[str, str]:
        """Returns the variables that set this interface for the backends."""
        return dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}


@dataclass(frozen=True)
class Submission:
    """A job for a scheduler."""

    name: str  # of the job, in the scheduler's lists
    command: tuple[str, ...]  # of each process; an argument may contain JOB
    nodes: int = 1  # machines
    processes: int = 1  # on each machine
    accelerators: int = 0  # on each machine; 0 for none
    threads: int = 0  # CPU cores for each process; 0 for the scheduler's own default
    time_limit: str = ""  # in the scheduler's format; empty for its default
    options: tuple[str, ...] = ()  # further arguments for the scheduler, such as "--partition=gpu"
    image: str = ""  # the container image
    kind: str = "TrainJob"  # of the Kubernetes manifest
    runtime: str = "torch-distributed"  # the training runtime that a TrainJob refers to
    namespace: str = ""  # Kubernetes'; empty for the current one


def in_brackets(address: str) -> str:
    """Puts an IPv6 address into brackets, so that a port can follow."""
    return f"[{address}]" if ":" in address else address


def at_line(where: str, line: int) -> str:
    return f"{where}, line {line}" if where else f"line {line}"

"""The rank of this process and the number of processes, before and after rendezvous; and its share of a micro-batch."""

from dataclasses import dataclass

from manyhands.core.errors import UserError


@dataclass(frozen=True)
class World:
    """The rank and the device of this process in a run."""

    rank: int = 0  # 0 … size - 1; rank 0 is the main one
    size: int = 1  # number of processes over all machines
    local_rank: int = 0  # 0 … local_size - 1, on this machine
    local_size: int = 1  # processes on this machine
    device: str = "cpu"  # torch's name of the device of this process, such as cpu or cuda:1
    backend: str = ""  # torch.distributed's backend, or "" when the process is alone
    # timeout of collectives in seconds, also in groups of some processes; 0 for torch's default
    collective_timeout_s: float = 0.0

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class ProcessInfo:
    """How a process joins its group; decided before torch is imported."""

    rank: int = 0  # this process's rank
    size: int = 1  # number of processes
    local_rank: int = 0  # rank on this machine
    local_size: int = 1  # processes on this machine
    init: str = ""  # "tcp://host:port", "file:///path", "env://", or "" for a process on its own
    backend: str = "auto"  # torch.distributed's backend, or "auto" for the device's own
    device: str = "auto"  # "auto" or torch's name of a device type
    agent_store: bool = False  # True if a launcher already serves the store (its workers are all clients)
    started_by: str = "manyhands"  # words for the user: "manyhands", "torchrun", "--init", "environment", "Slurm" …
    join_warn_s: float = 30.0  # seconds after which missing ranks are named
    join_timeout_s: float = 600.0  # seconds after which the process gives up
    attempt: int = 0  # how many times the launcher has restarted its workers
    device_index: int | None = None  # number of this process's accelerator; None for the local rank's


@dataclass(frozen=True)
class Span:
    """The part of a BatchNorm group that a process holds."""

    group: int  # number of the group within the pass
    start: int  # first row in the process's own batch
    stop: int  # row after the last one
    size: int  # samples in the whole group, over all processes
    shared: int  # index in the list of groups that several processes hold, or -1 for a group of this process alone
    first: bool  # True on the process that holds the group's first sample


@dataclass(frozen=True)
class Share:
    """The samples of a process in a micro-batch."""

    start: int  # first sample, counted within the global batch
    stop: int  # sample after the last one; equal to start for a process without samples
    spans: tuple[Span, ...]  # the BatchNorm groups it holds, in order
    # sizes of the groups of this micro-batch that several processes hold; equal on all processes
    shared_groups: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.stop - self.start


def check_batch(batch: int, processes: int) -> None:
    if batch < processes:
        what = f"train.batch ({batch}) is smaller than the number of processes ({processes})"
        raise UserError(what, "train.batch", (f"set --batch {processes} or higher", "or use fewer processes"))

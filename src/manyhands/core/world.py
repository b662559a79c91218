"""Rank and size of the process group, before and after rendezvous, and the samples of a rank in a micro-batch."""

from dataclasses import dataclass

from manyhands.core.errors import UserError


@dataclass(frozen=True)
class World:
    """Rank, size and device of this process in a run."""

    rank: int = 0  # 0 … size - 1; rank 0 is the main process
    size: int = 1  # number of processes over all machines
    local_rank: int = 0  # 0 … local_size - 1, on this machine
    local_size: int = 1  # processes on this machine
    device: str = "cpu"  # torch's name of the device of this process, such as cpu or cuda:1
    backend: str = ""  # torch.distributed's backend, or "" without other processes
    # timeout of collectives in seconds, also in subgroups; 0 for torch's default
    collective_timeout_s: float = 0.0

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class ProcessInfo:
    """Rank, size and rendezvous address of this process, determined before torch is imported."""

    rank: int = 0  # rank of this process
    size: int = 1  # number of processes
    local_rank: int = 0  # rank on this machine
    local_size: int = 1  # processes on this machine
    init: str = ""  # "tcp://host:port", "file:///path", "env://", or "" for a single process
    backend: str = "auto"  # torch.distributed's backend, or "auto" for the device's own
    device: str = "auto"  # "auto" or torch's name of a device type
    agent_store: bool = False  # True if a launcher already serves the store, to which its workers connect
    started_by: str = "manyhands"  # for messages: "manyhands", "torchrun", "--init", "environment", "Slurm" …
    join_warn_s: float = 30.0  # seconds after which missing ranks are reported
    join_timeout_s: float = 600.0  # seconds after which the rendezvous fails
    attempt: int = 0  # number of restarts of the workers by the launcher
    device_index: int | None = None  # index of this process's accelerator; None: the local rank


@dataclass(frozen=True)
class Span:
    """Those samples of a BatchNorm group that are on one process."""

    group: int  # index of the group within the micro-batch
    start: int  # first row in the process's batch
    stop: int  # row after the last one
    size: int  # samples of the entire group, over all processes
    shared: int  # index in the list of groups on several processes, or -1 for a group on this process alone
    first: bool  # True on the process that holds the group's first sample


@dataclass(frozen=True)
class Share:
    """One process's samples of a micro-batch."""

    start: int  # first sample, by index in the global batch
    stop: int  # sample after the last one; equal to start for a process without samples
    spans: tuple[Span, ...]  # the BatchNorm groups on this process, in order
    # sizes of this micro-batch's groups that are on several processes; equal on all processes
    shared_groups: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.stop - self.start


def check_batch(batch: int, processes: int) -> None:
    if batch < processes:
        what = f"train.batch ({batch}) is smaller than the number of processes ({processes})"
        raise UserError(what, "train.batch", (f"set --batch {processes} or higher", "or use fewer processes"))

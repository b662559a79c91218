"""A job as a scheduler is told of it: plain values, which each scheduler's format writes down."""

from dataclasses import dataclass

# In a command: the scheduler's own number or name of the job.
JOB = "@JOB@"


@dataclass(frozen=True)
class Submission:
    """What to start, and on what."""

    name: str  # of the job, for the scheduler's lists
    command: tuple[str, ...]  # what each process runs; a word may hold JOB
    nodes: int = 1  # machines
    processes: int = 1  # on each machine
    accelerators: int = 0  # on each machine; 0 for none
    threads: int = 0  # CPU cores for each process; 0 for the scheduler's own default
    time_limit: str = ""  # in the scheduler's own words; empty for its default
    options: tuple[str, ...] = ()  # further words for the scheduler, such as "--partition=gpu"
    image: str = ""  # the container image
    kind: str = "TrainJob"  # of Kubernetes' manifest
    runtime: str = "torch-distributed"  # the training runtime that a TrainJob refers to
    namespace: str = ""  # Kubernetes'; empty for the current one

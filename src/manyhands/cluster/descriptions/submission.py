"""A job as a scheduler is told of it: plain values, which each scheduler's format writes down."""

from dataclasses import dataclass

# In a command: the scheduler's own number or name of the job.
JOB = "@JOB@"


@dataclass(frozen=True)
class Submission:
    """What to start, and on what.

    Attributes:
        name: of the job, for the scheduler's lists.
        command: what each process runs; a word may hold JOB.
        nodes: machines.
        processes: on each machine.
        accelerators: on each machine; 0 for none.
        threads: CPU cores for each process; 0 for the scheduler's own default.
        time_limit: in the scheduler's own words; empty for its default.
        options: further words for the scheduler, such as "--partition=gpu".
        image: the container image.
        kind: of Kubernetes' manifest.
        runtime: the training runtime that a TrainJob refers to.
        namespace: Kubernetes'; empty for the current one.
    """

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    processes: int = 1
    accelerators: int = 0
    threads: int = 0
    time_limit: str = ""
    options: tuple[str, ...] = ()
    image: str = ""
    kind: str = "TrainJob"
    runtime: str = "torch-distributed"
    namespace: str = ""

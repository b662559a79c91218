"""What a head has the agent of one machine start; travels as JSON."""

from dataclasses import dataclass, field
from typing import Any

from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.config.job import Job

# What each process runs, by name, since it lies above this package: our own tasks, or a script of the user's.
WORKER, SCRIPT = "manyhands.worker.entry", "manyhands.worker.script"
# Imports what CPU workers need before they are forked, and opens their data meanwhile.
PRELOAD = "manyhands.worker.preload"
# What starts and watches them: the only file of the agent's that imports torch.
ELASTIC = "manyhands.cluster.agents.elastic"


@dataclass(frozen=True)
class Orders:
    """One generation of workers, as one machine has to know it; `orders_for` puts it together."""

    argument: dict[str, Any]  # plain data: the task, the job, the run folder there, what the task needs besides
    logs: str  # folder for each worker's own output, <rank>.log; ranks/ of the run folder
    rendezvous: Rendezvous  # a size of 0: one process for each accelerator of this machine, or one
    device: str = "auto"  # "auto", "cpu" or the kind of accelerator
    threads: int = 0  # CPU threads for each process; 0 divides this machine's cores
    environment: dict[str, str] = field(default_factory=dict[str, str])  # variables for the workers
    script: tuple[str, ...] = ()  # the user's own training script and its words; empty for a task of ours
    generation: int = 0  # counts the starts of a run's processes
    term: int = 0  # of the head, without which the processes go on; 0 where they don't


def orders_for(
    job: Job,
    task: str,
    folder: str,
    rendezvous: Rendezvous,
    *,
    device: str = "",
    environment: dict[str, str] | None = None,
    generation: int = 0,
    **more: Any,
) -> Orders:
    """Returns the orders for one machine's agent.

    `folder` is the absolute path of the run folder there; without `device`, the job's counts. `more` is plain data that
    the task needs besides.
    """
    return Orders(
        {"task": task, "job": job.model_dump(mode="json"), "folder": folder, **more},
        f"{folder}/ranks",
        rendezvous,
        device or job.cluster.device,
        job.cluster.threads,
        environment or {},
        job.run.script if task == "train" else (),
        generation,
    )

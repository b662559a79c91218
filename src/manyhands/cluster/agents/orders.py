"""What a launcher has the agent of one machine start."""

from dataclasses import dataclass, field
from typing import Any

from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.config.job import Job

# Modules by name, since they lie above this package: what each process runs, which is a task of ours or a script of
# the user's, and what imports and opens everything that CPU workers need before they are forked.
WORKER, SCRIPT, PRELOAD = "manyhands.worker.entry", "manyhands.worker.script", "manyhands.worker.preload"
# Starts and watches them: the only file of the agent's that imports torch.
ELASTIC = "manyhands.cluster.agents.elastic"


@dataclass(frozen=True)
class Orders:
    """One generation of workers on one machine."""

    argument: dict[str, Any]  # plain data: the task, the job, the run folder there, what the task needs besides
    logs: str  # folder for each worker's own output, <rank>.log; ranks/ of the run folder
    rendezvous: Rendezvous  # a size of 0: one process for each accelerator of this machine, or one
    device: str = "auto"  # "auto", "cpu" or the kind of accelerator
    threads: int = 0  # CPU threads for each process; 0 divides this machine's cores
    environment: dict[str, str] = field(default_factory=dict[str, str])  # variables for the workers
    script: tuple[str, ...] = ()  # the user's own training script and its words; empty for a task of ours
    generation: int = 0  # counts the starts of a run's processes
    term: int = 0  # of the launcher, without which the processes continue; 0 where they don't


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
    """Returns the orders for one machine; `folder` is the absolute path of the run folder there.

    Without `device`, the job's counts. `more` is plain data that the task needs besides.
    """
    argument = {"task": task, "job": job.model_dump(mode="json"), "folder": folder, **more}
    script = job.run.script if task == "train" else ()
    device, threads = device or job.cluster.device, job.cluster.threads
    return Orders(argument, f"{folder}/ranks", rendezvous, device, threads, environment or {}, script, generation)

"""Has processes do something short, such as an evaluation, and keeps nothing of it but what they return."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from manyhands.cluster.agents.orders import orders_for
from manyhands.cluster.agents.start import open_here
from manyhands.cluster.agents.supervise import Watch, supervise
from manyhands.cluster.failures import Failed, as_error
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.config.job import Job
from manyhands.core.run_folder import RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.terminal import say
from manyhands.run.load import load_worker
from manyhands.run.train import failure_of, place_of


def take_part_or_start(job: Job, task: Literal["evaluate", "predict"], argument: dict[str, Any]) -> dict[str, Any]:
    """Does a worker's task in this process, where a launcher made it one of a group, else in processes of our own.

    Returns:
        What the task returned; nothing on processes of a group other than the first.

    Raises:
        ManyhandsError: the task failed.
    """
    process_info = place_of(job).process_info
    if process_info is None:
        return run_by_agent(job, {"task": task, **argument})
    work = load_worker("entry").TASKS[task]
    with _private_folder() as folder:
        try:
            found = work(job, process_info, folder, argument, say)
        except Failed as failed:
            raise as_error(failed.record) from failed.__cause__
    return found if process_info.rank == 0 else {}


def run_by_agent(job: Job, argument: dict[str, Any]) -> dict[str, Any]:
    """Runs a worker's task on the processes that the job names, on this machine, and keeps nothing of it.

    Args:
        job: that the task is about.
        argument: "task", and what it needs besides the job; plain data.

    Returns:
        What the first process returned.

    Raises:
        ManyhandsError: the task failed.
        KeyboardInterrupt: the user stopped it.
    """
    with _private_folder() as folder:
        orders = orders_for(job, folder=str(folder.path), rendezvous=Rendezvous((job.cluster.processes,)), **argument)
        ending = supervise([open_here(folder.ranks / "agent.log")], [orders], Watch())
        if ending.interrupted:
            raise KeyboardInterrupt  # there is nothing to save, and what a signal ended is no failure
        if not ending.ok:
            raise failure_of(folder, ending)
        return ending.returned[0]


@contextmanager
def _private_folder() -> Iterator[RunFolder]:
    """A run folder for the length of an evaluation, which nobody keeps."""
    with scratch("private") as private:
        folder = RunFolder(private)
        folder.failures.mkdir(parents=True)
        yield folder

"""What runs spend their time on: told of one that was, or traced in a short one."""

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.report.read import RunData, read_run
from manyhands.run.find import find_run
from manyhands.run.train import Outcome, train


def read_named(word: str) -> RunData | None:
    """The run of this name; None where there is none, so that the word may be a data set's.

    Raises:
        UserError: what is there can't be read.
    """
    try:
        folder = find_run(word, parts=False)
    except UserError:
        return None
    return read_run(folder.path)


def trace(job: Job, steps: int, *, quiet: bool) -> Outcome:
    """Makes some updates of a job on this machine's processes, and writes their trace into a run folder."""
    run = job.run.model_copy(update={"trace_steps": steps, "report": False})
    return train(job.model_copy(update={"run": run}), quiet=quiet)

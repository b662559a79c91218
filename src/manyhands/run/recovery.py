"""Goes on by itself after a fault: the processes are started again from what was saved, where that is of any use."""

import time
from collections.abc import Callable
from contextlib import suppress

from manyhands.cluster.agents.supervise import Ending, first_cause
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_FAILED, RunError
from manyhands.core.folder import RunFolder
from manyhands.core.records import MACHINE_LOST, PROCESS_ENDED, Event, Failure, append, read_lines
from manyhands.core.stops import saved_step

# The same error again before so many updates is one that comes every time.
SOON_UPDATES = 20
# Starts in a row after which nothing new was saved.
MOST_IN_VAIN = 3


class LostWorkError(RunError):
    """What was trained is on no machine that is left."""


class Recovery:
    """Starts the processes of a run again after each fault that a new start may mend.

    Args:
        job: what to do.
        folder: where the run is kept.
        say: tells the user, a sentence and its level.
        too_few: why there is nobody to start the processes on, or nothing.

    Attributes:
        job: as the next start has it.
        number: of the next start, counted from 0.
    """

    def __init__(
        self, job: Job, folder: RunFolder, say: Callable[[str, str], object], too_few: Callable[[], str] = str
    ) -> None:
        self.job, self.number = job, 0
        self._folder, self._say, self._too_few = folder, say, too_few
        self._budget, self._before = RestartBudget(folder), saved_step(folder)

    def again(self, ending: Ending) -> bool:
        """Whether the run is to go on by another start; notes what has happened, or says why there is none."""
        if ending.ok or ending.interrupted or ending.refused or not self.job.cluster.recovers:
            return False
        cause = first_cause(ending)
        useless, too_few = self._budget.spend(cause, script=bool(self.job.run.script)), self._too_few()
        if too_few or (useless and self.number):
            self._say(too_few or useless, "WARNING")
        if useless or too_few:
            return False
        what = cause.what if cause else f"the agent that watches the processes failed: {ending.broken}"
        step = saved_step(self._folder)
        going_on = "begins again" if step is None else f"goes on from step {step}"
        _note(self._folder, cause, self.number, f"{what}: the run {going_on}", step)
        self.number += 1
        if step != self._before:
            self.job = gone_on_with(self.job)
        return True


class RestartBudget:
    """Whether another start is of any use.

    Args:
        folder: where the run is kept.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._began, self._saved = time.time(), saved_step(folder)
        self._in_vain = 0
        self._last: tuple[str, int, int] | None = None

    def spend(self, cause: Failure | None, *, script: bool) -> str:
        """Counts a fault; why the run can't go on by itself, or nothing where it may."""
        began, self._began = self._began, time.time()
        # What comes from outside may come to anybody; an error of the program's own likely comes again.
        own = cause is not None and cause.error not in {MACHINE_LOST, PROCESS_ENDED}
        # What we could name ourselves, such as a loss that is no number or a full disk, comes again.
        if cause is not None and (cause.exit_code != EXIT_FAILED or cause.error == RunError.__name__):
            return "a new start would not mend that"
        if own and (script or not self._trained_since(began)):
            return "it failed before its first update, so a new start would fail as well"
        saved = saved_step(self._folder)
        this = (cause.error, cause.rank, saved or 0) if cause and own else None
        if this and self._last and this[:2] == self._last[:2] and this[2] - self._last[2] < SOON_UPDATES:
            return f"the same error twice within {SOON_UPDATES} updates: the run does not go on by itself"
        self._last = this
        self._in_vain = 0 if saved != self._saved else self._in_vain + 1
        self._saved = saved
        if self._in_vain >= MOST_IN_VAIN:
            return f"{MOST_IN_VAIN} starts in a row saved nothing new: the run does not go on by itself"
        return ""

    def _trained_since(self, began: float) -> bool:
        return any(line.get("time", 0.0) >= began for line in read_lines(self._folder.metrics))


def gone_on_with(job: Job) -> Job:
    """The job as a later start has it that finds what an earlier one saved: not from what the user named, or anew."""
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})})


def _note(folder: RunFolder, cause: Failure | None, number: int, told: str, step: int | None) -> None:
    """In the diary; the failed processes' own records make room for those of the next start."""
    rank, at = (cause.rank, cause.time) if cause else (0, time.time())
    with suppress(OSError):
        append(folder.events, Event(time=at, kind="restarted", rank=rank, step=step, message=told))
        kept = folder.failures / f"start-{number}"
        for record in folder.failures.glob("*.json"):
            kept.mkdir(exist_ok=True)
            record.replace(kept / record.name)

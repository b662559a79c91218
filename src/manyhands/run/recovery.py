"""Goes on by itself after a fault: the processes are started again from what was saved, where that is of any use."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from manyhands.checkpoint.saved import saved_step
from manyhands.cluster.agents.ending import Ending, first_cause
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_FAILED, RunError
from manyhands.core.records import (
    MACHINE_LOST,
    PROCESS_ENDED,
    Event,
    Failure,
    StepMetrics,
    append,
    read_lines,
    write_json,
)
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import ALIKE_S, ASIDE_MOST_S, ASIDE_S, RESTART_S
from manyhands.report.follow import end_of
from manyhands.report.read import parse_metrics

# The same error again before so many updates is one that comes every time.
SOON_UPDATES = 20
# The same error at the same line so often within ALIKE_S is one that comes every time, too.
MOST_ALIKE = 3
# Starts in a row after which nothing new was saved.
MOST_IN_VAIN = 3
_RECENT = 20


class LostWorkError(RunError):
    """What was trained is on no machine that is left."""


class RunMachines:
    """Who takes part, as far as a recovery asks. On one machine nobody is lost, and nobody comes."""

    def too_few(self) -> str:
        """Why there is nobody to start the processes on, or nothing."""
        return ""

    def on_trial(self) -> list[str]:
        """Machines that have just come; what fails before they have done anything is not the run's fault."""
        return []

    def coming(self) -> list[str]:
        """Machines that the next start has."""
        return []


class Recovery:
    """Starts the processes of a run again after each fault that a new start may mend.

    Args:
        job: what to do.
        folder: where the run is kept.
        say: tells the user, a sentence and its level.
        machines: who takes part.

    Attributes:
        job: as the next start has it.
        number: of the next start, counted from 0.
    """

    def __init__(
        self, job: Job, folder: RunFolder, say: Callable[[str, str], object], machines: RunMachines | None = None
    ) -> None:
        self.job, self.number = job, 0
        self._folder, self._say, self._machines = folder, say, machines or RunMachines()
        self._budget, self._before = RestartBudget(folder), saved_step(folder)

    def again(self, ending: Ending) -> bool:
        """Whether the run is to go on by another start; notes what has happened, or says why there is none."""
        if ending.interrupted or not self.job.cluster.recovers:
            return False
        if ending.ok:
            return ending.regrouped and self._regrouped(ending)
        cause = first_cause(ending)
        trial = "" if from_outside(cause) else " and ".join(self._machines.on_trial())
        if trial:
            what = cause.what if cause else ending.refused.message if ending.refused else ending.broken
            return self._restart("restarted", cause, f"the start with {trial} failed ({what})")
        if ending.refused:
            return False
        useless, too_few = self._budget.spend(cause, script=bool(self.job.run.script)), self._machines.too_few()
        if too_few or (useless and self.number):
            self._say(too_few or useless, "WARNING")
        if useless or too_few:
            return False
        what = cause.what if cause else f"the agent that watches the processes failed: {ending.broken}"
        return self._restart("restarted", cause, what)

    def _regrouped(self, ending: Ending) -> bool:
        """The processes were asked to leave because somebody has come; they may have been at their end just then."""
        if all(value["status"] == "finished" for value in ending.returned.values()):
            return False
        if why := self._machines.too_few():
            self._say(why, "WARNING")
            return False
        self._budget.begin()
        return self._restart("regrouped", None, f"{' and '.join(self._machines.coming())} can join")

    def _restart(self, kind: str, cause: Failure | None, what: str) -> bool:
        step = saved_step(self._folder)
        restart = "restarting from the beginning" if step is None else f"restarting from step {step}"
        _note(self._folder, kind, cause, self.number, f"{what}: {restart}", step)
        self.number += 1
        if step != self._before:
            self.job = gone_on_with(self.job)
        return True


def from_outside(cause: Failure | None) -> bool:
    """True for what may come to any process, whatever it does; an error of the program's own likely comes again."""
    return cause is not None and cause.error in {MACHINE_LOST, PROCESS_ENDED}


def failed_rank(ending: Ending) -> int | None:
    """Of the process that has failed; None where a machine is lost, or a tunnel between two has ended."""
    cause = first_cause(ending)
    return None if cause is None or cause.error == MACHINE_LOST else cause.rank


def worth_a_start(folder: RunFolder) -> bool:
    """Whether enough is left to train, after the update that goes on, for another start to be of any use."""
    found = [parse_metrics(line, folder) for line in end_of(folder.metrics)]
    steps = [one for one in found if isinstance(one, StepMetrics)][-_RECENT:]
    if not steps:
        return False
    first, last = steps[0], steps[-1]
    left = last.total_steps - last.step - 1
    return left > 0 and (first is last or left * (last.time - first.time) > RESTART_S * (last.step - first.step))


class Setbacks:
    """How often each machine has failed before it was of much use."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._since: dict[str, int] = {}

    def begin(self, names: Sequence[str], step: int) -> None:
        """These take part from a step on."""
        self._since = {name: self._since.get(name, step) for name in names}

    def fails(self, name: str, step: int) -> float:
        """Counts a failure after a committed step; for how many seconds the machine is set aside."""
        useful = step - self._since.pop(name, step) >= SOON_UPDATES
        times = self._times[name] = 1 if useful else self._times.get(name, 0) + 1
        return min(ASIDE_MOST_S, ASIDE_S * 2 ** (times - 2)) if times > 1 else 0.0


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
        self._times: dict[str, list[float]] = {}

    def begin(self) -> None:
        """A start."""
        self._began = time.time()

    def spend(self, cause: Failure | None, *, script: bool) -> str:
        """Counts a fault; why the run can't go on by itself, or nothing where it may."""
        began = self._began
        self.begin()
        own = cause is not None and not from_outside(cause)
        # What we could name ourselves, such as a loss that is no number or a full disk, comes again.
        if cause is not None and (cause.exit_code != EXIT_FAILED or cause.error == RunError.__name__):
            return "a restart would not fix this error"
        if own and (script or not self._trained_since(began)):
            return "the run failed before its first update, so a restart would fail too"
        saved = saved_step(self._folder)
        this = (cause.error, cause.rank, saved or 0) if cause and own else None
        if this and self._last and this[:2] == self._last[:2] and this[2] - self._last[2] < SOON_UPDATES:
            return f"the same error twice within {SOON_UPDATES} updates: not restarting"
        self._last = this
        if cause and own and not cause.consequence:
            times = self._times.setdefault(_raised_at(cause), [])
            times.append(cause.time)
            if len(times) >= MOST_ALIKE and times[-1] - times[-MOST_ALIKE] < ALIKE_S:
                limit = f"{MOST_ALIKE} times within {ALIKE_S / 60:.0f} minutes"
                return f"the same error {limit}: not restarting"
        self._in_vain = 0 if saved != self._saved else self._in_vain + 1
        self._saved = saved
        if self._in_vain >= MOST_IN_VAIN:
            return f"{MOST_IN_VAIN} starts in a row saved nothing new: not restarting"
        return ""

    def _trained_since(self, began: float) -> bool:
        return any(line.get("time", 0.0) >= began for line in read_lines(self._folder.metrics))


def _raised_at(cause: Failure) -> str:
    """The exception and the last line of code in its traceback; its message, which may have numbers, is left out."""
    lines = [line.strip() for line in cause.traceback.splitlines() if line.lstrip().startswith("File ")]
    return f"{cause.error} {lines[-1] if lines else cause.where}"


def gone_on_with(job: Job) -> Job:
    """The job as a later start has it that finds what an earlier one saved: not from what the user named, or anew."""
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})})


def _note(folder: RunFolder, kind: str, cause: Failure | None, number: int, message: str, step: int | None) -> None:
    """Adds an event, and removes the failed processes' own records for those of the next start."""
    rank, at = (cause.rank, cause.time) if cause else (0, time.time())
    with suppress(OSError):
        append(
            folder.events,
            Event(
                time=at, kind=kind, rank=rank, step=step, message=message, data={"host": cause.host if cause else ""}
            ),
        )
        kept = folder.failures / f"start-{number}"
        for record in folder.failures.glob("*.json"):
            kept.mkdir(exist_ok=True)
            record.replace(kept / record.name)
        if cause and not (own := kept / f"{cause.rank}.json").exists():
            write_json(own, cause)

"""Restarts the processes of a run after a fault, from the newest checkpoint, unless a restart would not help.

After a fault, `supervise_once` (cluster/agents/supervise.py) lets the workers save, stops the workers and returns an
`Ending`. `RestartPolicy.next_restart` decides on a restart, `Membership.record_ending` (run/machines.py) updates the
states of the machines, and `StartSetup` (run/start.py) prepares the next start on the remaining machines. During
training, `WatchHooks.regroups` contacts lost machines. core/timeouts.py has the time limits.

A *start* is one launch of the processes on all machines of the run; a restart is another start of the same launcher.
`number` counts the starts of a launcher from 0. `generation` is this number in an agent's orders; in a `RunMachine`, it
is the number of the last start with the machine. `term` (cluster/agents/folders.py) counts a detached run's launchers.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from manyhands.checkpoint.folders import saved_step
from manyhands.cluster.agents import connection, protocol
from manyhands.cluster.agents.machines import SOON_UPDATES
from manyhands.cluster.agents.supervise import WatchHooks, supervise_once
from manyhands.cluster.failures import Ending, first_cause
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_FAILED, RunError
from manyhands.core.records import MACHINE_LOST, PROCESS_ENDED, Failure, StepMetrics, read_lines, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import ALIKE_S, RESTART_S
from manyhands.report import follow, read
from manyhands.run.outcome import record_event

MOST_ALIKE = 3  # the same error this often within ALIKE_S would occur again after every restart
MOST_IN_VAIN = 3  # starts in a row that saved nothing new
Say = Callable[[str, str], object]  # prints a sentence, with its log level
# Prepares the start with this index, which may drop or add machines.
Prepare = Callable[[Job, int], Mapping[connection.AgentConnection, protocol.Orders]]


class RestartHooks:
    """Decisions about restarts that depend on the machines; `Membership` overrides these for several machines."""

    def shortage_reason(self) -> str:
        """Returns the reason why the run can't continue on the remaining machines, or an empty string."""
        return ""

    def newly_joined(self) -> list[str]:
        """Returns the names of machines that joined with the current start; [] after its first update."""
        return []

    def joining_next(self) -> list[str]:
        """Returns the names of machines that will join with the next start of the processes."""
        return []

    def record_ending(self, ending: Ending) -> None:
        """Records lost and failed machines before the next start."""


def run_to_end(
    job: Job, folder: RunFolder, hooks: RestartHooks, orders: Prepare, watch: WatchHooks, say: Say
) -> Ending:
    """Starts a run's processes, and restarts them after faults that a restart may fix; returns the last `Ending`."""
    policy, number, first_step = RestartPolicy(job, folder, say), 0, saved_step(folder)
    while True:
        ending = supervise_once(orders(job, number), watch)
        restart = policy.next_restart(ending, hooks)
        if restart is None:
            return ending
        step = saved_step(folder)
        where = "restarting from the beginning" if step is None else f"restarting from step {step}"
        _record_restart(folder, restart, number, f"{restart.reason}: {where}", step)
        number += 1
        if step != first_step:  # from now on this run's own checkpoints count
            job = resuming_job(job)
        hooks.record_ending(ending)


@dataclass(frozen=True)
class Restart:
    """The decision to start the processes again."""

    kind: str  # of the event: "restarted", or "regrouped" for a machine that joins
    reason: str  # a sentence for the user
    cause: Failure | None = None  # the fault


class RestartPolicy:
    """Decides whether to start the processes again after a start has ended."""

    def __init__(self, job: Job, folder: RunFolder, say: Say) -> None:
        self._folder, self._say = folder, say
        self._recovers, self._script = job.cluster.recovers, bool(job.run.script)
        self._began, self._saved = time.time(), saved_step(folder)
        self._starts = self._in_vain = 0
        self._last: tuple[str, int, int] | None = None
        self._times: dict[str, list[float]] = {}  # of failures, by the error's type and the line that raised it

    def next_restart(self, ending: Ending, machines: RestartHooks) -> Restart | None:
        """Returns the restart after `ending`; None if the run ends. Prints the reason if a fault ends the run."""
        self._starts += 1
        if ending.interrupted or not self._recovers:
            return None
        if ending.ok:
            return self._restart_to_regroup(ending, machines) if ending.regrouped else None
        cause = first_cause(ending)
        trial = "" if is_external_fault(cause) else " and ".join(machines.newly_joined())
        if trial:
            return Restart("restarted", f"starting with {trial} failed ({describe_failure(ending)})", cause)
        if ending.refused:
            return None
        useless, too_few = self.count_fault(cause), machines.shortage_reason()
        if useless or too_few:
            if too_few or self._starts > 1:
                self._say(too_few or useless, "WARNING")
            return None
        broken = f"the agent that watches the processes failed: {ending.broken}"
        return Restart("restarted", cause.what if cause else broken, cause)

    def _restart_to_regroup(self, ending: Ending, machines: RestartHooks) -> Restart | None:
        """Returns a restart with the new machines, or None if the run is finished or has too few machines."""
        if all(value["status"] == "finished" for value in ending.returned.values()):
            return None
        if why := machines.shortage_reason():
            self._say(why, "WARNING")
            return None
        self._began = time.time()
        return Restart("regrouped", f"{' and '.join(machines.joining_next()) or 'a machine'} can join")

    def count_fault(self, cause: Failure | None) -> str:
        """Counts a fault. Returns the reason why a restart would not help; an empty string if it may help."""
        began, self._began = self._began, time.time()
        own = cause is not None and not is_external_fault(cause)
        # Errors that manyhands explains itself, such as a loss that is not finite or a full disk, would occur again.
        if cause is not None and (cause.exit_code != EXIT_FAILED or cause.error == RunError.__name__):
            return "a restart would not fix this error"
        lines = read_lines(self._folder.metrics) if own else ()
        if own and (self._script or not any(line.get("time", 0.0) >= began for line in lines)):
            return "the run failed before its first update, so a restart would fail too"
        saved = saved_step(self._folder)
        this = (cause.error, cause.rank, saved or 0) if cause and own else None
        if this and self._last and this[:2] == self._last[:2] and this[2] - self._last[2] < SOON_UPDATES:
            return f"the same error twice within {SOON_UPDATES} updates: not restarting"
        self._last = this
        if cause and own and not cause.consequence:
            frames = [line.strip() for line in cause.traceback.splitlines() if line.lstrip().startswith("File ")]
            times = self._times.setdefault(f"{cause.error} {frames[-1] if frames else cause.where}", [])
            times.append(cause.time)
            if len(times) >= MOST_ALIKE and times[-1] - times[-MOST_ALIKE] < ALIKE_S:
                limit = f"{MOST_ALIKE} times within {ALIKE_S / 60:.0f} minutes"
                return f"the same error {limit}: not restarting"
        self._in_vain = 0 if saved != self._saved else self._in_vain + 1
        self._saved = saved
        if self._in_vain >= MOST_IN_VAIN:
            return f"{MOST_IN_VAIN} starts in a row saved nothing new: not restarting"
        return ""


def is_external_fault(cause: Failure | None) -> bool:
    """Returns True for a lost machine or a killed process; False for an error of the program, which may recur."""
    return cause is not None and cause.error in {MACHINE_LOST, PROCESS_ENDED}


def describe_failure(ending: Ending) -> str:
    cause = first_cause(ending)
    return cause.what if cause else ending.refused.message if ending.refused else ending.broken


def worth_restarting(folder: RunFolder) -> bool:
    """Returns True if the updates after the current one will take longer than a restart."""
    found = [read.parse_metrics(line, folder) for line in follow.last_records(folder.metrics)]
    steps = [one for one in found if isinstance(one, StepMetrics)][-20:]
    if not steps:
        return False
    first, last = steps[0], steps[-1]
    left = last.total_steps - last.step - 1
    return left > 0 and (first is last or left * (last.time - first.time) > RESTART_S * (last.step - first.step))


def resuming_job(job: Job) -> Job:
    """Returns the job for a restart: it resumes from this run's checkpoints, whatever the user's --resume was."""
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})})


def _record_restart(folder: RunFolder, restart: Restart, number: int, message: str, step: int | None) -> None:
    """Records a restart as an event, and moves the failure records of processes to a subfolder."""
    cause = restart.cause
    rank, at, host = (cause.rank, cause.time, cause.host) if cause else (0, time.time(), "")
    record_event(folder, restart.kind, message, time=at, rank=rank, step=step, data={"host": host})
    with suppress(OSError):
        kept = folder.failures / f"start-{number}"
        for record in folder.failures.glob("*.json"):
            kept.mkdir(exist_ok=True)
            record.replace(kept / record.name)
        if cause and not (own := kept / f"{cause.rank}.json").exists():
            write_json(own, cause)

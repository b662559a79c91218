"""Monitors of a run: slow ranks and stalls, time lost to communication, a diverging loss."""

import math
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from manyhands.core.run_folder import resume_command
from manyhands.core.world import World
from manyhands.sync.choose import EXACT, choose, words_of
from manyhands.sync.costs import Cost, LinkCase
from manyhands.sync.options import SyncOptions
from manyhands.sync.synchronizer import Synchronizer, Timed
from manyhands.train.heartbeat import stall_message
from manyhands.train.journal import Journal

# A process is slow that takes so many times as long as the others' median, in so many agreements one after the other.
_SLOW, _TIMES = 1.3, 3


@dataclass
class Watcher:
    """Compares the speeds of all processes, reports slow ranks and stalls, and adapts local steps to the link."""

    synchronizer: Synchronizer  # what this process waits for
    cost: Cost  # the method, with its pace
    world: World  # who takes part
    hosts: list[str]  # name of each rank's machine
    _waited_s: float = field(default=0.0, init=False)
    _slow: list[int] = field(default_factory=list[int], init=False)
    _reported: set[int] = field(default_factory=set[int], init=False)
    _stood_s: float = field(default=0.0, init=False)
    _stalls_s: list[float] = field(default_factory=list[float], init=False)

    @property
    def timed(self) -> Timed:
        """The synchronizer's measured times."""
        if self.synchronizer.timed is None:
            raise ValueError("the sync method measures no times")
        return self.synchronizer.timed

    def mine(self, seconds: float, steps: int) -> list[float]:
        """Returns numbers to sum over all processes: the seconds per step and of the last exchange, by rank.

        `seconds` and `steps` count since the last status round.
        """
        waited_s, self._waited_s = self.timed.waited_s - self._waited_s, self.timed.waited_s
        self._stood_s = waited_s
        step_s = (seconds - waited_s) / max(1, steps)
        own = [rank == self.world.rank for rank in range(self.world.size)]
        return [*(step_s * one for one in own), *(self.timed.exchange_s * one for one in own)]

    def observe(self, values: list[float], step: int, journal: Journal) -> Cost:
        """Reports slow ranks from the sums of `mine`, equally on all processes; returns the current method."""
        speeds_s, exchanges_s = values[: self.world.size], values[self.world.size :]
        self._name_the_slow(speeds_s, step, journal)
        before, now = self.cost, self.synchronizer.adapt_pace(speeds_s, exchanges_s)
        if now is not None:
            self.cost = now
            longer = (now.every, now.delay) > (before.every, before.delay)
            speed = "take longer" if longer else "are faster"
            every, delay = f"{now.every} steps (was {before.every})", f"{now.delay} steps (was {before.delay})"
            said = f"exchanges {speed} than before; sync.every is now {every}, sync.delay {delay}"
            journal.event("sync", said, step, every=now.every, delay=now.delay, method=now.method)
        return self.cost

    def name_a_stall(self, waited_s: float, step: int, journal: Journal) -> None:
        """Reports a stall that is much longer than usual; `waited_s`: the wait of this process in the status round."""
        stood_s = self._stood_s + waited_s
        # The first time counts how unequally processes have started.
        usual_s = statistics.median(self._stalls_s) if self._stalls_s else stood_s
        self._stalls_s = [*self._stalls_s[-4:], stood_s]
        if message := stall_message(stood_s, usual_s, linked=len({*self.hosts}) > 1):
            journal.event("stall", message, step, seconds=stood_s)

    def _name_the_slow(self, speeds: list[float], step: int, journal: Journal) -> None:
        slowest = max(range(len(speeds)), key=speeds.__getitem__)
        usual_s = statistics.median([*speeds[:slowest], *speeds[slowest + 1 :]])
        if not math.isfinite(usual_s) or speeds[slowest] <= _SLOW * usual_s:
            self._slow.clear()
            return
        self._slow.append(slowest)
        if len(self._slow) >= _TIMES and set(self._slow[-_TIMES:]) == {slowest} and slowest not in self._reported:
            self._reported.add(slowest)
            message = (
                f"rank {slowest} on {self.hosts[slowest]} takes {speeds[slowest]:.3g} s a step, the other ranks "
                f"{usual_s:.3g} s, so the other ranks are idle {1 - usual_s / speeds[slowest]:.0%} of the time"
            )
            journal.event("slow", message, step, rank=slowest)


# Less than this share of the time isn't worth a line.
_LONG = 1 / 3
# The first step starts everything; what follows must be a few steps, or long ones.
_FEW_STEPS, _LONG_S = 3, 5.0
# The part of computing in which gradients are ready to be sent: most of the backward pass.
_BACKWARD = 0.5


@dataclass
class CommunicationMonitor:
    """Measures the time that processes wait for each other if gradients are averaged in every update.

    On a CPU, the waiting time is the time in which the training thread does not compute. Accelerators compute
    asynchronously; there the time of an update without communication was measured before.
    """

    # measures the link and says what decides the costs of agreeing, for a step that computes for so many seconds;
    # a collective
    case: Callable[[float], LinkCase]
    options: SyncOptions  # of the sync methods
    without: dict[str, str]  # methods that the job rules out, and why
    compute_s: float = 0.0  # of a step, on accelerators; 0 on a CPU
    # seconds since the last agreement that weren't waited for others
    waited_for_data_s: Callable[[], float] = lambda: 0.0
    run: str = "RUN"  # the run folder
    _own_s: float = field(default_factory=time.thread_time, init=False)
    _stood_s: float = field(default=0.0, init=False)
    _all_s: float = field(default=0.0, init=False)
    _first: int = field(default=-1, init=False)
    _reported: bool = field(default=False, init=False)

    def mine(self, seconds: float, steps: int) -> list[float]:
        """Returns numbers to sum over all processes, as `Watcher.mine`: the seconds of waiting, and all seconds."""
        before, self._own_s = self._own_s, time.thread_time()
        busy_s = self.compute_s * steps if self.compute_s else self._own_s - before
        return [max(0.0, seconds - busy_s - self.waited_for_data_s()), seconds]

    def observe(self, values: list[float], step: int, processes: int, journal: Journal) -> None:
        """Reports a large share of communication, the same on all processes; a collective if it reports."""
        if self._first < 0:
            self._first = step
            return
        self._stood_s, self._all_s = self._stood_s + values[0], self._all_s + values[1]
        steps = step - self._first
        if self._reported or (steps < _FEW_STEPS and self._all_s < _LONG_S * processes):
            return
        share = self._stood_s / max(self._all_s, 1e-9)
        if share > _LONG:
            self._reported = True
            step_s = self._all_s / processes / steps
            journal.event("sync", self._line(share, step_s), step, share=share, step_s=step_s)

    def _line(self, share: float, step_s: float) -> str:
        computing_s = (1 - share) * step_s
        case = self.case(computing_s)
        choice = choose(replace(case, backward_s=_BACKWARD * computing_s), self.options, without=self.without)
        chosen = choice.chosen
        said = f"communication between machines takes {share:.0%} of the {step_s:.3g} s per step"
        if chosen.method == EXACT:
            return f"{said}; --sync auto would also choose {EXACT}: {choice.reason}"
        resume = resume_command(Path(self.run), "--set sync.method=auto", 'sync__method="auto"')
        change = f"manyhands stop {shlex.quote(self.run)}, then {resume}"
        return f"{said}; --sync auto would take about {chosen.step_s:.3g} s ({words_of(chosen)}): {change}"


# So many times what the loss began at, so many records in a row: a high rate's first steps may throw it up for once.
TIMES, RECORDS = 3.0, 3
ADVICE = "reduce train.lr, set train.warmup_epochs = 1, or set train.clip = 1.0"


@dataclass
class Divergence:
    """Compares the loss of each record with the first loss, or with the loss of random guesses if that is larger."""

    classes: int  # number of classes
    _began: float = math.nan
    _high: int = 0
    _reported: bool = False

    def observe(self, loss: float) -> str:
        """Returns a warning, once, if the loss stays far above the first loss; else an empty string."""
        if math.isnan(self._began):
            self._began = loss
        # A resumed run begins with a small loss, which may well grow threefold.
        limit = TIMES * max(self._began, math.log(max(2, self.classes)))
        self._high = self._high + 1 if loss > limit else 0
        if self._high < RECORDS or self._reported:
            return ""
        self._reported = True
        return f"training diverges: the loss rose from {self._began:.4g} to {loss:.4g} (do: {ADVICE})"

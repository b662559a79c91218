"""Notices which process is slow, and when training stands still; keeps local steps in time with the link."""

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from manyhands.core.journal import Journal
from manyhands.core.world import World
from manyhands.sync.costs import Cost
from manyhands.sync.local import LocalSteps
from manyhands.sync.methods.local import fitting_delay, fitting_steps
from manyhands.sync.options import SyncOptions
from manyhands.train.agreeing import pace_of

# The pace changes where another would be so many times as long or as short, and more than a step; less is noise.
_CHANGE = 1.5
# A process is slow that takes so many times as long as the others' median, in so many agreements one after the other.
_SLOW, _TIMES = 1.3, 3
# Standing still is told of that takes so long, and so many times as long as it does usually.
_STALL_S, _STALL = 3.0, 3.0


class Timed(Protocol):
    """What is waited for.

    Attributes:
        waited_s: time that training stood still for others.
        exchange_s: how long the last exchange beside training took; 0 where there is none.
    """

    waited_s: float
    exchange_s: float


T = TypeVar("T", bound=Timed)


@dataclass
class Watcher(Generic[T]):
    """What all processes tell each other of their speed, and what is said of it.

    Attributes:
        timed: what this process waits for.
        cost: the method.
        world: who takes part.
        hosts: name of each rank's machine.
    """

    timed: T
    cost: Cost
    world: World
    hosts: list[str]
    _waited_s: float = field(default=0.0, init=False)
    _slow: list[int] = field(default_factory=list[int], init=False)
    _told: set[int] = field(default_factory=set[int], init=False)
    _stood_s: float = field(default=0.0, init=False)
    _stalls_s: list[float] = field(default_factory=list[float], init=False)

    def mine(self, seconds: float, steps: int) -> list[float]:
        """Numbers to be added up over all processes: each one's seconds a step, and of the last exchange.

        Args:
            seconds: since the last agreement.
            steps: made in that time.
        """
        waited_s, self._waited_s = self.timed.waited_s - self._waited_s, self.timed.waited_s
        self._stood_s = waited_s
        step_s = (seconds - waited_s) / max(1, steps)
        own = [rank == self.world.rank for rank in range(self.world.size)]
        return [*(step_s * one for one in own), *(self.timed.exchange_s * one for one in own)]

    def heed(self, told: list[float], step: int, journal: Journal) -> Cost:
        """Says what the sums of `mine` show, alike on all processes; returns the method as it is from now on."""
        self._name_the_slow(told[: self.world.size], step, journal)
        return self.cost

    def name_a_stall(self, waited_s: float, step: int, journal: Journal) -> None:
        """Says so where training has stood still much longer than it does usually, as where a link was cut.

        Args:
            waited_s: how long this process stood still while all told their numbers.
            step: updates made.
            journal: is told.
        """
        stood_s = self._stood_s + waited_s
        # The first time counts how unequally processes have started.
        usual_s = statistics.median(self._stalls_s) if self._stalls_s else stood_s
        self._stalls_s = [*self._stalls_s[-4:], stood_s]
        if stood_s > max(_STALL_S, _STALL * usual_s):
            what = f"training stood still for {stood_s:.3g} s, for the link or another process (usual: {usual_s:.2g} s)"
            journal.event("stall", what, step, seconds=stood_s)

    def _name_the_slow(self, speeds: list[float], step: int, journal: Journal) -> None:
        slowest = max(range(len(speeds)), key=speeds.__getitem__)
        usual_s = statistics.median([*speeds[:slowest], *speeds[slowest + 1 :]])
        if not math.isfinite(usual_s) or speeds[slowest] <= _SLOW * usual_s:
            self._slow.clear()
            return
        self._slow.append(slowest)
        if len(self._slow) >= _TIMES and set(self._slow[-_TIMES:]) == {slowest} and slowest not in self._told:
            self._told.add(slowest)
            what = (
                f"rank {slowest} on {self.hosts[slowest]} takes {speeds[slowest]:.3g} s a step, others {usual_s:.3g} s"
            )
            lost = 1 - usual_s / speeds[slowest]
            journal.event("slow", f"{what}: they stand still {lost:.0%} of the time", step, rank=slowest)


@dataclass(kw_only=True)
class Pacer(Watcher[LocalSteps]):
    """What the pace of local steps follows.

    Attributes:
        options: what the user says of it.
        total_steps: updates of the whole run.
        compressing_s: an exchange's own work; equal on all processes, which decide alike.
    """

    options: SyncOptions
    total_steps: int
    compressing_s: float
    _lengths: list[float] = field(default_factory=list[float], init=False)
    _step_s: float = field(default=0.0, init=False)
    _rounds: int = field(default=0, init=False)

    def heed(self, told: list[float], step: int, journal: Journal) -> Cost:
        """Does what the sums of `mine` ask for besides; returns the method with its pace."""
        super().heed(told, step, journal)
        speeds, exchanges_s = told[: self.world.size], told[self.world.size :]
        self._note(max(*speeds, 1e-6), [one for one in exchanges_s if one > 0])
        every, delay = self._wanted()
        before = self.cost
        if (every, delay) != (before.every, before.delay) and self.timed.idle:
            self._lengths.clear()
            self.cost = replace(before, every=every, delay=delay)
            self.timed.pace = pace_of(self.cost, self.options)
            said = f"exchanges {'take longer' if (every, delay) > (before.every, before.delay) else 'are faster'} now"
            changed = f"every {every} steps instead of {before.every}, {delay} steps late instead of {before.delay}"
            journal.event(
                "sync",
                f"{said}: processes agree {changed}",
                step,
                every=every,
                delay=delay,
                method=self.cost.method,
            )
        return self.cost

    def _note(self, step_s: float, exchanges_s: list[float]) -> None:
        """Keeps how many steps the last exchange took.

        It begins for each process when that one is there. Who comes last waits for nobody, and all go on at the pace
        of the slowest; by the others' time a slow process would make exchanges seem long, and the longer the pace the
        longer.
        """
        self._step_s = step_s
        if self.timed.rounds > self._rounds and exchanges_s:
            self._rounds = self.timed.rounds
            self._lengths = [*self._lengths[-2:], min(exchanges_s) / step_s]

    def _wanted(self) -> tuple[int, int]:
        """(every, delay) that suit what was noted."""
        now = self.cost.every, self.cost.delay
        if len(self._lengths) < _TIMES or self.options.every or not self.cost.delay:
            return now
        long = statistics.median(self._lengths)
        every = fitting_steps(long, self.total_steps, self.compressing_s / self._step_s)
        delay = fitting_delay(long, every) if self.options.delay < 0 else min(every, self.options.delay)
        return (every, delay) if _differ(every, now[0]) or _differ(delay, now[1]) else now


def _differ(wanted: int, now: int) -> bool:
    return abs(wanted - now) > 1 and not now / _CHANGE < wanted < now * _CHANGE

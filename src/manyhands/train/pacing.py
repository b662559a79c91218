"""Notices which process is slow, and when training stands still; has a method keep in time with the link."""

import math
import statistics
from dataclasses import dataclass, field

from manyhands.core.world import World
from manyhands.sync.costs import Cost
from manyhands.sync.synchronizer import Synchronizer, Timed
from manyhands.train.heartbeat import stood_still
from manyhands.train.journal import Journal

# A process is slow that takes so many times as long as the others' median, in so many agreements one after the other.
_SLOW, _TIMES = 1.3, 3
# Standing still is told of that takes so long, and so many times as long as it does usually.
_STALL_S, _STALL = 3.0, 3.0


@dataclass
class Watcher:
    """What all processes tell each other of their speed, and what is said of it."""

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
        """What this process waits for."""
        if self.synchronizer.timed is None:
            raise ValueError("the sync method never waits")
        return self.synchronizer.timed

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

    def observe(self, values: list[float], step: int, journal: Journal) -> Cost:
        """Says what the sums of `mine` show, alike on all processes; returns the method as it is from now on."""
        speeds_s, exchanges_s = values[: self.world.size], values[self.world.size :]
        self._name_the_slow(speeds_s, step, journal)
        before, now = self.cost, self.synchronizer.adapt_pace(speeds_s, exchanges_s)
        if now is not None:
            self.cost = now
            longer = (now.every, now.delay) > (before.every, before.delay)
            changed = (
                f"every {now.every} steps instead of {before.every}, {now.delay} steps late instead of {before.delay}"
            )
            said = f"exchanges {'take longer' if longer else 'are faster'} now: processes agree {changed}"
            journal.event("sync", said, step, every=now.every, delay=now.delay, method=now.method)
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
            journal.event("stall", stood_still(stood_s, usual_s, linked=len({*self.hosts}) > 1), step, seconds=stood_s)

    def _name_the_slow(self, speeds: list[float], step: int, journal: Journal) -> None:
        slowest = max(range(len(speeds)), key=speeds.__getitem__)
        usual_s = statistics.median([*speeds[:slowest], *speeds[slowest + 1 :]])
        if not math.isfinite(usual_s) or speeds[slowest] <= _SLOW * usual_s:
            self._slow.clear()
            return
        self._slow.append(slowest)
        if len(self._slow) >= _TIMES and set(self._slow[-_TIMES:]) == {slowest} and slowest not in self._reported:
            self._reported.add(slowest)
            what = (
                f"rank {slowest} on {self.hosts[slowest]} takes {speeds[slowest]:.3g} s a step, "
                f"the other ranks {usual_s:.3g} s"
            )
            lost = 1 - usual_s / speeds[slowest]
            journal.event("slow", f"{what}, so the other ranks are idle {lost:.0%} of the time", step, rank=slowest)

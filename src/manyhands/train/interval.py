"""How often a run saves by itself: what a save holds up, against what a failure takes back."""

import itertools
import math
import statistics
import time
from collections import deque

from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.train.journal import Journal

# Until a save was measured, and never more often or seldom.
FIRST_S, SHORTEST_S, LONGEST_S = 10.0, 10.0, 1800.0
# Saves may take this part of the time, or come once in so many seconds, however seldom failures are expected.
SHARE, USUAL_S = 0.01, 60.0
# Before a run has seen failures one a day is expected of each machine: rented and private ones are ended, put to sleep
# or run full. It is a guess, on the side that saves too often: Llama 3's machines of 8 cards lasted 264 days each
# (419 failures in 54 days of 16,384 cards; arXiv:2407.21783, section 3.3.4). It weighs as much as an hour of training.
EXPECTED_S, WEIGHT_S = 86_400.0, 3600.0
# Saves whose median counts; rounds of training that say what is usual, and how many are enough.
_SAVES, _ROUNDS, _ENOUGH = 9, 20, 3
_REPORT_RATIO = 2.0
_BEGINS, _FAILS = {"first-step", "resumed"}, {"restarted", "failed"}
_ENDS = {*_FAILS, "regrouped", "stopped", "interrupted", "finished"}


def best_interval(save_s: float, between_failures_s: float) -> float:
    """Seconds between saves under which saving and making again what a failure took cost the least, within bounds.

    It is no longer than what keeps saves to a hundredth of the time, or a minute where they take less. Else it is
    sqrt(2 * cost of a save * time between failures): J. W. Young, A first order approximation to the optimum checkpoint
    interval, CACM 17(9), 1974; J. T. Daly's estimate of higher order (FGCS 22, 2006) differs where a save takes as long
    as the time between failures.
    """
    longest_s = min(LONGEST_S, max(USUAL_S, save_s / SHARE))
    return min(longest_s, max(SHORTEST_S, math.sqrt(2 * save_s * between_failures_s)))


def between_failures(failures: int, trained_s: float, machines: int) -> float:
    """Seconds that a run is expected to go on for; never longer than is expected before anything was seen."""
    expected_s = EXPECTED_S / machines
    return min(expected_s, (trained_s + WEIGHT_S) / (failures + WEIGHT_S / expected_s))


def seen_failures(folder: RunFolder) -> tuple[int, float]:
    """How often a run's earlier starts ended by a failure, also without a word, and how many seconds they trained.

    One that cost no work, since another process saved it, counts too: the next one may take all.
    """
    failures, trained_s = 0, 0.0
    began_s: float | None = None
    last_s = 0.0
    # This start comes after an end, if there was a word of one.
    for line in itertools.chain(read_lines(folder.events), ({"kind": "resumed"},)):
        kind, at_s = line.get("kind"), float(line.get("time", last_s))
        if kind in _ENDS | _BEGINS:
            if began_s is not None:
                failures += kind in _FAILS or kind == "resumed"
                trained_s += max(0.0, (at_s if kind in _ENDS else last_s) - began_s)
            began_s = at_s if kind in _BEGINS else None
        last_s = at_s
    return failures, trained_s


class SaveInterval:
    """Seconds between checkpoints, as rank 0's clock counts them: what it says all learn with the next status.

    Args:
        folder: the run folder, whose events record earlier starts.
        world: how many machines there are.
    """

    def __init__(self, folder: RunFolder, world: World) -> None:
        self.machines = -(-world.size // max(1, world.local_size))
        self.failures, self._before_s = seen_failures(folder)
        self._began_s, self._excess_s = time.perf_counter(), 0.0
        self._reported_s, self._said = 0.0, False
        self._usual_s: deque[float] = deque(maxlen=_ROUNDS)
        self._saves_s: deque[float] = deque(maxlen=_SAVES)

    def trained(self, seconds: float, samples: int, *, saving: bool) -> None:
        """Notes how long some samples took: beside a save longer than usual, maybe."""
        if samples and not saving:
            self._usual_s.append(seconds / samples)
        elif samples and len(self._usual_s) >= _ENOUGH:
            self._excess_s += seconds - samples * statistics.median(self._usual_s)

    def saved(self, waited_s: float, wrote_s: float) -> float:
        """Notes a save that training waited for and a thread wrote; seconds from it to the next."""
        # A thread holds training up for no longer than it writes.
        self._saves_s.append(waited_s + min(wrote_s, max(0.0, self._excess_s)))
        self._excess_s = 0.0
        return best_interval(statistics.median(self._saves_s), self._between_failures_s())

    def record(self, seconds: float, journal: Journal, step: int) -> None:
        """Records what was chosen, and again where it is another by far; says it once, when it has an effect."""
        save_s, fails_s = statistics.median(self._saves_s), self._between_failures_s()
        seen = f"{self.failures} seen" if self.failures else "none seen; assumed"
        message = (
            f"a checkpoint every {seconds:.0f} s, because each delays training by {save_s:.2g} s and failures are "
            f"expected every {fails_s / 3600:.2g} h ({seen})"
        )
        if not self._reported_s or max(seconds / self._reported_s, self._reported_s / seconds) >= _REPORT_RATIO:
            self._reported_s = seconds
            figures = {"seconds": seconds, "save_s": save_s, "between_failures_s": fails_s, "failures": self.failures}
            journal.event("interval", message, step, **figures)
        if not self._said and time.perf_counter() - self._began_s >= seconds:
            self._said = True
            journal.event("note", message, step)

    def _between_failures_s(self) -> float:
        trained_s = self._before_s + time.perf_counter() - self._began_s
        return between_failures(self.failures, trained_s, self.machines)

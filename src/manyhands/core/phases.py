"""Where a process's time goes: one clock, which always runs for exactly one phase, so that all phases add up."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

# The words of the records, by their numbers below.
PHASES = ("data", "compute", "communication", "update", "evaluation", "saving", "records", "other")
DATA, COMPUTE, COMMUNICATION, UPDATE, EVALUATION, SAVING, RECORDS, OTHER = range(len(PHASES))


class PhaseClock:
    """A process's stopwatch: never waits for a device, and costs a fraction of a microsecond at each change of phase.

    Attributes:
        spans: phase, beginning and end, by `time.perf_counter`, of each stretch of time; None: not kept.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, float, float]] | None = None
        self._seconds, self._taken, self._phase = [0.0] * len(PHASES), [0.0] * len(PHASES), OTHER
        self._since = self._computed = perf_counter()
        self._queued = 0.0
        self.take_queued()

    def to(self, phase: int, now: float = 0.0) -> int:
        """Begins a phase, now or at another moment; returns the one that ends with that."""
        now, before = now or perf_counter(), self._phase
        self._seconds[before] += now - self._since
        if self.spans is not None:
            self.spans.append((before, self._since, now))
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def within(self, phase: int) -> Generator[None]:
        """What happens inside belongs to a phase; for what isn't done in every update."""
        before = self.to(phase)
        try:
            yield
        finally:
            self.to(before)

    def computed(self, _parameter: object = None) -> None:
        """A gradient is there: what follows up to the end of backward may be nothing but waiting for others."""
        self._computed = perf_counter()

    def backward_ends(self) -> None:
        """All since the last `computed` was waiting, if that was in this phase."""
        if self._computed > self._since:
            self.to(self.to(COMMUNICATION, self._computed))

    def take(self) -> list[float]:
        """Seconds of each phase since the last call."""
        self.to(self._phase)
        taken, self._seconds = self._seconds, [0.0] * len(PHASES)
        self._taken = [before + more for before, more in zip(self._taken, taken, strict=True)]
        return taken

    def take_queued(self) -> float:
        """Seconds since the last call that the main thread waited for a processor; 0 where that isn't known."""
        before = self._queued
        with suppress(OSError, ValueError, IndexError):
            self._queued = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        return max(0.0, self._queued - before)  # in a fork it begins at zero again

    def spent(self, phase: int) -> float:
        """Seconds of a phase since the clock was made."""
        self.to(self._phase)
        return self._taken[phase] + self._seconds[phase]


# This process's: whatever it trains, its time is spent once.
CLOCK = PhaseClock()

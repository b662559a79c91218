"""Measures the time that a process spends in each phase, such as data loading, compute or communication."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

# The names in the records, by the indices below.
PHASES = ("data", "compute", "communication", "update", "evaluation", "saving", "records", "other")
DATA, COMPUTE, COMMUNICATION, UPDATE, EVALUATION, SAVING, RECORDS, OTHER = range(len(PHASES))


class PhaseClock:
    """Measures wall-clock time by phase, without device synchronization. The phases add up to the elapsed time."""

    def __init__(self) -> None:
        # phase, start and end (`time.perf_counter`) of each span, or None to record no spans
        self.spans: list[tuple[int, float, float]] | None = None
        self._seconds, self._phase = [0.0] * len(PHASES), OTHER
        self._since = self._computed = perf_counter()
        self._queued = 0.0
        self.take_queued()

    def start_phase(self, phase: int, now: float = 0.0) -> int:
        """Starts a phase now, or at `now` if it is not 0 (by `time.perf_counter`). Returns the previous phase."""
        now, before = now or perf_counter(), self._phase
        self._seconds[before] += now - self._since
        if self.spans is not None:
            self.spans.append((before, self._since, now))
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def in_phase(self, phase: int) -> Generator[None]:
        """Assigns the time of the context to a phase. Code that runs in every update calls `start_phase` instead."""
        before = self.start_phase(phase)
        try:
            yield
        finally:
            self.start_phase(before)

    def record_gradient(self, _parameter: object = None) -> None:
        """Records the time, as a gradient hook. After the last gradient, backward only waits for other processes."""
        self._computed = perf_counter()

    def end_backward(self) -> None:
        """Assigns the time since the last `record_gradient`, if that was in this phase, to communication."""
        if self._computed > self._since:
            self.start_phase(self.start_phase(COMMUNICATION, self._computed))

    def take_seconds(self) -> list[float]:
        """Returns the seconds spent in each phase since the last call, in the order of PHASES."""
        self.start_phase(self._phase)
        taken, self._seconds = self._seconds, [0.0] * len(PHASES)
        return taken

    def take_queued(self) -> float:
        """Returns the seconds that the main thread waited for a CPU core since the last call, or 0 if unknown."""
        before = self._queued
        with suppress(OSError, ValueError, IndexError):
            self._queued = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        return max(0.0, self._queued - before)  # a forked process starts at 0


CLOCK = PhaseClock()  # the clock of this process

"""Saves checkpoints in the background: the writer, the ranks that write, and the interval between checkpoints."""

import itertools
import math
import platform
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from manyhands.checkpoint.write import NotFiniteError, SaveError
from manyhands.core.records import read_lines
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.world import World
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.train.journal import Journal


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save on one process."""

    error: str = ""  # why nothing was saved; empty after success
    finite: bool = True  # False if nothing was saved because of a NaN or an infinity
    digests: dict[str, str] = field(default_factory=dict[str, str])  # SHA-256 of the files with tensors, by name


class Saver:
    """Runs one save at a time on a process that writes checkpoints. Other processes only track the save."""

    def __init__(self) -> None:
        self.step: int | None = None  # step of the save in progress; equal on all processes
        self.waited_s = 0.0  # training waited this long for the snapshot
        self.stalled_s = 0.0  # this save has blocked training this long so far
        self.wrote_s = 0.0  # this process wrote this long in the background
        self.has_run = False  # a save of this process found the job file in the run folder
        self.saves = 0  # saves that this start has begun
        # the ranks that write, each with the ranks of its machine: rank 0, and one for another disk; see `writers_of`
        self.writers: Mapping[int, range] = {0: range(1)}
        self.interval: SaveInterval | None = None  # on rank 0, unless checkpoint.every sets the time between saves
        self._written: Future[SaveOutcome] | None = None
        self._thread: threading.Thread | None = None

    def start_save(self, step: int, write: Callable[[], SaveOutcome] | None, *, background: bool = True) -> None:
        """Starts a save or, without `background`, runs it. `write` is None on processes that don't write."""
        self.step, self.wrote_s, self._written, self._thread = step, 0.0, None, None
        if write is None:
            return
        written = self._written = Future[SaveOutcome]()
        if background:
            self._thread = threading.Thread(target=self._run_write, args=(write, written), name="saving", daemon=True)
            self._thread.start()
        else:
            self._run_write(write, written)

    @property
    def done(self) -> bool:
        return self._written is not None and self._written.done()

    def wait(self) -> None:
        """Waits for the save and for its thread: a thread that frees tensors while Python exits ends the process."""
        if self._thread:
            self._thread.join()

    def end_save(self) -> SaveOutcome | None:
        """Waits for the save and returns its result, None if this process doesn't write. Raises unexpected errors."""
        self.wait()
        written, self._written, self.step = self._written, None, None
        return written.result() if written else None

    def _run_write(self, write: Callable[[], SaveOutcome], written: Future[SaveOutcome]) -> None:
        began_s = time.perf_counter()
        try:
            outcome = write()
        except (SaveError, NotFiniteError) as error:
            outcome = SaveOutcome(error.message, finite=isinstance(error, SaveError))
        except Exception as error:  # noqa: BLE001 - raised by `end_save`
            written.set_exception(error)
            return
        self.wrote_s = time.perf_counter() - began_s if self._thread else 0.0
        written.set_result(outcome)


def writers_of(folder: RunFolder, world: World, *, in_pieces: bool) -> dict[int, range]:
    """Returns a dict from each rank that writes checkpoints (a writer) to the ranks of its machine. A collective.

    With `in_pieces`, only rank 0 is a writer. Otherwise, so is the first rank of one machine that lacks rank 0's disk.
    """
    if world.local_size == world.size or in_pieces or folder is NOWHERE:
        return {0: range(world.local_size)}
    mark = folder.ranks / f".disk-{broadcast_plain(secrets.token_hex(8), world)}"
    if world.is_main:
        mark.touch()
    gather_plain(None, world)
    apart = world.local_rank == 0 and folder.ranks.is_dir() and not mark.exists()
    machines = gather_plain([platform.node() if apart else "", world.local_size], world)
    if world.is_main:
        mark.unlink()
    writers = {0: range(machines[0][1])}
    for rank, (host, size) in enumerate(machines):
        if host:
            message = f"each checkpoint is saved on both {platform.node()} and {host}, because they don't share a disk"
            Journal(folder, world.rank).event("note", message)
            return {**writers, rank: range(rank, rank + size)}
    return writers


FIRST_S, SHORTEST_S, LONGEST_S = 10.0, 10.0, 1800.0  # seconds between saves before a save was measured, and the bounds
SHARE, USUAL_S = 0.01, 60.0  # saves may take this fraction of time, or run once in so many seconds
# Initially, one failure per machine and day is expected, which saves too often rather than too rarely: Llama 3's
# machines of 8 GPUs lasted 264 days each (419 failures in 54 days of 16,384 GPUs; arXiv:2407.21783, section 3.3.4).
# This estimate weighs as much as an hour of training.
EXPECTED_S, WEIGHT_S = 86_400.0, 3600.0
_SAVES, _REPORT_RATIO = 9, 2.0  # saves in the median; a change of the interval that is reported
_BEGINS, _FAILS = {"first-step", "resumed"}, {"restarted", "failed"}
_ENDS = {*_FAILS, "regrouped", "stopped", "interrupted", "finished"}


def best_save_interval(save_s: float, between_failures_s: float) -> float:
    """Returns the seconds between saves that minimize the cost of saves and of repeated work, within bounds.

    The interval is sqrt(2 * cost of a save * time between failures): J. W. Young, A first order approximation to the
    optimum checkpoint interval, CACM 17(9), 1974; J. T. Daly's estimate of higher order (FGCS 22, 2006) differs if a
    save takes as long as the time between failures. The upper bound is a minute, or 100 times `save_s` if longer.
    """
    longest_s = min(LONGEST_S, max(USUAL_S, save_s / SHARE))
    return min(longest_s, max(SHORTEST_S, math.sqrt(2 * save_s * between_failures_s)))


def estimate_seconds_between_failures(failures: int, trained_s: float, machines: int) -> float:
    """Estimates the mean seconds between failures of a run from its number of failures in `trained_s` seconds."""
    expected_s = EXPECTED_S / machines
    return min(expected_s, (trained_s + WEIGHT_S) / (failures + WEIGHT_S / expected_s))


def count_earlier_failures(folder: RunFolder) -> tuple[int, float]:
    """Returns the number of failures, and the seconds of training, of all earlier starts of a run."""
    failures, trained_s, last_s = 0, 0.0, 0.0
    began_s: float | None = None
    # The current start is the last event.
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
    """Determines the seconds between checkpoints, on rank 0, from the cost of a save and the failures so far."""

    def __init__(self, folder: RunFolder, world: World) -> None:
        self.machines = -(-world.size // max(1, world.local_size))
        self.failures, self._before_s = count_earlier_failures(folder)
        self._on_cpu, self._began_s = world.device == "cpu", time.perf_counter()
        self._reported_s, self._said = 0.0, False
        self._saves_s: deque[float] = deque(maxlen=_SAVES)

    def record_save(self, waited_s: float, wrote_s: float) -> float:
        """Records how long training waited for a save and how long it took. Returns the seconds until the next save."""
        # On a CPU, the writing thread may delay training while it runs.
        self._saves_s.append(waited_s + (wrote_s if self._on_cpu else 0.0))
        return best_save_interval(statistics.median(self._saves_s), self._between_failures_s())

    def record_interval(self, seconds: float, journal: Journal, step: int) -> None:
        """Records the interval and its large changes as events. Prints the interval once, when it takes effect."""
        save_s, fails_s = statistics.median(self._saves_s), self._between_failures_s()
        message = (
            f"saving a checkpoint every {seconds:.0f} s, because a save delays training by {save_s:.2g} s and "
            f"a failure is expected every {fails_s / 3600:.2g} h ({self.failures or 'none'} so far)"
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
        return estimate_seconds_between_failures(self.failures, trained_s, self.machines)

"""The status round: a periodic collective that shares measurements and requests to save or stop.

One small collective about every half second (run.log_every_s) is used for all of these, so that a signal on one process
stops all processes at the same step, and the records cover all processes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from manyhands.core.phases import CLOCK, COMMUNICATION, COMPUTE, RECORDS
from manyhands.core.world import World
from manyhands.train.feed import StepSums

MOST_STEPS = 1000
# The longest interval on a slow link, since requests to stop and the screen wait for it.
LONGEST_S = 10.0
# Seconds by phase are recorded this often in long epochs, and once in a twentieth of the time of long runs.
REPORT_S, REPORT_SHARE = 30.0, 1 / 20


@dataclass
class StatusSums:
    """Measurements and requests since the last round: of one process, or added up over all."""

    loss_sum: float  # of the losses of the samples; not a number after a loss or gradient that wasn't finite
    correct: float  # samples predicted correctly
    samples: float
    stop: float  # processes that were asked to stop
    save: float  # above 0 if it is time for a checkpoint
    written: float  # processes that have written their part of the save in progress
    report_time: float  # above 0 if it is time to record the seconds by phase
    elapsed_s: float
    replaced: float  # pictures that couldn't be read
    extra: list[float]  # what the monitor adds up; empty without one

    @property
    def loss(self) -> float:
        """The mean loss; 0 without samples."""
        return self.loss_sum / max(1, self.samples)

    @property
    def top1(self) -> float:
        """The share of samples predicted correctly; 0 without samples."""
        return self.correct / max(1, self.samples)

    def to_vector(self) -> list[float]:
        """Returns the numbers to add up."""
        *numbers, extra = vars(self).values()
        return [*map(float, numbers), *extra]

    @classmethod
    def from_vector(cls, vector: list[float]) -> "StatusSums":
        """Creates the sums from the result of `to_vector`, added up or not."""
        count = len(fields(cls)) - 1
        return cls(*vector[:count], extra=vector[count:])


@dataclass
class Status(StatusSums):
    """The result of a status round: the sums over all processes."""

    own: StatusSums  # of this process
    seconds: float  # since the last round, by this process's clock
    data_share: float  # part of that time that this process waited for data
    waited_s: float  # time that this process waited in the round


@dataclass
class EpochMean:
    """Loss and accuracy over the samples of one epoch, over all processes."""

    whole: bool = True  # False if the run resumed within the epoch, whose mean is then unknown
    _loss: float = 0.0
    _correct: float = 0.0
    _samples: float = 0.0

    def add(self, status: Status) -> None:
        """Counts the samples of one status."""
        self._loss += status.loss_sum
        self._correct += status.correct
        self._samples += status.samples

    def take(self) -> tuple[float | None, float | None]:
        """Returns mean loss and accuracy of the epoch, None if unknown, and starts the next epoch."""
        known = self.whole and self._samples > 0
        found = (self._loss / self._samples, self._correct / self._samples) if known else (None, None)
        self.whole, self._loss, self._correct, self._samples = True, 0.0, 0.0, 0.0
        return found


class StatusRound:
    """Decides when a status round is due, equally on every process, and runs it.

    Args:
        world: the processes.
        every_s: the approximate interval.
        save_every_s: seconds between checkpoints by the clock of rank 0; infinite for none by time.
        multiple: status rounds run only at multiples of this step, when a slow link is free.
    """

    def __init__(self, world: World, every_s: float, save_every_s: float, multiple: int = 1) -> None:
        self._world, self._every_s, self.save_every_s = world, every_s, save_every_s
        self.multiple = multiple
        self._last = self._saved = self._reported = self._began = time.perf_counter()
        self._next_step, self._last_step = 0, 0
        self.waiting_s = 0.0

    def due(self, step: int, *, force: bool) -> bool:
        """Returns True if a status round is due at this step, equally on all processes."""
        return force or step >= self._next_step

    def leave_out(self, seconds: float) -> None:
        """Excludes the seconds of an evaluation or a save from the training time; keeps the measurements."""
        self._last += seconds

    def reset(self, step: int) -> None:
        """Restarts the clock if nothing was measured since the last round."""
        self._last, self._last_step, self.waiting_s = time.perf_counter(), step, 0.0

    def add_up(
        self,
        measured: StepSums,
        step: int,
        *,
        stop: bool,
        written: bool = False,
        extra: Callable[[float, int], list[float]] | None = None,
        replaced: int = 0,
    ) -> Status:
        """Sums the measurements of all processes; a collective.

        Args:
            measured: the sums of this process.
            step: the number of updates so far.
            stop: True if this process was asked to stop.
            written: True if this process has finished writing the save in progress.
            extra: returns more numbers to sum, from the seconds and steps since the last round.
            replaced: the number of unreadable pictures on this process.
        """
        now = time.perf_counter()
        took_s, steps = now - self._last, step - self._last_step
        more = extra(took_s, steps) if extra else []
        if self._world.device != "cpu":
            CLOCK.to(COMPUTE)  # an accelerator finishes its updates before it tells what it measured
        sums = measured.take()
        CLOCK.to(RECORDS)
        save = self._world.is_main and now - self._saved > self.save_every_s
        report_every_s = max(REPORT_S, REPORT_SHARE * (now - self._began))
        report_time = self._world.is_main and now - self._reported > report_every_s
        own = StatusSums(*sums, stop, save, written, report_time, took_s, replaced, more)
        # Apple's devices know no float64.
        kind = torch.float32 if self._world.device == "mps" else torch.float64
        vector = torch.tensor(own.to_vector(), dtype=kind, device=self._world.device)
        began_s, before = time.perf_counter(), CLOCK.to(COMMUNICATION)
        if not self._world.alone:
            dist.all_reduce(vector)
        total = StatusSums.from_vector(vector.tolist())
        CLOCK.to(before)
        waited_s = time.perf_counter() - began_s
        self._reported = now if total.report_time else self._reported
        mean_s = max(total.elapsed_s / self._world.size / max(1, steps), 1e-6)
        wanted = step + min(MOST_STEPS, max(1, round(self._every_s / mean_s)))
        free = -(-wanted // self.multiple) * self.multiple
        self._next_step = min(free, max(wanted, step + round(LONGEST_S / mean_s)))
        seconds = max(took_s, 1e-9)
        data_share = min(1.0, self.waiting_s / seconds)
        status = Status(**vars(total), own=own, seconds=seconds, data_share=data_share, waited_s=waited_s)
        self.reset(step)
        return status

    def saved(self) -> None:
        """Records that a checkpoint is being written."""
        self._saved = time.perf_counter()

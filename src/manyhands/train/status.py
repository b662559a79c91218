"""The status round: a periodic collective that shares measurements and requests to save or stop.

One small collective about every half second (run.log_every_s) is used for all of these, so that a signal on one process
stops all processes at the same step, and the records cover all processes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from manyhands.core.phases import CLOCK, COMMUNICATION, COMPUTE, RECORDS
from manyhands.core.world import World
from manyhands.train.step import StepSums

MOST_STEPS = 1000
# No slow link is waited for longer: who asks a run to stop, or looks at its screen, waits as long.
LONGEST_S = 10.0
# In long epochs what the time goes to is told so often, and in long runs once in a twentieth of their time.
REPORT_S, REPORT_SHARE = 30.0, 1 / 20


@dataclass(frozen=True)
class Status:
    """The result of a status round over all processes."""

    stop: bool  # somebody was asked to stop
    save: bool  # it is time for a checkpoint
    written: int  # processes that have written their part of the save that goes on
    report_time: bool  # it is time to record what the time goes to
    loss: float  # mean over the samples since the last round
    top1: float  # share of them guessed right
    samples: int  # how many they were, over all processes
    seconds: float  # since the last round, by rank 0's clock
    data_share: float  # part of that time that rank 0 waited for data
    extra: list[float]  # sums over all processes of what `extra` gave
    waited_s: float  # how long this process stood still for the round
    own_samples: int  # of the samples, those of this process
    custom_loss: float  # mean over them; not a number where there are none
    own_top1: float  # share of them guessed right
    replaced: int  # pictures, over all processes, that couldn't be read


@dataclass
class EpochMean:
    """Loss and accuracy over the samples of one epoch, over all processes."""

    whole: bool = True  # False where the run goes on in the middle of the epoch, whose mean is then not known
    _loss: float = 0.0
    _correct: float = 0.0
    _samples: int = 0

    def add(self, status: Status) -> None:
        """Counts the samples of one status."""
        self._loss += status.loss * status.samples
        self._correct += status.top1 * status.samples
        self._samples += status.samples

    def take(self) -> tuple[float | None, float | None]:
        """Returns mean loss and accuracy of the epoch, None if unknown, and starts the next epoch."""
        known = self.whole and self._samples > 0
        found = (self._loss / self._samples, self._correct / self._samples) if known else (None, None)
        self.whole, self._loss, self._correct, self._samples = True, 0.0, 0.0, 0
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
        more = extra(now - self._last, step - self._last_step) if extra else []
        if self._world.device != "cpu":
            CLOCK.to(COMPUTE)  # an accelerator finishes its updates before it tells what it measured
        custom_loss, own_correct, own_samples = measured.take()
        CLOCK.to(RECORDS)
        main = self._world.rank == 0
        save = main and now - self._saved > self.save_every_s
        report_time = main and now - self._reported > max(REPORT_S, REPORT_SHARE * (now - self._began))
        flags = [float(flag) for flag in (stop, save, written, report_time)]
        mine = [custom_loss, own_correct, own_samples, *flags, now - self._last, float(replaced), *more]
        # Apple's devices know no float64.
        kind = torch.float32 if self._world.device == "mps" else torch.float64
        total = torch.tensor(mine, dtype=kind, device=self._world.device)
        began_s, before = time.perf_counter(), CLOCK.to(COMMUNICATION)
        if not self._world.alone:
            dist.all_reduce(total)
        loss, correct, count, stops, saves, writers, reports, seconds_sum, bad, *summed = total.tolist()
        CLOCK.to(before)
        waited_s = time.perf_counter() - began_s
        self._reported = now if reports else self._reported
        mean_s = seconds_sum / self._world.size / max(1, step - self._last_step)
        wanted = step + min(MOST_STEPS, max(1, round(self._every_s / max(mean_s, 1e-6))))
        free, latest = -(-wanted // self.multiple) * self.multiple, step + round(LONGEST_S / max(mean_s, 1e-6))
        self._next_step = min(free, max(wanted, latest))
        status = Status(
            stop=stops > 0,
            save=saves > 0,
            written=round(writers),
            report_time=reports > 0,
            loss=loss / max(1, count),
            top1=correct / max(1, count),
            samples=int(count),
            seconds=max(now - self._last, 1e-9),
            data_share=min(1.0, self.waiting_s / max(now - self._last, 1e-9)),
            extra=summed,
            waited_s=waited_s,
            own_samples=own_samples,
            custom_loss=custom_loss / own_samples if own_samples else math.nan,
            own_top1=own_correct / max(1, own_samples),
            replaced=round(bad),
        )
        self.reset(step)
        return status

    def saved(self) -> None:
        """Records that a checkpoint is being written."""
        self._saved = time.perf_counter()

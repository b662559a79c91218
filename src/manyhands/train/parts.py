"""Everything that meets in a run, and what is due at each of its steps."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.config.job import Job
from manyhands.core.folder import RunFolder
from manyhands.core.journal import Journal
from manyhands.core.trained import TrainedNetwork
from manyhands.core.world import World
from manyhands.parallel.apply import check_replicas
from manyhands.parallel.network import ParallelNetwork
from manyhands.sync.costs import Cost
from manyhands.train.agree import Agreement, EpochMean
from manyhands.train.agreeing import Agreeing
from manyhands.train.evaluate import Evaluation
from manyhands.train.feed import Feed
from manyhands.train.pacing import Watcher
from manyhands.train.state import Progress
from manyhands.train.step import Updater

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass
class Parts:
    """Everything that meets in a run.

    Attributes:
        job: what the user asked for.
        folder: where the run is kept.
        world: who takes part.
        journal: writes records.
        mode: the parallel mode in force.
        classes: a name for each output of the network.
        trained: what the weights don't say of the network.
        feed: what this process computes for each update.
        network: the model under its mode.
        update: makes an update.
        evaluate: evaluates on all processes.
        agreement: what all processes agree on every so often.
        progress: how far the run has come.
        total_steps: updates of the whole job.
        digest: of what decides the order of samples.
        sync: how processes agree, decided.
        watcher: where processes wait for exchanges that the mode doesn't make.
        release: gives back what was taken (worker processes, changed classes).
        draws: True where the network was seen to draw random numbers in training.
        phase: what is going on, for a failure's record.
        epoch_mean: of the epoch that goes on.
        saves: checkpoints tried in this run.
    """

    job: Job
    folder: RunFolder
    world: World
    journal: Journal
    mode: str
    classes: tuple[str, ...]
    trained: TrainedNetwork
    feed: Feed
    network: ParallelNetwork
    update: Updater
    evaluate: Callable[[], Evaluation]
    agreement: Agreement
    progress: Progress
    total_steps: int
    digest: str
    sync: Cost
    release: Callable[[], None]
    watcher: Watcher[Any] | None = None
    draws: bool = False
    phase: str = "train"
    saves: int = field(default=0)
    epoch_mean: EpochMean = field(default_factory=EpochMean)

    @property
    def agreeing(self) -> Agreeing:
        """How processes agree beside what the mode does."""
        return self.update.agreeing

    def done(self) -> bool:
        """True when no update is left."""
        return self.progress.step >= self.total_steps

    def evaluation_due(self) -> bool:
        """True at the steps where an evaluation belongs; the last is one, so that what is saved there knows of it."""
        every = round(self.job.train.evaluate_every * self.feed.order.steps_per_epoch)
        return self.done() or (bool(self.job.train.evaluate_every) and self.progress.step % max(1, every) == 0)

    def save_due_by_step(self) -> bool:
        """True at steps that checkpoint.every names as a number of steps or epochs."""
        every = steps_between_saves(self.job.checkpoint.every, self.feed.order.steps_per_epoch)
        return bool(every) and self.progress.step % every == 0

    def line_due(self) -> bool:
        """True at the updates that run.log_steps wants a line of: an epoch's first, and each so many after it."""
        every = self.job.run.log_steps
        return bool(every) and (self.progress.step - 1) % self.feed.order.steps_per_epoch % every == 0

    def heed(self, told: list[float], waited_s: float) -> None:
        """Says who is slow and when training stood still, and keeps local steps in time with the link."""
        if self.watcher:
            self.watcher.name_a_stall(waited_s, self.progress.step, self.journal)
            self.sync = self.watcher.heed(told, self.progress.step, self.journal)
            self.agreement.multiple = self.sync.every

    def prove_replicas(self) -> None:
        """Raises RunError when a process's network has drifted from rank 0's."""
        if self.network.replicated and not self.world.alone:
            named = self.agreeing.replicas(self.network.inner)
            check_replicas(named, self.world, self.progress.step, self.network.cutting)


def seconds_between_saves(text: str) -> float:
    """Seconds that "60s", "10min" or "2h" name; infinite for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    return float(match[1]) * SECONDS[match[2]] if match else float("inf")


@functools.cache
def steps_between_saves(text: str, steps_per_epoch: int) -> int:
    """Updates that "100steps" or "2epochs" name; 0 for anything else."""
    match = re.fullmatch(r"(\d+)(step|epoch)s?", text)
    return int(match[1]) * (steps_per_epoch if match[2] == "epoch" else 1) if match else 0

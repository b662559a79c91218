"""The objects of a run, and what is due at each step."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.checkpoint.trained import TrainedNetwork
from manyhands.config.job import Job
from manyhands.core.records import EvaluationMetrics
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import check_replicas
from manyhands.parallel.network import ParallelNetwork
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.choose_sync import ChosenSync
from manyhands.train.feed import Feed
from manyhands.train.heartbeat import HeartbeatWriter
from manyhands.train.journal import Journal, RunContext
from manyhands.train.loss import Evaluation
from manyhands.train.monitors import Divergence, Watcher
from manyhands.train.objects import AtEpochEnd
from manyhands.train.saver import FIRST_S, Saver
from manyhands.train.state import Progress
from manyhands.train.status import EpochMean, Status, StatusRound
from manyhands.train.step import Updater

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass
class Due:
    """Rules of what is due after an update; equal on all processes."""

    job: Job
    steps_per_epoch: int
    total_steps: int  # updates of the whole job
    progress: Progress  # of the run
    custom_loop: bool = False  # the user's own loop ends epochs and evaluates
    stopped: bool = False  # a stop was requested, and everything is saved

    def finished(self) -> bool:
        """True if no update is left; a custom loop decides this itself."""
        return not self.custom_loop and self.progress.step >= self.total_steps

    def over(self) -> bool:
        """True if this start makes no further update."""
        return self.finished() or self.stopped

    def epoch_ends(self) -> bool:
        """True after the last update of an epoch."""
        return self.progress.step_in_epoch == 0

    def verification(self) -> bool:
        """True after the first update, and at the steps of train.audit_every."""
        every = self.job.train.audit_every
        return self.progress.step == 1 or bool(every and self.progress.step % every == 0)

    def evaluation(self) -> bool:
        """True at the steps of an evaluation, including the last one, so that its checkpoint contains the result."""
        return not self.custom_loop and (self.finished() or self.evaluation_requested())

    def evaluation_requested(self) -> bool:
        """True at the steps of an evaluation according to train.evaluate_every."""
        every = round(self.job.train.evaluate_every * self.steps_per_epoch)
        return bool(self.job.train.evaluate_every) and self.progress.step % max(1, every) == 0

    def line(self) -> bool:
        """True at the updates with a line according to run.log_steps: the first of an epoch, and every N."""
        every = self.job.run.log_steps
        return bool(every) and (self.progress.step - 1) % self.steps_per_epoch % every == 0

    def status(self) -> bool:
        """True where a status round is due whatever the time; `StatusRound` decides on the other updates."""
        return self.progress.step == 1 or self.epoch_ends() or self.evaluation() or self.finished() or self.line()

    def save(self) -> bool:
        """True at the steps of checkpoint.every; a status round decides on saves by time."""
        every = steps_between_saves(self.job.checkpoint.every, self.steps_per_epoch)
        return bool(every) and self.progress.step % every == 0


@dataclass
class Observed:
    """What the records of a run need from one status round to the next."""

    divergence: Divergence  # watches the loss
    bad_pictures: set[str]  # that can't be read, and are skipped or replaced
    epoch_mean: EpochMean = field(default_factory=EpochMean)  # of the current epoch
    evaluated: EvaluationMetrics | None = None  # the last evaluation of this session


@dataclass
class Hooks:
    """Functions that a trainer calls."""

    at_epoch_end: AtEpochEnd | None = None  # the user's own function, for rank 0
    # called where an epoch begins or is resumed, to balance the shares; None: they stay
    balance_shares: Callable[[], None] | None = None
    on_first_update: Callable[[], None] | None = None  # called once, when this session has trained its first update
    on_differing_buffers: Callable[[list[str]], None] = lambda _: None  # called with their names, once there are some
    extra_state: Callable[[], dict[str, Any]] = dict  # returns further entries for checkpoints


@dataclass
class Trainer:
    """The objects of a run."""

    run: RunContext
    trained: TrainedNetwork  # classes, input size and preprocessing, stored with the weights
    feed: Feed  # what this process computes for each update
    update: Updater  # makes an update
    # evaluates on all processes; takes a function that returns True if this process was asked to stop
    evaluate: Callable[..., Evaluation]
    test: Callable[..., Evaluation] | None  # evaluates the held-out samples; None if there are none
    due: Due  # what is due after an update, and the progress
    status_round: StatusRound  # the periodic collective
    sync: ChosenSync  # the sync method
    observed: Observed
    hooks: Hooks
    release: Callable[[], None]  # releases worker processes and groups, and restores changed classes
    saver: Saver = field(default_factory=Saver)  # writes checkpoints
    heartbeats: HeartbeatWriter = field(default_factory=HeartbeatWriter)  # records the phase and the last update

    @property
    def job(self) -> Job:
        """The resolved options of the run."""
        return self.run.job

    @property
    def folder(self) -> RunFolder:
        """The run folder, or NOWHERE."""
        return self.run.folder

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.run.world

    @property
    def journal(self) -> Journal:
        """Writes records."""
        return self.run.journal

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return self.due.progress

    @property
    def network(self) -> ParallelNetwork:
        """The network under its mode."""
        return self.update.network

    @property
    def synchronizer(self) -> Synchronizer:
        """The sync method, in addition to the parallel mode."""
        return self.update.synchronizer

    def count_update(self) -> None:
        """Counts the last update and reports skipped updates."""
        for one in self.update.left_out:
            cost = f" ({one.also})" if one.also else ""
            message = f"update {one.step + 1} is skipped: {one.what} ({one.where}){cost}"
            self.journal.line(message)
            self.journal.event("left-out", message, self.progress.step + 1)
        self.update.left_out.clear()
        self.progress.advance(self.due.steps_per_epoch)
        if self.hooks.on_first_update:
            self.hooks.on_first_update()
            self.hooks.on_first_update = None

    def weigh_save(self, stalled_s: float) -> None:
        """Adapts the time until the next save to the delay by the last one, unless checkpoint.every sets it."""
        if interval := self.saver.interval:
            self.status_round.save_every_s = interval.saved(stalled_s, self.saver.wrote_s)
            interval.record(self.status_round.save_every_s, self.journal, self.progress.step)

    def observe(self, status: Status) -> None:
        """Reports slow ranks, stalls and the cost of communication; adapts local steps to the link."""
        monitor, step = self.sync.monitor, self.progress.step
        self.note_stall(self.heartbeats.too_long(status.waited_s), status.waited_s)
        if self.saver.interval:
            self.saver.interval.trained(status.seconds, status.samples, saving=self.saver.step is not None)
        if isinstance(monitor, Watcher):
            monitor.name_a_stall(status.waited_s, step, self.journal)
            self.sync.cost = monitor.observe(status.extra, step, self.journal)
            self.status_round.multiple = self.sync.cost.every
        elif monitor:
            monitor.observe(status.extra, step, self.world.size, self.journal)

    def note_stall(self, message: str, seconds: float) -> None:
        """Records a stall if no watcher does."""
        if message and not isinstance(self.sync.monitor, Watcher):
            self.journal.event("stall", message, self.progress.step, seconds=seconds)

    def verify_replicas(self) -> None:
        """Raises RunError if the network of a process differs from rank 0's."""
        if not self.network.traits.sharded and not self.world.alone:
            named = self.synchronizer.replicas(self.network.model)
            check_replicas(named, self.world, self.progress.step, self.network)


def seconds_between_saves(text: str) -> float:
    """Returns the seconds of "60s", "10min" or "2h", the initial value for "auto"; infinity for other values."""
    if text == "auto":
        return FIRST_S
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    return float(match[1]) * SECONDS[match[2]] if match else float("inf")


@functools.cache
def steps_between_saves(text: str, steps_per_epoch: int) -> int:
    """Returns the number of updates of "100steps" or "2epochs"; 0 for other values."""
    match = re.fullmatch(r"(\d+)(step|epoch)s?", text)
    return int(match[1]) * (steps_per_epoch if match[2] == "epoch" else 1) if match else 0

"""The objects of a run, and what is due at each step."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.checkpoint.trained import TrainedNetwork
from manyhands.config.job import Job
from manyhands.core.records import EvaluationMetrics
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import check_replicas
from manyhands.parallel.network import ParallelNetwork
from manyhands.sync.costs import Cost
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.feed import Feed
from manyhands.train.heartbeat import HeartbeatWriter
from manyhands.train.journal import Journal
from manyhands.train.metrics import Evaluation
from manyhands.train.monitors import CommunicationMonitor, Divergence, Watcher
from manyhands.train.objects import AtEpochEnd
from manyhands.train.saver import FIRST_S, SaveInterval, Saver
from manyhands.train.state import Progress
from manyhands.train.status import EpochMean, Status, StatusRound
from manyhands.train.step import Updater

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass
class Trainer:
    """The objects of a run."""

    job: Job  # what the user asked for
    folder: RunFolder  # where the run is kept
    world: World  # who takes part
    journal: Journal  # writes records
    mode: str  # the parallel mode in force
    classes: tuple[str, ...]  # a name for each output of the network
    trained: TrainedNetwork  # what the weights don't say of the network
    feed: Feed  # what this process computes for each update
    network: ParallelNetwork  # the model under its mode
    update: Updater  # makes an update
    # evaluates on all processes; may be given what says that this one was asked to stop
    evaluate: Callable[..., Evaluation]
    status_round: StatusRound  # what all processes agree on every so often
    progress: Progress  # how far the run has come
    total_steps: int  # updates of the whole job
    digest: str  # of what decides the order of samples
    sync: Cost  # how processes agree, decided
    release: Callable[[], None]  # gives back what was taken (worker processes, changed classes)
    watcher: Watcher | None = None  # where processes wait for exchanges that the mode doesn't make
    communication: CommunicationMonitor | None = None  # where machines wait for each other in every update
    augment: str = "none"  # how training pictures are varied, decided
    draws: bool = False  # True where the network was seen to draw random numbers in training
    phase: str = "train"  # what is going on, for a failure's record
    heartbeats: HeartbeatWriter = field(default_factory=HeartbeatWriter)  # says how far this process is
    stopped: bool = False  # somebody asked for a stop, and all is saved
    saves: int = field(default=0)  # checkpoints tried in this run
    saver: Saver = field(default_factory=Saver)  # writes them
    # who writes one, with the ranks of its machine: rank 0, and another's where disks aren't shared
    writers: Mapping[int, range] = field(default_factory=lambda: {0: range(1)})
    divergence: Divergence = field(init=False)  # watches the loss
    # weighs what saves hold up against failures, on rank 0; None: the user has said how often to save
    interval: SaveInterval | None = field(init=False)
    epoch_mean: EpochMean = field(default_factory=EpochMean)  # of the epoch that goes on
    test: Callable[..., Evaluation] | None = None  # evaluates what was held out; None where nothing was
    on_first_update: Callable[[], None] | None = None  # called once, when this session has trained its first update
    on_differing_buffers: Callable[[list[str]], None] = lambda _: None  # called with their names, once there are some
    at_epoch_end: AtEpochEnd | None = None  # the user's own function, for rank 0
    evaluated: EvaluationMetrics | None = None  # the last evaluation of this session
    custom_loop: bool = False  # the user's own loop ends epochs and evaluates
    noted: Callable[[], dict[str, Any]] = dict  # what a checkpoint is to hold besides
    # called where an epoch begins or goes on, so that shares suit the processes; None: they stay
    balance_shares: Callable[[], None] | None = None
    bad_pictures: set[str] = field(default_factory=set[str])  # that can't be read, and are done without

    def __post_init__(self) -> None:
        """Begins to watch the loss, and lets those who watch processes know them."""
        self.divergence = Divergence(len(self.classes))
        self.heartbeats.linked = self.world.local_size < self.world.size
        weighs = self.job.checkpoint.every == "auto" and self.world.is_main and self.folder is not NOWHERE
        self.interval = SaveInterval(self.folder, self.world) if weighs else None
        if self.communication:
            self.communication.waited_for_data_s = lambda: self.status_round.waiting_s
            self.communication.run = str(self.folder.path)

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
        self.progress.advance(self.feed.order.steps_per_epoch)
        if self.on_first_update:
            self.on_first_update()
            self.on_first_update = None

    def done(self) -> bool:
        """True if no update is left; a custom loop decides this itself."""
        return not self.custom_loop and self.progress.step >= self.total_steps

    def evaluation_due(self) -> bool:
        """True at the steps of an evaluation, including the last one, so that its checkpoint contains the result."""
        return not self.custom_loop and (self.done() or self.evaluation_asked())

    def evaluation_asked(self) -> bool:
        """True at the steps of an evaluation according to train.evaluate_every."""
        every = round(self.job.train.evaluate_every * self.feed.order.steps_per_epoch)
        return bool(self.job.train.evaluate_every) and self.progress.step % max(1, every) == 0

    def save_due(self, *, by_time: bool) -> bool:
        """True at the steps of checkpoint.every; with `by_time`, also if no save is running."""
        every = steps_between_saves(self.job.checkpoint.every, self.feed.order.steps_per_epoch)
        return (by_time and self.saver.step is None) or (bool(every) and self.progress.step % every == 0)

    def weigh_save(self, stalled_s: float) -> None:
        """Adapts the time until the next save to the delay by the last one, unless checkpoint.every sets it."""
        if self.interval:
            self.status_round.save_every_s = self.interval.saved(stalled_s, self.saver.wrote_s)
            self.interval.record(self.status_round.save_every_s, self.journal, self.progress.step)

    def line_due(self) -> bool:
        """True at the updates with a line according to run.log_steps: the first of an epoch, and every N."""
        every = self.job.run.log_steps
        return bool(every) and (self.progress.step - 1) % self.feed.order.steps_per_epoch % every == 0

    def observe(self, status: Status) -> None:
        """Reports slow ranks, stalls and the cost of communication; adapts local steps to the link."""
        message = status.extra
        if self.interval:
            self.interval.trained(status.seconds, status.samples, saving=self.saver.step is not None)
        if self.watcher:
            self.watcher.name_a_stall(status.waited_s, self.progress.step, self.journal)
            self.sync = self.watcher.observe(message, self.progress.step, self.journal)
            self.status_round.multiple = self.sync.every
        elif self.communication:
            self.communication.observe(message, self.progress.step, self.world.size, self.journal)

    @property
    def status_values(self) -> "Callable[[float, int], list[float]] | None":
        """Returns this process's numbers for the status round; see `observe`."""
        watching = self.watcher or self.communication
        return watching.mine if watching else None

    def note_stall(self, said: str, seconds: float) -> None:
        """Records a stall if no watcher does."""
        if said and not self.watcher:
            self.journal.event("stall", said, self.progress.step, seconds=seconds)

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

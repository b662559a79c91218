"""The trainer: the objects, due work and records of a run, and why results depend on the number of processes."""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.checkpoint.trained import TrainedNetwork
from manyhands.config.job import Job
from manyhands.core.errors import RunError, first_names
from manyhands.core.phases import CLOCK, PHASES
from manyhands.core.quantities import percentage
from manyhands.core.records import EvaluationMetrics, PhaseMetrics, StepMetrics
from manyhands.core.run_folder import NOWHERE
from manyhands.parallel.apply import check_replicas, normalizes_in_groups
from manyhands.parallel.group.plain import gather_plain
from manyhands.sync.options import process_count_effect
from manyhands.train.choose_sync import ChosenSync
from manyhands.train.data_setup import check_bad_pictures
from manyhands.train.feed import Feed
from manyhands.train.journal import RunContext
from manyhands.train.loss import Evaluation
from manyhands.train.objects import AtEpochEnd, EpochEnd
from manyhands.train.optimize import largest_learning_rate
from manyhands.train.saver import FIRST_S, Saver
from manyhands.train.state import Progress
from manyhands.train.status import DivergenceDetector, HeartbeatWriter, SpeedMonitor, Status, StatusRound
from manyhands.train.step import Updater


@dataclass
class DueWork:
    """Determines, the same on all processes, which work is due after an update."""

    job: Job
    steps_per_epoch: int
    total_steps: int  # updates of the entire job
    progress: Progress
    custom_loop: bool = False  # the user's own loop ends epochs and evaluates
    stopped: bool = False  # a stop was requested, and all is saved

    def finished(self) -> bool:
        """Returns True if no update is left. In a custom loop, the user decides this."""
        return not self.custom_loop and self.progress.step >= self.total_steps

    def run_is_over(self) -> bool:
        return self.finished() or self.stopped

    def epoch_ends(self) -> bool:
        return self.progress.step_in_epoch == 0

    def verification(self) -> bool:
        every = self.job.train.audit_every
        return self.progress.step == 1 or bool(every and self.progress.step % every == 0)

    def evaluation(self) -> bool:
        """Returns True if an evaluation is due. The last update is always evaluated, for the last checkpoint."""
        return not self.custom_loop and (self.finished() or self.evaluation_requested())

    def evaluation_requested(self) -> bool:
        every = round(self.job.train.evaluate_every * self.steps_per_epoch)
        return bool(self.job.train.evaluate_every) and self.progress.step % max(1, every) == 0

    def log_line(self) -> bool:
        """Returns True if run.log_steps = N requests a line: at an epoch's first update and every N updates."""
        every = self.job.run.log_steps
        return bool(every) and (self.progress.step - 1) % self.steps_per_epoch % every == 0

    def status(self) -> bool:
        """Returns True if a status round is due at this step, regardless of time."""
        return self.progress.step == 1 or self.epoch_ends() or self.evaluation() or self.finished() or self.log_line()

    def save(self) -> bool:
        """Returns True if checkpoint.every in steps or epochs requests a save. Status rounds start saves by time."""
        return self._save_every > 0 and self.progress.step % self._save_every == 0

    @functools.cached_property
    def _save_every(self) -> int:
        """The number of updates between saves for "100steps" or "2epochs", 0 for other values of checkpoint.every."""
        match = re.fullmatch(r"(\d+)(step|epoch)s?", self.job.checkpoint.every)
        return int(match[1]) * (self.steps_per_epoch if match[2] == "epoch" else 1) if match else 0


@dataclass
class ObservedResults:
    """Results of status rounds and evaluations that later records need."""

    divergence: DivergenceDetector
    bad_pictures: set[str]  # unreadable pictures, skipped or replaced
    epoch_sums: tuple[float, ...] = (0.0, 0.0, 0.0)  # losses, correct predictions and samples of the current epoch
    complete_epoch: bool = True  # False if the run resumed within the epoch, which leaves its means unknown
    evaluated: EvaluationMetrics | None = None  # the last evaluation of this start


@dataclass
class Hooks:
    """Functions that a trainer calls."""

    at_epoch_end: AtEpochEnd | None = None  # the user's function, for rank 0
    balance_shares: Callable[[], None] | None = None  # called before each epoch and on resume; None: shares stay
    on_first_update: Callable[[], None] | None = None  # called once, after the first update of this start
    on_differing_buffers: Callable[[list[str]], None] = lambda _: None  # called with the buffers' names
    extra_state: Callable[[], dict[str, Any]] = dict  # returns further entries for checkpoints


@dataclass
class Trainer:
    """The objects of a run on one process."""

    run: RunContext
    trained: TrainedNetwork  # classes, input size and preprocessing, stored with the weights
    feed: Feed  # the samples of this process for each update
    updater: Updater
    # evaluates on all processes; takes a function that returns True if this process was asked to stop
    evaluate: Callable[..., Evaluation]
    test: Callable[..., Evaluation] | None  # evaluates the held-out samples; None if there are none
    due: DueWork
    status_round: StatusRound
    sync: ChosenSync
    observed: ObservedResults
    hooks: Hooks
    resources: contextlib.ExitStack  # ends worker processes and groups, and restores changed classes
    saver: Saver = field(default_factory=Saver)
    heartbeats: HeartbeatWriter = field(default_factory=HeartbeatWriter)

    def __post_init__(self) -> None:
        run, updater = self.run, self.updater
        self.job, self.folder, self.world, self.journal = run.job, run.folder, run.world, run.journal
        self.network, self.synchronizer = updater.network, updater.synchronizer

    @property
    def progress(self) -> Progress:
        return self.due.progress

    def count_update(self) -> None:
        for message in self.updater.skipped:
            self.journal.line(message)
            self.journal.event("left-out", message, self.progress.step + 1)
        self.updater.skipped.clear()
        self.progress.advance(self.due.steps_per_epoch)
        if self.hooks.on_first_update:
            self.hooks.on_first_update()
            self.hooks.on_first_update = None

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Sets the heartbeats' phase within the context, and excludes the context's time from the training time.

        After an exception the phase stays, for the failure record.
        """
        began_s, self.heartbeats.phase = time.perf_counter(), phase
        yield
        self.status_round.exclude_time(time.perf_counter() - began_s)
        self.heartbeats.phase = "train"

    def record_stall(self, message: str, seconds: float) -> None:
        if message and not isinstance(self.sync.monitor, SpeedMonitor):
            self.journal.event("stall", message, self.progress.step, seconds=seconds)

    def verify_replicas(self) -> None:
        """Checks that unsharded networks are equal on all processes. A collective."""
        if not self.network.traits.sharded and not self.world.alone:
            named = self.synchronizer.replicas(self.network.model)
            check_replicas(named, self.world, self.progress.step, self.network)


def seconds_between_saves(text: str) -> float:
    """Converts checkpoint.every to seconds: "10min" to 600, "auto" to FIRST_S, and other values to infinity."""
    if text == "auto":
        return FIRST_S
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    return float(match[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0}[match[2]] if match else float("inf")


def record_status(trainer: Trainer, status: Status) -> None:
    """Records the result of a status round. All processes call this, because some results need collectives."""
    progress, steps_per_epoch = trainer.progress, trainer.feed.order.steps_per_epoch
    if progress.step == 1:
        trainer.journal.event("first-step", step=1)
    if differing := trainer.updater.differing_buffers():
        trainer.hooks.on_differing_buffers(differing)
    if status.replaced:
        record_replaced_pictures(trainer)
    if status.report_time:
        record_time(trainer)
    observed, epoch_loss, epoch_top1 = trainer.observed, None, None
    found = status.loss_sum, status.correct, status.samples
    loss_sum, correct, samples = observed.epoch_sums = tuple(map(sum, zip(observed.epoch_sums, found, strict=True)))
    if trainer.due.epoch_ends():
        if observed.complete_epoch and samples:
            epoch_loss, epoch_top1 = loss_sum / samples, correct / samples
        observed.epoch_sums, observed.complete_epoch = (0.0, 0.0, 0.0), True
    if not status.samples:  # all updates since the last round were skipped
        return
    if growing := observed.divergence.observe(status.loss):
        trainer.journal.event("warning", growing, progress.step)
    trainer.journal.metrics(
        StepMetrics(
            time=time.time(),
            epoch=progress.epoch,
            step=progress.step,
            step_in_epoch=progress.step_in_epoch,
            steps_per_epoch=steps_per_epoch,
            total_steps=trainer.due.total_steps,
            loss=status.loss,
            top1=status.top1,
            learning_rate=largest_learning_rate(trainer.updater.optimizer),
            images_per_s=status.samples / status.seconds,
            samples=round(status.samples),
            data_share=status.data_share,
            saved_step=progress.saved_step,
            epoch_loss=epoch_loss,
            epoch_top1=epoch_top1,
            asked=trainer.due.log_line(),
        )
    )
    own = status.own
    figures = f"loss={own.loss:.4f} acc={percentage(own.top1)}" if own.samples else "loss=- acc=-"
    of_epoch = f" epoch_loss={epoch_loss:.4f}" if epoch_loss is not None else ""
    place = f"epoch={(progress.step - 1) // steps_per_epoch + 1} step={progress.step}/{trainer.due.total_steps}"
    totals = f"samples={own.samples} all_loss={status.loss:.4f}{of_epoch}"
    trainer.journal.line(f"rank={trainer.world.rank} {place} {figures} {totals}")


def record_time(trainer: Trainer) -> None:
    """Records each process's seconds by phase since the last call. A collective if there is a run folder."""
    if trainer.folder is NOWHERE:
        return
    progress = trainer.progress
    own = [round(seconds, 6) for seconds in (*CLOCK.take_seconds(), CLOCK.take_queued())]
    *columns, queued = zip(*gather_plain(own, trainer.world), strict=True)
    trainer.journal.metrics(
        PhaseMetrics(
            time=time.time(),
            epoch=max(1, progress.epoch + bool(progress.step_in_epoch)),
            step=progress.step,
            seconds={phase: list(column) for phase, column in zip(PHASES, columns, strict=True)},
            queued_s=list(queued),
        )
    )


def record_replaced_pictures(trainer: Trainer) -> None:
    """Records the pictures that were replaced since the last call. A collective. Raises RunError for too many."""
    mine = trainer.feed.loader.replaced
    found = {name for names in gather_plain(mine, trainer.world) for name in names}
    mine.clear()
    trainer.observed.bad_pictures |= found
    message = f"{len(found)} unreadable picture(s) were replaced by other pictures: {first_names(sorted(found), 3)}"
    trainer.journal.event("replaced", message, trainer.progress.step, count=len(found), pictures=sorted(found))
    check_bad_pictures(trainer.observed.bad_pictures, trainer.feed.order.length, RunError)


def call_at_epoch_end(trainer: Trainer) -> None:
    """Calls the user's function on rank 0 at the end of an epoch. An exception ends the run."""
    progress, evaluated = trainer.progress, trainer.observed.evaluated
    if trainer.hooks.at_epoch_end is None or not trainer.world.is_main or progress.step_in_epoch:
        return
    made = evaluated if evaluated and evaluated.step == progress.step else None
    with trainer.paused("at_epoch_end"):
        trainer.hooks.at_epoch_end(EpochEnd(progress.epoch, progress.step, made, trainer.folder.path.absolute()))
        trainer.heartbeats.record_progress()  # before the phase ends: its time is no stall of training


# Kinds of random masks: parts of class names (torchvision, timm, …) and attributes with a probability.
_MASKS = {
    "Dropout": (("dropout",), ("p",)),
    "Stochastic depth": (("stochasticdepth", "droppath", "drop_path"), ("drop_prob", "p")),
    "Attention dropout": (("attention",), ("dropout", "attention_dropout", "attn_dropout", "dropout_p")),
}


def process_count_dependence_reasons(trainer: Trainer) -> list[str]:
    """Returns sentences on why results depend on the number of processes, for plan.json and the report."""
    loss_fn = trainer.updater.loss_fn
    found = [loss_fn.dependence_reason if loss_fn else "", *_norm_reasons(trainer), *_rng_reasons(trainer)]
    found.append(process_count_effect(trainer.sync.cost.method))
    if not trainer.job.parallel.gradients_mean:
        summed = "Gradients are summed over processes and grow with the number of processes"
        found.append(f"{summed} (gradients_mean = false).")
    return list(filter(None, found))


def _norm_reasons(trainer: Trainer) -> list[str]:
    modules = trainer.network.model.modules()
    if not any(isinstance(module, _BatchNorm) for module in modules):
        return []
    local = trainer.job.train.norm_group == "local" or trainer.synchronizer.local_statistics
    if local or not normalizes_in_groups(trainer.run.mode):
        return ["BatchNorm computes statistics over each process's own samples (norm_group = local)."]
    unknown = sum(not layer.rows_per_sample for layer in trainer.network.norms.layers)
    effect = "so each process computes the statistics of these layers over its own rows."
    said = f"{unknown} BatchNorm layer(s) normalize rows that can't be assigned to samples, {effect}"
    return [said] if unknown else []


def _rng_reasons(trainer: Trainer) -> list[str]:
    modules = list(trainer.network.model.modules())
    found = [kind for kind in _MASKS if any(_has_random_mask(module, kind) for module in modules)]
    if not found and trainer.network.traits.is_random:
        return ["The network's random numbers in training depend on the number of processes."]
    return [f"{kind} masks depend on the number of processes." for kind in found]


def _has_random_mask(module: nn.Module, kind: str) -> bool:
    words, attributes = _MASKS[kind]
    classes = [one.__name__.lower() for one in type(module).__mro__]
    values = [getattr(module, name, 0.0) for name in attributes]
    draws = any(isinstance(value, int | float) and value > 0 for value in values)
    return draws and any(word in name for word in words for name in classes)

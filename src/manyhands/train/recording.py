"""The records of a run: status rounds, seconds by phase, replaced pictures, ends of epochs."""

import time

from manyhands.core.errors import RunError
from manyhands.core.phases import CLOCK, PHASES
from manyhands.core.quantities import percentage
from manyhands.core.records import PhaseMetrics, StepMetrics
from manyhands.core.run_folder import NOWHERE
from manyhands.parallel.group.plain import gather_plain
from manyhands.train.data_setup import check_bad_pictures, first_names
from manyhands.train.objects import EpochEnd
from manyhands.train.optimize import largest_rate
from manyhands.train.status import Status
from manyhands.train.trainer import Trainer


def record_status(trainer: Trainer, status: Status) -> None:
    """Records the result of a status round; a collective if the status requires one, the same on all processes."""
    progress, steps_per_epoch = trainer.progress, trainer.feed.order.steps_per_epoch
    if progress.step == 1:
        trainer.journal.event("first-step", step=1)
    if differing := trainer.update.differing_buffers():
        trainer.hooks.on_differing_buffers(differing)
    if status.replaced:
        record_replaced(trainer)
    if status.report_time:
        record_time(trainer)
    if not status.samples:
        return
    trainer.observed.epoch_mean.add(status)
    growing = trainer.observed.divergence.observe(status.loss)
    if growing:
        trainer.journal.event("warning", growing, progress.step)
    epoch_loss, epoch_top1 = trainer.observed.epoch_mean.take() if progress.step_in_epoch == 0 else (None, None)
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
            learning_rate=largest_rate(trainer.update.optimizer),
            images_per_s=status.samples / status.seconds,
            samples=round(status.samples),
            data_share=status.data_share,
            saved_step=progress.saved_step,
            epoch_loss=epoch_loss,
            epoch_top1=epoch_top1,
            asked=trainer.due.line(),
        )
    )
    own = f"loss={status.own.loss:.4f} acc={percentage(status.own.top1)}" if status.own.samples else "loss=- acc=-"
    of_epoch = f" epoch_loss={epoch_loss:.4f}" if epoch_loss is not None else ""
    place = f"epoch={(progress.step - 1) // steps_per_epoch + 1} step={progress.step}/{trainer.due.total_steps}"
    trainer.journal.line(
        f"rank={trainer.world.rank} {place} {own} samples={status.own.samples} all_loss={status.loss:.4f}{of_epoch}"
    )


def record_time(trainer: Trainer) -> None:
    """Records the seconds by phase of all processes since the last call; a collective if there is a run folder."""
    if trainer.folder is NOWHERE:
        return
    progress = trainer.progress
    own = [round(seconds, 6) for seconds in (*CLOCK.take(), CLOCK.take_queued())]
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


def record_replaced(trainer: Trainer) -> None:
    """Records the pictures that were replaced since the last call; a collective.

    Raises:
        RunError: too many pictures were replaced; raised on all processes.
    """
    mine = trainer.feed.loader.replaced
    found = {name for names in gather_plain(mine, trainer.world) for name in names}
    mine.clear()
    trainer.observed.bad_pictures |= found
    step = trainer.progress.step
    message = f"{len(found)} unreadable picture(s) were replaced by other pictures: {first_names(sorted(found), 3)}"
    trainer.journal.event("replaced", message, step, count=len(found), pictures=sorted(found))
    check_bad_pictures(trainer.observed.bad_pictures, trainer.feed.order.length, RunError)


def record_epoch(trainer: Trainer) -> None:
    """Calls the user's function on rank 0 at the end of an epoch; an exception ends the run."""
    progress = trainer.progress
    if trainer.hooks.at_epoch_end is None or not trainer.world.is_main or progress.step_in_epoch:
        return
    trainer.heartbeats.phase = "at_epoch_end"
    made = (
        trainer.observed.evaluated
        if trainer.observed.evaluated and trainer.observed.evaluated.step == progress.step
        else None
    )
    began = time.perf_counter()
    trainer.hooks.at_epoch_end(EpochEnd(progress.epoch, progress.step, made, trainer.folder.path.absolute()))
    trainer.status_round.leave_out(time.perf_counter() - began)
    trainer.heartbeats.beat()
    trainer.heartbeats.phase = "train"

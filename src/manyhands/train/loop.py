"""The sequence of a run: updates, evaluations, checkpoints and the end. Contains no tensor operations."""

import math
import time
from collections.abc import Iterator

from manyhands.core.phases import CLOCK, COMPUTE, DATA, OTHER, RECORDS, SAVING
from manyhands.core.run_folder import NOWHERE
from manyhands.train.diagnose import explain_lost
from manyhands.train.evaluate import Interrupted, evaluate, test_once
from manyhands.train.feed import UpdateShare
from manyhands.train.recording import record_epoch, record_status, record_time
from manyhands.train.saving import finish_save, save, save_last
from manyhands.train.stopping import StopSignal, listening
from manyhands.train.trainer import Trainer


def fit(trainer: Trainer) -> str:
    """Trains until the job is complete or a stop is requested.

    Returns:
        "finished", or "stopped" with everything saved.
    """
    with listening() as stop, trainer.heartbeats.beating(lambda: trainer.phase):
        try:
            ended = _train(trainer, stop)
        except Interrupted:
            trainer.journal.event("stopping", "saving; the pending evaluation runs on resume", trainer.progress.step)
            save_last(trainer)
            ended = "stopped"
        finish_save(trainer)
        record_time(trainer)
        return ended


def _train(trainer: Trainer, stop: StopSignal) -> str:
    progress = trainer.progress
    CLOCK.take()
    trainer.status_round.reset(progress.step)
    trainer.epoch_mean.whole = progress.step_in_epoch == 0
    if trainer.job.run.trace_steps:
        from manyhands.train.trace import trace  # torch's profiler comes with it

        return trace(trainer, lambda: updates(trainer, stop))
    if progress.owed and _conclude(trainer, stop):
        save(trainer)
    while not (trainer.done() or trainer.stopped):
        if trainer.balance_shares:
            trainer.balance_shares()
        for update in updates(trainer, stop):
            trainer.update(update, progress.step)
            trainer.count_update()
    if trainer.stopped:
        return "stopped"
    if progress.evaluated_step != progress.step:
        evaluate(trainer, stop)
    finish_save(trainer)
    if progress.saved_step != progress.step or not trainer.saves:
        save_last(trainer)
    test_once(trainer, stop)
    return "finished"


def updates(trainer: Trainer, stop: StopSignal) -> Iterator[UpdateShare]:
    """Yields the remaining updates of the current epoch, for `fit` or a custom loop.

    Measures the waiting time of each update and runs `attend` afterwards; ends early if the run is to stop.
    """
    found = trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch)
    while not (trainer.done() or trainer.stopped):
        started = time.perf_counter()
        CLOCK.to(DATA)
        trainer.heartbeats.beat(waiting=True)
        update = next(found, None)
        trainer.status_round.waiting_s += time.perf_counter() - started
        CLOCK.to(COMPUTE)
        if update is None:
            CLOCK.to(OTHER)
            started = time.perf_counter()
            record_time(trainer)
            waited_s = time.perf_counter() - started  # for a process that stands still just now
            trainer.note_stall(trainer.heartbeats.too_long(waited_s), waited_s)
            return
        trainer.heartbeats.beat()
        started = time.perf_counter()
        yield update
        CLOCK.to(RECORDS)
        trainer.note_stall(trainer.heartbeats.updated(trainer.progress.step), time.perf_counter() - started)
        if trainer.done():
            trainer.synchronizer.finish(trainer.progress.step)
        trainer.stopped = trainer.folder is not NOWHERE and attend(trainer, stop)
    CLOCK.to(OTHER)


def attend(trainer: Trainer, stop: StopSignal) -> bool:
    """Runs what is due after an update: status round, replica check, evaluation, save. Returns True to stop the run."""
    progress = trainer.progress
    epoch_ends = progress.step_in_epoch == 0
    audit = trainer.job.train.audit_every
    if progress.step == 1 or (audit and progress.step % audit == 0):
        trainer.verify_replicas()
    evaluation = trainer.evaluation_due()
    forced = epoch_ends or evaluation or trainer.done() or progress.step == 1 or trainer.line_due()
    if not trainer.status_round.due(progress.step, force=forced):
        if trainer.save_due(by_time=False):
            save(trainer)
        return False
    bad, written = len(trainer.feed.loader.replaced), trainer.saver.done
    status = trainer.status_round.add_up(
        trainer.update.measured,
        progress.step,
        stop=bool(stop),
        written=written,
        extra=trainer.status_values,
        replaced=bad,
    )
    if not math.isfinite(status.loss):
        raise explain_lost(trainer.network, trainer.world, trainer.update.measured)
    record_status(trainer, status)
    trainer.note_stall(trainer.heartbeats.too_long(status.waited_s), status.waited_s)
    trainer.observe(status)
    finish_save(trainer, written=status.written)
    if status.stop:
        trainer.journal.event("stopping", "saving", progress.step)
    progress.owed = evaluation
    if status.stop:
        if not progress.owed:
            record_epoch(trainer)
        save_last(trainer)
    elif trainer.custom_loop and epoch_ends:
        pass  # what the user's own loop does at an epoch's end belongs to what is saved there
    elif _conclude(trainer, stop) or trainer.save_due(by_time=bool(status.save)):
        save(trainer)
    return bool(status.stop)


def _conclude(trainer: Trainer, stop: StopSignal) -> bool:
    """The evaluation that is owed after an update, and what follows an epoch; True when it is the best so far."""
    improved = trainer.progress.owed and evaluate(trainer, stop)
    if trainer.job.checkpoint.pth_tar and trainer.progress.step_in_epoch == 0:
        from manyhands.train.pth_tar import write_pth_tar

        with CLOCK.within(SAVING):
            write_pth_tar(trainer, best=improved)
    record_epoch(trainer)
    return improved

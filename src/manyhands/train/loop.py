"""The sequence of a run: updates, evaluations, checkpoints and the end. Contains no tensor operations."""

import math
import time
from collections.abc import Iterator

from manyhands.core.phases import CLOCK, COMPUTE, DATA, OTHER, RECORDS, SAVING
from manyhands.core.run_folder import NOWHERE
from manyhands.core.stops import StopSignal, stop_signal
from manyhands.train.evaluate import Interrupted, evaluate_and_record, test_on_held_out
from manyhands.train.feed import UpdateShare
from manyhands.train.saving import finish_save, save, save_last, write_pth_tar
from manyhands.train.status import Status, explain_nonfinite
from manyhands.train.trainer import Trainer, call_at_epoch_end, record_status, record_time


def fit(trainer: Trainer) -> str:
    """Trains until the job ends or a stop is requested. A collective. Returns "finished", or "stopped" after saving.

    With run.trace_steps, only trains and traces a few updates, without a final evaluation and save.
    """
    due, progress, balance_shares = trainer.due, trainer.progress, trainer.hooks.balance_shares
    with stop_signal() as stop, trainer.heartbeats.write_in_background():
        start_clocks(trainer)
        try:
            if trainer.job.run.trace_steps:
                from manyhands.train.trace import trace  # imports torch's profiler

                trace(trainer, lambda: updates(trainer, stop))
            else:
                if progress.owed and finish_epoch(trainer, stop):
                    save(trainer)
                while not due.run_is_over():
                    if balance_shares:
                        balance_shares()
                    for update in updates(trainer, stop):
                        trainer.updater(update, progress.step)
                        trainer.count_update()
                if not due.stopped:
                    finish_training(trainer, stop)
        except Interrupted:
            trainer.journal.event("stopping", "saving; the pending evaluation runs on resume", progress.step)
            save_last(trainer)
            due.stopped = True
        finish_save(trainer)
        record_time(trainer)
    return "stopped" if due.stopped else "finished"


def start_clocks(trainer: Trainer) -> None:
    """Starts all clocks of a run, just before its first update."""
    CLOCK.take_seconds()
    trainer.status_round.reset(trainer.progress.step)
    trainer.observed.complete_epoch = trainer.due.epoch_ends()


def updates(trainer: Trainer, stop: StopSignal) -> Iterator[UpdateShare]:
    """Yields the epoch's remaining updates. With a run folder, calls `run_due_work` after each. A collective."""
    due, progress, heartbeats = trainer.due, trainer.progress, trainer.heartbeats
    found = trainer.feed.updates(progress.epoch, progress.step_in_epoch)
    while not due.run_is_over():
        started = time.perf_counter()
        CLOCK.start_phase(DATA)
        heartbeats.record_progress(waiting=True)
        update = next(found, None)
        trainer.status_round.waiting_s += time.perf_counter() - started
        CLOCK.start_phase(COMPUTE)
        if update is None:
            CLOCK.start_phase(OTHER)
            started = time.perf_counter()
            record_time(trainer)
            waited_s = time.perf_counter() - started  # long if another process is stalled
            trainer.record_stall(heartbeats.stall_warning(waited_s), waited_s)
            return
        heartbeats.record_progress()
        started = time.perf_counter()
        yield update
        CLOCK.start_phase(RECORDS)
        trainer.record_stall(heartbeats.record_update(progress.step), time.perf_counter() - started)
        if due.finished():
            trainer.synchronizer.finish(progress.step)
        if trainer.folder is not NOWHERE:
            run_due_work(trainer, stop)
    CLOCK.start_phase(OTHER)


def run_due_work(trainer: Trainer, stop: StopSignal) -> None:
    """Runs the replica check, status round, evaluation and save if due. Stops if requested. A collective."""
    due, progress = trainer.due, trainer.progress
    if due.verification():
        trainer.verify_replicas()
    if progress.step < trainer.status_round.next_step and not due.status():
        if due.save():
            save(trainer)
        return
    status = exchange_status(trainer, stop)
    progress.owed = due.evaluation()
    if status.stop:
        trainer.journal.event("stopping", "saving", progress.step)
        if not progress.owed:
            finish_epoch(trainer, stop)
        save_last(trainer)
        due.stopped = True
    elif due.custom_loop and due.epoch_ends():
        pass  # the session saves after the loop's own code at the end of the epoch
    elif finish_epoch(trainer, stop) or due.save() or (status.save and trainer.saver.step is None):
        save(trainer)


def exchange_status(trainer: Trainer, stop: StopSignal) -> Status:
    """Runs a status round and records its result. A collective. Raises RunError if a loss or gradient isn't finite."""
    progress, saver, sync = trainer.progress, trainer.saver, trainer.sync
    status = trainer.status_round.sum_measurements(
        trainer.updater.measured,
        progress.step,
        stop=bool(stop),
        written=saver.done,
        extra=sync.monitor.numbers_to_sum if sync.monitor else None,
        replaced_pictures=len(trainer.feed.loader.replaced),
    )
    if not math.isfinite(status.loss):
        raise explain_nonfinite(trainer.network, trainer.world, trainer.updater.measured)
    record_status(trainer, status)
    trainer.record_stall(trainer.heartbeats.stall_warning(status.waited_s), status.waited_s)
    if sync.monitor and (cost := sync.monitor.observe(status, progress.step, trainer.journal)):
        sync.cost, trainer.status_round.multiple = cost, cost.every
    finish_save(trainer, written=status.written)
    return status


def finish_epoch(trainer: Trainer, stop: StopSignal) -> bool:
    """Evaluates if due, and does what is due at an epoch's end. Returns True for the best result. A collective."""
    improved = trainer.progress.owed and evaluate_and_record(trainer, stop)
    if trainer.job.checkpoint.pth_tar and trainer.due.epoch_ends():
        with CLOCK.in_phase(SAVING):
            write_pth_tar(trainer, best=improved)
    call_at_epoch_end(trainer)
    return improved


def finish_training(trainer: Trainer, stop: StopSignal) -> None:
    """Evaluates and saves the final weights unless already done, then tests on held-out samples. A collective."""
    progress = trainer.progress
    if progress.evaluated_step != progress.step:
        evaluate_and_record(trainer, stop)
    finish_save(trainer)
    if progress.saved_step != progress.step or not trainer.saver.saves:
        save_last(trainer)
    test_on_held_out(trainer, stop)

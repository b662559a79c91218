"""Builds the trainer of a job or of a custom loop from its parts, and resumes it; runs no updates."""

from contextlib import suppress

import torch

from manyhands.checkpoint.trained import find_record
from manyhands.core.errors import UserError
from manyhands.core.quantities import short_time
from manyhands.core.resuming import OBJECTS, resume_command
from manyhands.core.run_folder import NOWHERE
from manyhands.train.data_setup import DTYPES, DataSetup, open_samples
from manyhands.train.evaluate import evaluate_as_shared, make_evaluator, make_tester
from manyhands.train.feed import Feed
from manyhands.train.loss import BETTER_LOSS, LossFn, verify_loss
from manyhands.train.network import describe_trained
from manyhands.train.optimize import total_steps
from manyhands.train.parts import Parts, grid_of, record_setup, refuse_uncuttable
from manyhands.train.recover import (
    Resumable,
    check_position,
    find_state,
    outputs_of,
    refuse_later_checkpoints,
    training_digest,
)
from manyhands.train.same_data import data_changes, refuse_other_classes
from manyhands.train.saving import load_rank_state
from manyhands.train.schedule import CustomScheduler, reading_of
from manyhands.train.sharing import order_and_sharing, refuse_small_micro_batches
from manyhands.train.state import Progress, restore
from manyhands.train.status import StatusRound
from manyhands.train.step import Updater
from manyhands.train.trainer import Trainer, seconds_between_saves
from manyhands.train.trial_step import warm_up
from manyhands.train.under_mode import put_under_mode

# An epoch that takes longer is announced.
_LONG_EPOCH_S = 60.0


def build(parts: Parts) -> Trainer:
    """Builds the trainer from its parts; a collective if there are several processes.

    Raises:
        UserError: data, model and job don't fit together.
    """
    job, folder, world, journal, mode = parts.job, parts.folder, parts.world, parts.journal, parts.mode
    refuse_uncuttable(parts)
    found = find_state(job, folder, world, in_pieces=parts.plan is not None) if folder is not NOWHERE else None
    outputs = outputs_of(found.snapshot) if found else 0
    samples = open_samples(job, world, parts.objects, journal, outputs, parts.splits)
    grid = grid_of(job, world, mode)
    model = parts.make_model(samples, grid, found)
    under = put_under_mode(parts, model, samples, grid, found)
    network, synced, trial = under.network, under.synced, under.trial
    classes = parts.name_outputs(samples.classes, network, trial)
    previous, most = parts.previous_shares(found)
    own = synced.synchronizer.local_statistics
    order, sharing = order_and_sharing(job, samples.splits, mode, network, journal, previous, own=own, most=most)
    refuse_small_micro_batches(order, sharing, network)
    optimizer = parts.make_optimizer(model, network)
    update = Updater(
        network,
        optimizer,
        _verify_loss(parts, len(classes), samples),
        job.train,
        world,
        parts.make_schedule(optimizer, order.steps_per_epoch),
        synchronizer=synced.synchronizer,
        gradients_mean=job.parallel.gradients_mean,
        unused=trial.unused,
    )
    warm_up(update, samples.train, min(trial.count, order.length))
    for module in parts.frozen:
        module.training = False
    feed = Feed(order, sharing, samples.train, network.share.index)
    evaluator = make_evaluator(samples.test, len(samples.splits.test), len(classes), job, network, world, parts.metrics)
    trainer = Trainer(
        job=job,
        folder=folder,
        world=world,
        journal=journal,
        mode=mode,
        classes=classes,
        trained=describe_trained(job, samples, classes, mode, parts.objects, world.size),
        feed=feed,
        network=network,
        update=update,
        evaluate=evaluate_as_shared(evaluator, update, feed),
        status_round=StatusRound(
            world, job.run.log_every_s, seconds_between_saves(job.checkpoint.every), synced.cost.every
        ),
        progress=Progress(step=job.train.start_epoch * order.steps_per_epoch, epoch=job.train.start_epoch),
        total_steps=total_steps(job.train, order.steps_per_epoch),
        digest=training_digest(job, order.length),
        sync=synced.cost,
        augment=samples.pixels.augment,
        draws=trial.draws,
        watcher=under.watcher(world),
        test=make_tester(samples, len(classes), job, update, feed, parts.metrics),
        communication=synced.communication,
        at_epoch_end=parts.objects.at_epoch_end,
        custom_loop=parts.custom_loop,
        release=lambda: under.release(samples),
        bad_pictures=set(samples.splits.skipped),
    )
    if parts.header:
        record_setup(parts, samples.splits, samples.classes, model, network.layouts, optimizer)
    say_expected(under.sample_s, trainer)
    if found:
        parts.before_resume(trainer, found)
        resume(trainer, found)
        parts.after_resume(trainer, found)
    return parts.finish(trainer)


def _verify_loss(parts: Parts, outputs: int, samples: DataSetup) -> LossFn | None:
    """The loss function as it adds up; says so where it doesn't. A collective where the job has a loss."""
    if parts.loss_fn is None:
        return None
    kind = DTYPES.get(parts.job.train.precision, torch.float32)
    loss_fn = verify_loss(parts.loss_fn, outputs, len(samples.classes), parts.world, kind)
    if loss_fn.dependent:
        parts.journal.event("warning", f"{loss_fn.dependent} (do: {BETTER_LOSS})")
    return loss_fn


def say_expected(sample_s: float, trainer: Trainer) -> None:
    """Stores the expected time of an update, from `sample_s` seconds per sample, and reports it if an epoch is long."""
    order = trainer.feed.order
    update_s = sample_s * order.batch / trainer.world.size
    epoch_s = update_s * order.steps_per_epoch
    if epoch_s >= _LONG_EPOCH_S:
        message = f"expected time: {short_time(update_s)} per update, {epoch_s / 60:,.0f} min per epoch"
        trainer.journal.event("note", message)
    trainer.heartbeats.expected_s = update_s


def resume(trainer: Trainer, found: Resumable) -> None:
    """Restores the trainer from a checkpoint."""
    names = [name for name, parameter in trainer.network.model.named_parameters() if parameter.requires_grad]
    where = str(found.path)
    if trainer.job.checkpoint.pth_tar:
        from manyhands.train.pth_tar import check_same_training

        check_same_training(trainer.job, found.snapshot, where)
    refuse_other_classes(found.snapshot.state.get("classes") or (), trainer.classes, where)
    check_position(found.snapshot, trainer.digest, trainer.feed.order.steps_per_epoch, names, where)
    if trainer.world.is_main:
        refuse_later_checkpoints(trainer.folder.checkpoints, int(found.snapshot.state.get("step", 0)))
    optimizer, source = trainer.update.optimizer, found.source
    trainer.progress, anew = restore(found.snapshot, trainer.network, optimizer, where=where, source=source)
    if trainer.update.gradients.scaler and "scaler" in found.snapshot.state:
        trainer.update.gradients.scaler.load_state_dict(found.snapshot.state["scaler"])
    load_rank_state(trainer, found.path)
    if isinstance(trainer.update.set_rates, CustomScheduler) and found.snapshot.state.get("schedule"):
        with reading_of(where):
            trainer.update.set_rates.resume(found.snapshot.state["schedule"], trainer.progress.step)
    for note in (*found.notes, *found.snapshot.notes, *filter(None, [anew, _data_changes(trainer, found)])):
        trainer.journal.event("warning", note, trainer.progress.step)
    step = trainer.progress.step
    message = f"resuming from step {step} of {where}"
    if trainer.done():
        epochs = 2 * max(1, trainer.job.train.epochs, trainer.progress.epoch)
        in_python = f'epochs={epochs}, checkpoint__resume="auto"'
        more = resume_command(trainer.folder.path, f"--epochs {epochs}", in_python)
        message = f"all {trainer.total_steps:,} updates of this run are complete (to train longer: {more})"
    trainer.journal.event("resumed", message, step, path=where, processes=trainer.world.size)


def _data_changes(trainer: Trainer, found: Resumable) -> str:
    """Returns a sentence that names the data that changed since the checkpoint was saved; empty if nothing changed."""
    with suppress(UserError):  # without a readable record nothing can be compared
        record = find_record(found.path, found.snapshot.state)
        # Of a folder the contents aren't compared: packing it changes nothing for the run.
        contents = trainer.job.data.name == OBJECTS
        words = ("training",) if trainer.custom_loop else ()  # its loop chooses what is evaluated
        if record and (changes := data_changes(record, trainer.trained, words, contents=contents)):
            return f"the data changed since the checkpoint was saved: {changes}"
    return ""

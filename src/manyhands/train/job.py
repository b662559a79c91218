"""Builds every part of a run from its job, one small function each; runs nothing."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from manyhands.checkpoint.trained import find_record
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import TensorLayout
from manyhands.core.quantities import short_time
from manyhands.core.resuming import OBJECTS, resume_command
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import plain
from manyhands.core.world import World
from manyhands.data.order import Order
from manyhands.data.splits import Splits, describe_samples
from manyhands.models.build import resolve_model
from manyhands.parallel.apply import one_process, takes_mesh
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.options import MODE_ALONE
from manyhands.parallel.plan import Plan
from manyhands.train.balance_shares import use_balanced_shares
from manyhands.train.compiled import compiled
from manyhands.train.data_setup import DTYPES, DataSetup, name_outputs, open_samples, pixels_for
from manyhands.train.evaluate import evaluate_as_shared, make_evaluator, make_tester
from manyhands.train.feed import Feed
from manyhands.train.journal import Journal
from manyhands.train.loss import BETTER_LOSS, LossFn, make_loss_fn, verify_loss
from manyhands.train.metrics import make_metrics
from manyhands.train.network import initialize_from_data, make_model, refuse_other_head, without_first_weights
from manyhands.train.objects import Objects
from manyhands.train.optimize import largest_rate, make_optimizer, total_steps
from manyhands.train.pth_tar import check_same_training
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
from manyhands.train.schedule import CustomScheduler, make_schedule, reading_of
from manyhands.train.sharing import kept_most, order_and_sharing, previous_shares, refuse_small_micro_batches
from manyhands.train.state import Progress, restore
from manyhands.train.status import StatusRound
from manyhands.train.step import Updater
from manyhands.train.trained import describe_trained
from manyhands.train.trainer import Trainer, seconds_between_saves
from manyhands.train.trial_step import warm_up
from manyhands.train.under_mode import BeforeMode, grid_of, put_under_mode

# An epoch that takes longer is announced.
_LONG_EPOCH_S = 60.0


def build(  # noqa: PLR0913 - everything that meets in a run
    job: Job,
    folder: RunFolder,
    world: World,
    mode: str,
    objects: Objects | None = None,
    plan: Plan | None = None,
    splits: Splits | None = None,
    *,
    header: bool = True,
) -> Trainer:
    """Builds all parts; a collective where there are several processes.

    `plan` says how ops are split, for modes that follow one; `splits` is the job's data, where that was opened before;
    `header` is False where what is trained on is recorded already.

    Raises:
        UserError: data, model and job don't fit together.
    """
    objects = objects or Objects()
    journal = Journal(folder, world.rank)
    set_determinism(job)
    refuse_uncuttable(job, plan, mode, journal, resumes=folder.has_checkpoints())
    loss_fn, metrics = make_loss_fn(job.train, objects.loss), make_metrics(job.train.metrics, objects.metrics)
    found = find_state(job, folder, world, in_pieces=plan is not None)
    samples = open_samples(job, world, objects, journal, outputs_of(found.snapshot) if found else 0, splits)
    classes = samples.classes
    grid = grid_of(job, world, mode)
    starting = without_first_weights(job, samples.pixels.size, objects) if found else job
    model = make_model(starting, samples.pixels, len(classes), world, objects, journal, grid)
    if not found:
        initialize_from_data(model, job, samples, world)
    elif grid is None:
        refuse_other_head(found.snapshot, model, len(classes), str(found.path))
    plain, count = is_cross_entropy(job, objects), len(classes)
    under = put_under_mode(
        BeforeMode(job, model, samples, mode, world, journal, loss_fn, plain, count, plan, grid, found)
    )
    network, synced, trial = under.network, under.synced, under.trial
    _note_mode(network, len(classes), journal)
    classes = _name_all(classes, max(trial.outputs, network.outputs), journal)
    own, most = synced.synchronizer.local_statistics, kept_most(found)
    order, sharing = order_and_sharing(
        job, samples.splits, world, mode, network, journal, previous_shares(found), own=own, most=most
    )
    refuse_small_micro_batches(order, sharing, network)
    optimizer = make_optimizer(model, job.train, sharded=network.sharded, own=objects.optimizer)
    update = Updater(
        network,
        optimizer,
        _verify_loss(loss_fn, len(classes), samples, job.train.precision, world, journal),
        job.train,
        world,
        make_schedule(optimizer, job.train, order.steps_per_epoch, objects.schedule),
        synchronizer=synced.synchronizer,
        gradients_mean=job.parallel.gradients_mean,
        unused=trial.unused,
    )
    warm_up(update, samples.train, min(trial.count, order.length))
    feed = Feed(order, sharing, samples.train, network.replica(world.rank))
    evaluator = make_evaluator(samples.test, len(samples.splits.test), len(classes), job, network, world, metrics)
    total = total_steps(job.train, order.steps_per_epoch)
    trainer = Trainer(
        job=job,
        folder=folder,
        world=world,
        journal=journal,
        mode=mode,
        classes=classes,
        trained=describe_trained(job, samples, classes, mode, objects, world.size),
        feed=feed,
        network=network,
        update=update,
        evaluate=evaluate_as_shared(evaluator, update, feed),
        status_round=StatusRound(
            world, job.run.log_every_s, seconds_between_saves(job.checkpoint.every), synced.cost.every
        ),
        progress=Progress(step=job.train.start_epoch * order.steps_per_epoch, epoch=job.train.start_epoch),
        total_steps=total,
        digest=training_digest(job, order.length),
        sync=synced.cost,
        augment=samples.pixels.augment,
        draws=trial.draws,
        watcher=under.watcher(world),
        test=make_tester(samples, len(classes), job, update, feed, metrics),
        communication=synced.communication,
        at_epoch_end=objects.at_epoch_end,
        release=lambda: under.release(samples),
        bad_pictures=set(samples.splits.skipped),
    )
    if header:
        known = journal, job, world, samples.splits, samples.classes, objects, model, network.layouts
        record_setup(*known, optimizer=optimizer)
    say_expected(under.sample_s, trainer)
    if found:
        resume(trainer, found)
    return compiled(use_balanced_shares(trainer))


def set_determinism(job: Job) -> None:
    if job.train.deterministic:
        # Without it torch refuses matrix products on CUDA. Source: the documentation of the function below.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != job.train.deterministic:
        torch.use_deterministic_algorithms(job.train.deterministic)  # imports torch's compiler


def is_cross_entropy(job: Job, objects: Objects) -> bool:
    """True where the loss can be computed from parts of the classes."""
    return objects.loss is None and job.train.loss == "cross-entropy"


def refuse_uncuttable(job: Job, plan: Plan | None, mode: str, journal: Journal, *, resumes: bool) -> None:
    """Raises UserError for what doesn't go with a network that is cut, or for a pin that can't be kept.

    What an earlier start of the run was pinned to has no effect under another mode, which is said.
    """
    if plan is None and job.parallel.pin and not resumes:
        why = "one process has nothing to split" if one_process(mode) else f"the mode {mode} splits no ops"
        hints = ("start two or more processes with --parallel semi", "or remove --pin")
        raise UserError(f"the pin {job.parallel.pin[0]} can't be applied: {why}", "parallel.pin", hints)
    if plan is None and not takes_mesh(mode):
        idle = [name for name in ("pin", "mesh", "plan") if getattr(job.parallel, name)]
        if idle and mode != MODE_ALONE and not job.parallel.searches:
            journal.event("warning", f"parallel.{idle[0]} has no effect under {mode}, only under semi and auto")
        return
    if job.checkpoint.pth_tar:
        hints = ("remove checkpoint.pth_tar, and after training run: manyhands checkpoint merge RUN weights.pth",)
        raise UserError(
            "main.py's checkpoint format (.pth.tar) can't store a sharded network", "checkpoint.pth_tar", hints
        )
    if job.train.compile:
        raise UserError("torch.compile doesn't support sharded networks", "train.compile", ("remove train.compile",))


def _verify_loss(
    loss_fn: LossFn, outputs: int, samples: DataSetup, precision: str, world: World, journal: Journal
) -> LossFn:
    """The loss function as it adds up; says so where it doesn't. A collective."""
    loss_fn = verify_loss(loss_fn, outputs, len(samples.classes), world, DTYPES.get(precision, torch.float32))
    if loss_fn.dependent:
        journal.event("warning", f"{loss_fn.dependent} (do: {BETTER_LOSS})")
    return loss_fn


def _note_mode(network: ParallelNetwork, classes: int, journal: Journal) -> None:
    """Says which parts stay whole, and how gradients are averaged; refuses outputs that don't fit the data."""
    if network.outputs and network.outputs < classes:
        hints = (f"add outputs: --set model.num_classes={classes}",)
        raise UserError(f"the network has {network.outputs} outputs for {classes} classes", "model.name", hints)
    if network.averages:
        journal.event("averaging", network.averages, 0)
    for note in network.plan.about.get("notes", []) if network.plan else ():
        journal.event("note", note)


def _name_all(classes: tuple[str, ...], outputs: int, journal: Journal) -> tuple[str, ...]:
    """A name for each output; says where there are some that no class stands for."""
    if outputs > len(classes):
        message = f"the network has {outputs:,} outputs for {len(classes):,} classes; extra outputs count as wrong"
        journal.event("note", message)
    return name_outputs(classes, outputs)


def record_setup(  # noqa: PLR0913 - everything that a user should know first
    journal: Journal,
    job: Job,
    world: World,
    splits: Splits,
    classes: Sequence[str],
    objects: Objects,
    model: nn.Module,
    layouts: Mapping[str, TensorLayout] = {},
    *,
    optimizer: torch.optim.Optimizer | None = None,
    custom_loop: bool = False,
) -> None:
    """Records what is trained on what, in three lines: the first ones on the screen, in a log and in the report.

    `layouts` are of parameters that this process has pieces of, `optimizer` is the user's own where it is made already,
    and with `custom_loop` their loop decides how many epochs there are and what is evaluated.
    """
    options, count = job.train, len(splits.train)
    order = Order(count, min(options.batch, count), 0, options.drop_last)
    parameters = sum(math.prod(layouts.get(name, each).shape) for name, each in model.named_parameters())
    named = (
        job.model.name
        if objects.model is not None
        else resolve_model(job.model, pixels_for(job, splits, objects).size).name
    )
    data = job.data.name if objects.train_set is None else type(objects.train_set).__name__
    tested = None if custom_loop else len(splits.test)
    counted = describe_samples(count, tested, classes, "samples" if splits.pixels.own else "pictures")
    kind, rate = plain(options.optimizer), f" at learning rate {options.lr:g}" if options.built_in else ""
    if optimizer and (custom_loop or not options.built_in):
        kind, rate = type(optimizer).__name__, f" at learning rate {largest_rate(optimizer):g}"
    epochs = "" if custom_loop else f"epochs {options.epochs}, "
    lines = (
        f"data: {plain(data)}, {counted}",
        f"network: {plain(named)}, {parameters:,} parameters",
        f"training: {epochs}updates an epoch {order.steps_per_epoch:,}, batch {order.batch:,}, {kind}{rate}, "
        f"processes {world.size}, device {world.device.partition(':')[0]}",
    )
    journal.event("setup", "\n".join(lines))


def say_expected(sample_s: float, trainer: Trainer) -> None:
    """Notes how long an update is expected to take, by `sample_s` a sample; records it of a long epoch."""
    order = trainer.feed.order
    update_s = sample_s * order.batch / trainer.world.size
    epoch_s = update_s * order.steps_per_epoch
    if epoch_s >= _LONG_EPOCH_S:
        message = f"expected time: {short_time(update_s)} for an update, {epoch_s / 60:,.0f} min for an epoch"
        trainer.journal.event("note", message)
    trainer.heartbeats.expected_s = update_s


def resume(trainer: Trainer, found: Resumable) -> None:
    """Goes on where a checkpoint was."""
    names = [name for name, parameter in trainer.network.inner.named_parameters() if parameter.requires_grad]
    where = str(found.path)
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
    """A sentence on data that changed since the checkpoint was saved; empty if nothing did."""
    with suppress(UserError):  # without a readable record nothing can be compared
        record = find_record(found.path, found.snapshot.state)
        # Of a folder the contents aren't compared: packing it changes nothing for the run.
        contents = trainer.job.data.name == OBJECTS
        words = ("training",) if trainer.custom_loop else ()  # its loop chooses what is evaluated
        if record and (changes := data_changes(record, trainer.trained, words, contents=contents)):
            return f"the data changed since the checkpoint was saved: {changes}"
    return ""

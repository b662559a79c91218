"""Builds the trainer of a job or a custom loop, and resumes it from a checkpoint. Runs no updates."""

import functools
import platform
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import torch
from torch import nn

from manyhands.checkpoint.trained import find_record
from manyhands.core.devices import is_out_of_memory
from manyhands.core.errors import UserError
from manyhands.core.quantities import short_time
from manyhands.core.run_folder import NOWHERE, OBJECTS, resume_command
from manyhands.core.user_code import user_line
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.splits import Source
from manyhands.parallel.apply import (
    apply_mode,
    equalize_replicas,
    normalizes_in_groups,
    require_equal_networks,
    takes_mesh,
)
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.group.rendezvous import is_peer_loss
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.replicas.batch_norm import group_batch_norms, measure_rows
from manyhands.sync.choose import BY_MODE, EXACT
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train import data_setup, state, trial_step
from manyhands.train.choose_sync import ChosenSync, SyncRequest, select_sync
from manyhands.train.evaluate import Evaluator
from manyhands.train.feed import Feed
from manyhands.train.loss import BETTER_LOSS, Evaluation, verify_loss
from manyhands.train.optimize import CustomScheduler, count_updates, scheduler_errors, total_steps
from manyhands.train.parts import Parts, describe_trained, job_grid, layouts_from_code, record_setup, refuse_unshardable
from manyhands.train.saver import SaveInterval
from manyhands.train.saving import check_same_training, load_rank_state
from manyhands.train.shares import order_and_sharing, refuse_small_micro_batches
from manyhands.train.status import DivergenceDetector, SpeedMonitor, StatusRound
from manyhands.train.step import Updater
from manyhands.train.trainer import DueWork, Hooks, ObservedResults, Trainer, seconds_between_saves

if TYPE_CHECKING:
    from manyhands.parallel.mesh.grid import Grid

# Samples for the trial step of a custom loss, and the exceptions of a network or loss that fails.
_FEW, _FAILURES = 8, (RuntimeError, TypeError, ValueError, IndexError)


def build(parts: Parts) -> Trainer:
    """Builds the trainer from `parts`. A collective. Raises UserError if data, model and job don't match."""
    job, folder, world = parts.job, parts.folder, parts.world
    refuse_unshardable(parts)
    resume_from, in_pieces = job.checkpoint.resume, parts.plan is not None
    found = state.find_resumable(resume_from, folder, world, in_pieces=in_pieces) if folder is not NOWHERE else None
    outputs = state.foreign_outputs(found.snapshot) if found else 0
    samples = data_setup.open_samples(parts, parts.objects, outputs, parts.splits)
    splits, grid = samples.splits, job_grid(job, world, parts.mode)
    model = parts.make_model(samples, grid, found)
    network, sync, trial, restore_norms, sample_s = _apply_sync_and_mode(parts, model, samples, grid, found)
    synchronizer = sync.synchronizer
    classes = parts.name_outputs(samples.classes, network, trial)
    previous, most = parts.previous_shares(found)
    own = synchronizer.local_statistics
    order, sharing = order_and_sharing(parts, len(splits.train), network, previous, own_groups=own, limit=most)
    refuse_small_micro_batches(order, sharing, network)
    optimizer = parts.make_optimizer(model, sharded=network.traits.sharded)
    loss_fn = parts.loss_fn
    if loss_fn:
        dtype = data_setup.DTYPES.get(job.train.precision, torch.float32)
        loss_fn = verify_loss(loss_fn, len(classes), len(samples.classes), world, dtype)
        if loss_fn.dependence_reason:
            parts.journal.event("warning", f"{loss_fn.dependence_reason} (do: {BETTER_LOSS})")
    set_rates, unused = parts.make_schedule(optimizer, steps_per_epoch=order.steps_per_epoch), trial.unused
    updater = Updater(parts, network, optimizer, loss_fn, set_rates, synchronizer=synchronizer, unused=unused)
    trial_step.warm_up(updater, samples.train, min(trial.count, order.length))
    for module in parts.frozen:
        module.training = False
    feed = Feed(order, sharing, samples.train, network.share.index, samples.pixels.augment)

    def evaluate_on(loader: Loader, source: Source) -> Callable[..., Evaluation]:
        """Returns a function that evaluates on `source`, distributed over processes by their current shares."""
        evaluator = Evaluator(loader, len(source), len(classes), job, world, network, parts.metrics)
        return lambda asked=None: evaluator(updater.gradients.autocast(), asked, feed.sharing.shares)

    resources = ExitStack()  # closed in reverse order
    for close in (restore_norms, network.close, samples.close, synchronizer.close):
        resources.callback(close)
    test = None
    if samples.held_out is not None and splits.held_out is not None:
        test = evaluate_on(samples.held_out, splits.held_out)
    epoch, steps_per_epoch = job.train.start_epoch, order.steps_per_epoch
    progress, steps = state.Progress(step=epoch * steps_per_epoch, epoch=epoch), total_steps(job.train, steps_per_epoch)
    save_every_s = seconds_between_saves(job.checkpoint.every)
    trainer = Trainer(
        run=parts,
        trained=describe_trained(parts, samples, classes),
        feed=feed,
        updater=updater,
        evaluate=evaluate_on(samples.test, splits.test),
        test=test,
        due=DueWork(job, steps_per_epoch, steps, progress, parts.custom_loop),
        status_round=StatusRound(world, job.run.log_every_s, save_every_s, sync.cost.every),
        sync=sync,
        observed=ObservedResults(DivergenceDetector(len(classes)), set(splits.skipped)),
        hooks=Hooks(at_epoch_end=parts.objects.at_epoch_end),
        resources=resources,
    )
    if synchronizer.times_waits:
        sync.monitor = SpeedMonitor(synchronizer, sync.cost, world, gather_plain(platform.node(), world))
    trainer.heartbeats.linked = world.local_size < world.size
    if job.checkpoint.every == "auto" and world.is_main and folder is not NOWHERE:
        trainer.saver.interval = SaveInterval(folder, world)
    if parts.header:
        record_setup(parts, parts.objects, splits, samples.classes, model, network.layouts, optimizer)
    trainer.heartbeats.expected_s = update_s = sample_s * order.batch / world.size
    epoch_min = update_s * steps_per_epoch / 60
    if epoch_min >= 1:
        message = f"expected time: {short_time(update_s)} per update, {epoch_min:,.0f} min per epoch"
        trainer.journal.event("note", message)
    if found:
        parts.before_resume(trainer, found)
        _resume(trainer, found)
        parts.after_resume(trainer, found)
    return parts.finish(trainer)


def _apply_sync_and_mode(
    parts: Parts, model: nn.Module, samples: data_setup.DataSetup, grid: "Grid | None", found: state.Resumable | None
) -> tuple[ParallelNetwork, ChosenSync, trial_step.TrialResult, Callable[[], None], float]:
    """Makes the network equal on all processes, selects the sync method and applies the parallel mode. A collective.

    Returns the network, sync method, trial result, a function that restores BatchNorm layers, and seconds per sample.
    """
    world, job = parts.world, parts.job
    _refuse_untrainable(model, world)
    # The copies of layers in DataParallel would lose accumulated statistics.
    restore_norms = group_batch_norms(model)[1] if normalizes_in_groups(parts.mode) else lambda: None
    picture = data_setup.first_picture(samples.train)
    if parts.plan:
        _broadcast_initial_weights(parts, model, grid)
        # The network may be too large for one process's gradients, so the mode tries it without gradients instead.
        own = parts.loss_fn.custom if parts.loss_fn else None
        request = ModeRequest(plan=parts.plan, picture=picture, cross_entropy=parts.cross_entropy, loss=own)
        sync, trial = ChosenSync(BY_MODE, Synchronizer(), request), trial_step.TrialResult([], draws=False)
    else:
        probe = trial_step.StepProbe(model, parts.loss_fn or trial_step.sum_outputs_as_loss, job.train, world)
        trial = _run_trial(parts, samples, probe)
        _broadcast_initial_weights(parts, model, grid)
        count = len(samples.splits.train)
        share = -(-min(job.train.batch, count) // world.size)
        axes = tuple(word.strip() for word in job.parallel.samples.split(",") if word.strip()) or None
        previous = found.snapshot.state.get("sync") if found else None
        steps = count_updates(job.train, count)
        timed = functools.partial(trial_step.time_step, probe, samples.train, share, world)
        sync_request = SyncRequest(parts, model, trial.unused, steps, previous, timed)
        shared_memory = job.parallel.shared_memory
        request = ModeRequest(bool(trial.unused), grid=grid, samples=axes, shared_memory=shared_memory)
        sync = select_sync(sync_request, request)
    sample_s = trial_step.time_sample(model, picture.expand(2, *picture.shape), world)
    network = apply_mode(parts.mode, model, world, sync.mode_request)
    network.traits.is_random |= trial.draws
    return network, sync, trial, restore_norms, sample_s


def _refuse_untrainable(model: nn.Module, world: World) -> None:
    """Raises UserError on all ranks if a rank has no trainable parameter or a complex parameter. A collective."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    mine = [bool(trained), next((name for name, one in trained.items() if one.is_complex()), "")]
    trains, names = zip(*gather_plain(mine, world), strict=True)
    if not all(trains):
        where = f" on rank {trains.index(False)}" if any(trains) else ""
        hints = ("unfreeze parameters: parameter.requires_grad_(True)", "or only evaluate: manyhands eval")
        raise UserError(f"the network has no trainable parameters{where}", "the network", hints)
    if name := next(filter(None, names), ""):
        hints = ("store nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(self.w) in forward",)
        raise UserError(f"the parameter {name} is complex; manyhands trains only real parameters", "the network", hints)


def _run_trial(parts: Parts, samples: data_setup.DataSetup, probe: trial_step.StepProbe) -> trial_step.TrialResult:
    """Runs the trial step on two samples. A custom loss gets eight or, after an error, a micro-batch. A collective."""
    world, train = parts.world, parts.job.train
    count = most = min(2, len(samples.splits.train))
    if parts.loss_fn and parts.loss_fn.custom:
        most = min(max(count, train.micro_batch or train.batch // world.size), len(samples.splits.train))
        count = min(_FEW, most)
    layers = probe.network.norms.layers
    if parts.loss_fn is None and (world.alone or parts.job.sync.method == EXACT):
        # A custom loop may call the network in any way; only the rows per sample are needed.
        measure_rows(probe.network.model, layers, next(iter(samples.train.batches(0, [torch.arange(count)]))).images)
        return trial_step.TrialResult([], draws=False)
    classes = len(samples.classes) if parts.loss_fn else 0
    try:
        try:
            found = trial_step.run_trial(probe, samples.train, classes, count)
        except _FAILURES as error:
            if count == most or is_out_of_memory(error):
                raise
            count = most
            found = trial_step.run_trial(probe, samples.train, classes, count)
    except _FAILURES as error:
        # Under a mesh, the error may come from a lost peer; after an AcceleratorError, the device may be unusable.
        elsewhere = is_out_of_memory(error) or is_peer_loss(error) or isinstance(error, torch.AcceleratorError)
        if elsewhere or takes_mesh(parts.mode):
            raise
        raise _trial_error(error, parts, samples, count) from error
    unused, draws, rows = broadcast_plain([found.unused, found.draws, [one.rows_per_sample for one in layers]], world)
    for layer, each in zip(layers, rows, strict=True):
        layer.rows_per_sample = each
    if unused:
        message = f"no gradient reaches {', '.join(unused[:3])} (do: freeze parameters that should not train)"
        parts.journal.event("warning", message, 0)
    return trial_step.TrialResult(unused, draws, found.outputs, found.count)


def _trial_error(error: Exception, parts: Parts, samples: data_setup.DataSetup, count: int) -> UserError:
    if parts.loss_fn is None:
        what = f"the network failed on the two test samples that sync.method = {parts.job.sync.method} needs: {error}"
        hint = f"accept model(x) for a batch x, or set --sync {EXACT}, which needs no test"
        return UserError(what, "session.prepare", (hint,))
    shape = [*data_setup.first_picture(samples.train).shape]
    what = f"the trial step before training failed on {count} samples of shape {'x'.join(map(str, shape))}"
    where = user_line(error) or f"model.name = {parts.job.model.name}"
    hint = f"check the network and the loss for inputs of shape {[count, *shape]}"
    return UserError(f"{what}: {type(error).__name__}: {error}", where, (hint,))


def _broadcast_initial_weights(parts: Parts, model: nn.Module, grid: "Grid | None") -> None:
    """Copies rank 0's unsharded weights to all ranks. A collective. Raises UserError if the networks differ."""
    world, always = parts.world, parts.job.parallel.parameter_broadcast
    sharded = {name for name, one in layouts_from_code(model, grid, world).items() if one.cuts}
    named = {name: tensor for name, tensor in state.split_state(model)[0].items() if name not in sharded}
    require_equal_networks(model, named, world)
    if equalize_replicas(named, world, always=always) and not always:
        parts.journal.event("note", "the processes built different networks (missing seed?); all use rank 0's network")


def _resume(trainer: Trainer, found: state.Resumable) -> None:
    """Restores the trainer from a checkpoint. A collective."""
    names = [name for name, parameter in trainer.network.model.named_parameters() if parameter.requires_grad]
    where, saved = str(found.path), found.snapshot.state
    check_same_training(trainer.job, found.snapshot, where)
    data_setup.refuse_other_classes(saved.get("classes") or (), trainer.trained.classes, where)
    order = trainer.feed.order
    digest = state.training_digest(trainer.job, order.length)
    state.check_resume_position(found.snapshot, digest, order.steps_per_epoch, names, where)
    if trainer.world.is_main:
        state.refuse_later_checkpoints(trainer.folder.checkpoints, int(saved.get("step", 0)))
    trainer.due.progress, anew = state.restore_state(found, trainer.network, trainer.updater.optimizer)
    if trainer.updater.gradients.scaler and "scaler" in saved:
        trainer.updater.gradients.scaler.load_state_dict(saved["scaler"])
    load_rank_state(trainer, found.path)
    if isinstance(trainer.updater.set_rates, CustomScheduler) and saved.get("schedule"):
        with scheduler_errors(where):
            trainer.updater.set_rates.resume(saved["schedule"], trainer.progress.step)
    step = trainer.progress.step
    for note in (*found.notes, *found.snapshot.notes, *filter(None, [anew, _data_changes(trainer, found)])):
        trainer.journal.event("warning", note, step)
    message = f"resuming from step {step} of {where}"
    if trainer.due.finished():
        epochs = 2 * max(1, trainer.job.train.epochs, trainer.progress.epoch)
        in_python = f'epochs={epochs}, checkpoint__resume="auto"'
        more = resume_command(trainer.folder.path, f"--epochs {epochs}", in_python)
        message = f"all {trainer.due.total_steps:,} updates of this run are complete (to train longer: {more})"
    trainer.journal.event("resumed", message, step, path=where, processes=trainer.world.size)


def _data_changes(trainer: Trainer, found: state.Resumable) -> str:
    """Returns a sentence that names the data that changed since the checkpoint was saved, or "" without a change."""
    with suppress(UserError):  # without a readable record, nothing is compared
        record = find_record(found.path, found.snapshot.state)
        # A folder's contents aren't compared, because packing the folder would count as a change.
        contents = trainer.job.data.name == OBJECTS
        words = ("training",) if trainer.due.custom_loop else ()  # a custom loop chooses its evaluation data
        if record and (changes := data_setup.data_changes(record, trainer.trained, words, contents=contents)):
            return f"the data changed since the checkpoint was saved: {changes}"
    return ""

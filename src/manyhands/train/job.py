"""Builds every part of a run from its job, one small function each; runs nothing."""

import os
import platform
import shlex
from collections.abc import Callable

import torch
from torch import nn

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.folder import RunFolder
from manyhands.core.journal import Journal
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.world import World
from manyhands.parallel.apply import (
    apply_mode,
    make_equal,
    normalises_in_groups,
    one_process,
    refuse_other_networks,
    takes_mesh,
)
from manyhands.parallel.grid import Grid
from manyhands.parallel.marks import layouts_of
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.norm import group_batch_norms, leave_batch_norms
from manyhands.parallel.options import MODE_ALONE
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.parallel.plan import Plan
from manyhands.sync.choose import BY_MODE
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.choose_sync import ChosenSync, SyncRequest, settle
from manyhands.train.data_setup import DTYPES, DataSetup, Objects, first_picture, name_outputs, open_samples
from manyhands.train.evaluators import make_evaluator, make_tester
from manyhands.train.feed import Feed
from manyhands.train.loss import LossFn, make_loss_fn
from manyhands.train.network import make_model, refuse_other_head, without_first_weights
from manyhands.train.optimize import make_optimizer, steps_to_make, total_steps
from manyhands.train.own_metrics import make_metrics
from manyhands.train.own_schedule import OwnScheduler, make_schedule
from manyhands.train.pacing import Watcher
from manyhands.train.prove import BETTER_LOSS, settle_loss
from manyhands.train.pth_tar import check_same_training
from manyhands.train.rank_state import load_rank_state
from manyhands.train.recover import (
    Resumable,
    check_position,
    find_state,
    outputs_of,
    refuse_later_checkpoints,
    training_digest,
)
from manyhands.train.rehearse import Rehearsal, RehearsalResult, rehearse, time_step, warm_up
from manyhands.train.scheduler_state import reading_of
from manyhands.train.sharing import order_and_cut, refuse_small_micro_batches
from manyhands.train.state import Progress, restore
from manyhands.train.status import StatusRound
from manyhands.train.step import Updater
from manyhands.train.trained import describe_trained
from manyhands.train.trainer import Trainer, seconds_between_saves


def build(
    job: Job, folder: RunFolder, world: World, mode: str, objects: Objects | None = None, plan: Plan | None = None
) -> Trainer:
    """Builds all parts; a collective where there are several processes.

    Args:
        job: what the user asked for.
        folder: where the run is kept.
        world: who takes part.
        mode: the parallel mode, resolved.
        objects: what the user brings instead of names.
        plan: how ops are split, for modes that follow a plan.

    Raises:
        UserError: data, model and job don't fit together.
    """
    objects = objects or Objects()
    journal = Journal(folder, world.rank)
    _set_determinism(job)
    _refuse_uncuttable(job, plan, mode, journal, goes_on=folder.has_checkpoints())
    loss_fn, metrics = make_loss_fn(job.train, objects.loss), make_metrics(job.train.metrics, objects.metrics)
    found = find_state(job, folder, world, in_pieces=plan is not None)
    samples = open_samples(job, world, objects, journal, outputs_of(found.snapshot) if found else 0)
    classes = samples.classes
    grid = grid_of(job, world, mode)
    starting = without_first_weights(job, samples.pixels.size, objects) if found else job
    model = make_model(starting, samples.pixels, len(classes), world, objects, journal, grid)
    if found and grid is None:
        refuse_other_head(found.snapshot.model, model, len(classes), str(found.path))
    groups, restore_norms = group_batch_norms(model) if normalises_in_groups(mode) else leave_batch_norms()
    if plan:
        start_equal(model, world, journal, always=job.parallel.parameter_broadcast)
        # It may be too large for one process's gradients, so nothing is rehearsed: the mode tries it without them.
        picture, plain = first_picture(samples.train), is_cross_entropy(job, objects)
        request = ModeRequest(plan=plan, picture=picture, cross_entropy=plain, loss=loss_fn.own)
        synced, rehearsed = ChosenSync(BY_MODE, Synchronizer(), request), RehearsalResult([], draws=False)
    else:
        rehearsal = Rehearsal(model, groups, samples.train, loss_fn, job)
        count = len(samples.splits.train)
        rehearsed = _rehearse(rehearsal, len(classes), min(2, count), world, journal)
        synced = _settle(rehearsal, rehearsed.unused, count, mode, world, journal, found, grid)
    network = apply_mode(mode, model, world, synced.how)
    _tell_of_mode(network, len(classes), journal)
    classes = _name_all(classes, max(rehearsed.outputs, network.outputs), journal)
    order, cut = order_and_cut(
        job, samples.splits, world, mode, network, journal, own=synced.synchronizer.own_statistics, goes_on=bool(found)
    )
    refuse_small_micro_batches(order, cut, network)
    if job.train.compile:
        model.compile()
    optimizer = make_optimizer(model, job.train, sharded=network.sharded, own=objects.optimizer)
    update = Updater(
        network,
        optimizer,
        _settle_loss(loss_fn, len(classes), samples, job.train.precision, world, journal),
        job.train,
        world,
        make_schedule(optimizer, job.train, order.steps_per_epoch, objects.schedule),
        synchronizer=synced.synchronizer,
        gradients_mean=job.parallel.gradients_mean,
        unused=rehearsed.unused,
    )
    warm_up(update, samples.train, min(2, order.length))
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
        feed=Feed(order, cut, samples.train, network.replica(world.rank)),
        network=network,
        update=update,
        evaluate=lambda asked=None: evaluator(network.evaluated, update.gradients.autocast(), asked),
        status_round=StatusRound(
            world, job.run.log_every_s, seconds_between_saves(job.checkpoint.every), synced.cost.every
        ),
        progress=Progress(step=job.train.start_epoch * order.steps_per_epoch, epoch=job.train.start_epoch),
        total_steps=total,
        digest=training_digest(job, order.length),
        sync=synced.cost,
        augment=samples.pixels.augment,
        draws=rehearsed.draws,
        watcher=_watcher(synced, world),
        test=make_tester(samples, len(classes), job, network, update, metrics),
        standing=synced.standing,
        at_epoch_end=objects.at_epoch_end,
        release=lambda: release(samples, restore_norms, network, synced.synchronizer),
    )
    if found:
        resume(trainer, found)
    return trainer


def _set_determinism(job: Job) -> None:
    if job.train.deterministic:
        # Without it torch refuses matrix products on CUDA. Source: the documentation of the function below.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != job.train.deterministic:
        torch.use_deterministic_algorithms(job.train.deterministic)  # imports torch's compiler


def is_cross_entropy(job: Job, objects: Objects) -> bool:
    """True where the loss can be computed from parts of the classes."""
    return objects.loss is None and job.train.loss == "cross-entropy"


def _refuse_uncuttable(job: Job, plan: Plan | None, mode: str, journal: Journal, *, goes_on: bool) -> None:
    """Raises UserError for what doesn't go with a network that is cut, or for a pin that can't be kept.

    What an earlier start of the run was pinned to has no effect under another mode, which is said.
    """
    if plan is None and job.parallel.pin and not goes_on:
        why = "one process has nothing to cut" if one_process(mode) else f"the mode {mode} splits no ops"
        mend = ("--parallel semi, on two processes or more", "leave --pin out")
        raise UserError(f"the pin {job.parallel.pin[0]} can't be kept: {why}", "parallel.pin", mend)
    if plan is None and not takes_mesh(mode):
        idle = [name for name in ("pin", "mesh", "plan") if getattr(job.parallel, name)]
        if idle and mode != MODE_ALONE and not job.parallel.searches:
            journal.event("warning", f"parallel.{idle[0]} has no effect under {mode}: it is for semi and auto")
        return
    if job.checkpoint.pth_tar:
        mend = ("leave it out; then: manyhands checkpoint merge RUN weights.pth",)
        raise UserError("main.py's files hold a whole network, and here it is cut", "checkpoint.pth_tar", mend)
    if job.train.compile:
        raise UserError("torch.compile doesn't go with a network that is cut", "train.compile", ("leave it out",))


def _rehearse(rehearsal: Rehearsal, classes: int, count: int, world: World, journal: Journal) -> RehearsalResult:
    """Tries the network on `count` samples; a collective, since all must find the same."""
    found = rehearse(rehearsal, classes, count, world)
    layers = rehearsal.groups.layers
    unused, draws, rows = broadcast_plain([found.unused, found.draws, [one.rows_per_sample for one in layers]], world)
    for layer, each in zip(layers, rows, strict=True):
        layer.rows_per_sample = each
    if unused:
        journal.event("warning", f"{', '.join(unused[:3])} never get a gradient; freeze them if that is meant", 0)
    return RehearsalResult(unused, draws, found.outputs)


def _settle(  # noqa: PLR0913 - what a network meets before its mode
    rehearsal: Rehearsal,
    unused: list[str],
    samples: int,
    mode: str,
    world: World,
    journal: Journal,
    found: Resumable | None,
    grid: Grid | None,
) -> ChosenSync:
    """Proves that all start from the same, and settles how they will agree; a collective."""
    job, model = rehearsal.job, rehearsal.model
    # A network that its author has split holds pieces already, which differ; what is whole must not.
    start_equal(model, world, journal, always=job.parallel.parameter_broadcast, grid=grid)
    axes = tuple(word.strip() for word in job.parallel.samples.split(",") if word.strip()) or None
    share = -(-min(job.train.batch, samples) // world.size)
    kept = found.snapshot.state.get("sync") if found else None
    sync_request = SyncRequest(
        job, mode, steps_to_make(job.train, samples), kept, lambda: time_step(rehearsal, share, world)
    )
    request = ModeRequest(bool(unused), grid=grid, samples=axes, shared_memory=job.parallel.shared_memory)
    return settle(sync_request, model, unused, world, journal, request)


def _settle_loss(
    loss_fn: LossFn, outputs: int, samples: DataSetup, precision: str, world: World, journal: Journal
) -> LossFn:
    """The loss function as it adds up; says so where it doesn't. A collective."""
    loss_fn = settle_loss(loss_fn, outputs, len(samples.classes), world, DTYPES.get(precision, torch.float32))
    if loss_fn.dependent:
        journal.event("warning", f"{loss_fn.dependent} (do: {BETTER_LOSS})")
    return loss_fn


def _tell_of_mode(network: ParallelNetwork, classes: int, journal: Journal) -> None:
    """Says which parts stay whole, and how gradients are averaged; refuses outputs that don't fit the data."""
    if network.outputs and network.outputs < classes:
        mend = (f"--set model.num_classes={classes}",)
        raise UserError(f"the network has {network.outputs} outputs for {classes} classes", "model.name", mend)
    if network.averages:
        journal.event("averaging", network.averages, 0)
    for note in network.plan.about.get("notes", []) if network.plan else ():
        journal.event("note", note)


def _name_all(classes: tuple[str, ...], outputs: int, journal: Journal) -> tuple[str, ...]:
    """A name for each output; says where there are some that no class stands for."""
    if outputs > len(classes):
        told = f"the network has {outputs:,} outputs for {len(classes):,} classes; a guess beyond them counts as wrong"
        journal.event("note", told)
    return name_outputs(classes, outputs)


def _watcher(synced: ChosenSync, world: World) -> Watcher | None:
    """What says who is slow, and has the method keep in time with the link; a collective."""
    if synced.synchronizer.timed is None:
        return None
    return Watcher(synced.synchronizer, synced.cost, world, gather_plain(platform.node(), world))


def release(
    samples: DataSetup,
    restore_norms: Callable[[], None],
    network: ParallelNetwork,
    synchronizer: Synchronizer,
) -> None:
    """Gives back what a trainer took: processes of loaders, groups, hooks, and the network's own BatchNorm."""
    synchronizer.close()
    samples.close()
    network.release()
    restore_norms()


def grid_of(job: Job, world: World, mode: str) -> Grid | None:
    """The processes as the network's author sees them, where a mode takes a mesh; one axis dp unless the job says more.

    Raises:
        UserError: the mesh doesn't have as many places as there are processes.
    """
    if not takes_mesh(mode):
        return None
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else Mesh((("dp", world.size),))
    if mesh.size != world.size:
        mend = (f"-n {mesh.size}", f"or a mesh of {world.size}")
        raise UserError(f"the mesh {mesh} has {mesh.size} places for {world.size} processes", "parallel.mesh", mend)
    return Grid(mesh, world)


def start_equal(
    model: nn.Module, world: World, journal: Journal, *, always: bool = False, grid: Grid | None = None
) -> None:
    """Proves that all processes start from the same network, or (always, if asked to) gives them rank 0's.

    Of a network that its author has split over a grid, what is cut is left out.

    Raises:
        UserError: the processes have other tensors, or train others.
    """
    cut = {name for name, one in layouts_of(model, grid.mesh, world.rank).items() if one.cuts} if grid else set[str]()
    named = {name: tensor for name, tensor in model.state_dict().items() if name not in cut}
    refuse_other_networks(model, named, world)
    if make_equal(named, world, always=always) and not always:
        journal.event("note", "the processes built different networks (an unseeded start?); all take rank 0's")


def resume(trainer: Trainer, found: Resumable) -> None:
    """Goes on where a checkpoint was."""
    names = [name for name, parameter in trainer.network.inner.named_parameters() if parameter.requires_grad]
    where = str(found.path)
    check_same_training(trainer.job, found.snapshot, where)
    check_position(found.snapshot, trainer.digest, trainer.feed.order.steps_per_epoch, names, where)
    if trainer.world.is_main:
        refuse_later_checkpoints(trainer.folder.checkpoints, int(found.snapshot.state.get("step", 0)))
    optimizer, source = trainer.update.optimizer, found.source
    trainer.progress, anew = restore(found.snapshot, trainer.network, optimizer, where=where, source=source)
    if trainer.update.gradients.scaler and "scaler" in found.snapshot.state:
        trainer.update.gradients.scaler.load_state_dict(found.snapshot.state["scaler"])
    load_rank_state(trainer, found.path)
    if isinstance(trainer.update.set_rates, OwnScheduler) and found.snapshot.state.get("schedule"):
        with reading_of(where):
            trainer.update.set_rates.go_on(found.snapshot.state["schedule"], trainer.progress.step)
    for note in (*found.notes, *filter(None, [anew])):
        trainer.journal.event("warning", note, trainer.progress.step)
    step = trainer.progress.step
    told = f"goes on from step {step} of {where}"
    if trainer.done():
        epochs = 2 * max(1, trainer.job.train.epochs, trainer.progress.epoch)
        more = f"manyhands resume {shlex.quote(str(trainer.folder.path))} --epochs {epochs}"
        told = f"all {trainer.total_steps:,} updates of this run have been made: nothing is left to train ({more})"
    trainer.journal.event("resumed", told, step, path=where, processes=trainer.world.size)

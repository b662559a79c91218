"""Builds every part of a run from its job, one small function each; runs nothing."""

import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.folder import RunFolder
from manyhands.core.journal import Journal
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.world import World
from manyhands.data.order import Cut, Order
from manyhands.data.splits import Splits
from manyhands.parallel.apply import apply_mode, make_equal, normalises_in_groups
from manyhands.parallel.grid import Grid
from manyhands.parallel.marks import layouts_of
from manyhands.parallel.network import How, ParallelNetwork
from manyhands.parallel.norm import group_batch_norms, leave_batch_norms
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.parallel.plan import Plan
from manyhands.sync.measure import pass_seconds
from manyhands.sync.methods.local import PASSES
from manyhands.train.agree import Agreement
from manyhands.train.agreeing import Agreeing, NowAndThen
from manyhands.train.criterion import make_criterion
from manyhands.train.evaluate import Evaluator
from manyhands.train.feed import Feed
from manyhands.train.network import make_model, refuse_other_head, without_first_weights
from manyhands.train.optimize import make_optimizer
from manyhands.train.own_state import load_own
from manyhands.train.pacing import Pacer, Watcher
from manyhands.train.parts import Parts, seconds_between_saves
from manyhands.train.pth_tar import check_same_training
from manyhands.train.recover import (
    Found,
    check_position,
    find_state,
    outputs_of,
    refuse_later_checkpoints,
    training_digest,
)
from manyhands.train.rehearse import Rehearsed, Trial, rehearse, time_step, warm_up
from manyhands.train.samples import Objects, Samples, first_picture, name_outputs, open_samples
from manyhands.train.state import Progress, restore
from manyhands.train.step import Updater
from manyhands.train.syncing import BY_MODE, Synced, Wish, settle
from manyhands.train.trained import describe_trained


def build(
    job: Job, folder: RunFolder, world: World, mode: str, objects: Objects | None = None, plan: Plan | None = None
) -> Parts:
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
    _refuse_uncuttable(job, plan, mode, journal)
    criterion = make_criterion(job.train, objects.loss)
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
        cross_entropy = is_cross_entropy(job, objects)
        how = How(plan=plan, picture=first_picture(samples.train), cross_entropy=cross_entropy)
        synced, rehearsed = Synced(BY_MODE, Agreeing(), how), Rehearsed([], draws=False)
    else:
        trial = Trial(model, groups, samples.train, criterion, job)
        count = len(samples.splits.train)
        rehearsed = _rehearse(trial, len(classes), min(2, count), world, journal)
        synced = _settle(trial, rehearsed.unused, count, mode, world, journal, found, grid)
    network = apply_mode(mode, model, world, synced.how)
    _tell_of_cutting(network, len(classes), journal, of_plan=plan is not None)
    classes = _name_all(classes, max(rehearsed.outputs, network.cutting.outputs if network.cutting else 0), journal)
    order, cut = order_and_cut(job, samples.splits, world, mode, network, together=not synced.agreeing.own_statistics)
    _refuse_small_passes(order, cut, network)
    if job.train.compile:
        model.compile()
    optimizer = make_optimizer(model, job.train, sharded=network.sharded)
    update = Updater(
        network,
        groups,
        optimizer,
        criterion,
        job.train,
        world,
        order.steps_per_epoch,
        agreeing=synced.agreeing,
        gradients_mean=job.parallel.gradients_mean,
        unused=rehearsed.unused,
    )
    warm_up(update, samples.train, min(2, order.length))
    evaluator = Evaluator(
        samples.test,
        len(samples.splits.test),
        len(classes),
        job.train.evaluate_batch,
        world,
        log_probabilities=job.train.loss == "nll",
        collective_forward=network.collective_forward,
        cutting=network.cutting,
    )
    total = total_steps(job, order)
    parts = Parts(
        job=job,
        folder=folder,
        world=world,
        journal=journal,
        mode=mode,
        classes=classes,
        trained=describe_trained(job, samples, classes, mode, objects, world.size),
        feed=Feed(order, cut, samples.train, network.cutting.replica if network.cutting else world.rank),
        network=network,
        update=update,
        evaluate=lambda: evaluator(
            network.call if network.sharded or network.cutting else network.inner, update.autocast()
        ),
        agreement=Agreement(world, job.run.log_every_s, seconds_between_saves(job.checkpoint.every), synced.cost.every),
        progress=Progress(step=job.train.start_epoch * order.steps_per_epoch, epoch=job.train.start_epoch),
        total_steps=total,
        digest=training_digest(job, order.length),
        sync=synced.cost,
        draws=rehearsed.draws,
        watcher=_watcher(synced, job, world, total),
        release=lambda: _release(samples, restore_norms, network, synced.agreeing),
    )
    if found:
        resume(parts, found)
    return parts


def _set_determinism(job: Job) -> None:
    if job.train.deterministic:
        # Without it torch refuses matrix products on CUDA. Source: the documentation of the function below.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(job.train.deterministic)


def is_cross_entropy(job: Job, objects: Objects) -> bool:
    """True where the loss can be computed from parts of the classes."""
    return objects.loss is None and job.train.loss == "cross-entropy"


def _refuse_uncuttable(job: Job, plan: Plan | None, mode: str, journal: Journal) -> None:
    """Raises UserError for what doesn't go with a network that is cut; says what has no effect otherwise."""
    if plan is None and mode != "hybrid":
        idle = [name for name in ("pin", "mesh", "plan") if getattr(job.parallel, name)]
        if idle and mode != "single" and job.parallel.mode != "auto":
            journal.event("warning", f"parallel.{idle[0]} has no effect under {mode}: it is for semi and auto")
        return
    if job.checkpoint.pth_tar:
        mend = ("leave it out; then: manyhands checkpoint merge RUN weights.pth",)
        raise UserError("main.py's files hold a whole network, and here it is cut", "checkpoint.pth_tar", mend)
    if job.train.compile:
        raise UserError("torch.compile doesn't go with a network that is cut", "train.compile", ("leave it out",))


def _refuse_small_passes(order: Order, cut: Cut, network: ParallelNetwork) -> None:
    """Raises UserError where a pass has fewer samples than some op shares out: not all ops know what nothing is."""
    parts = network.cutting.most_parts if network.cutting else 1
    counts = {min(order.batch, order.length)}
    if not order.drop_last:
        counts.add(order.length - (order.steps_per_epoch - 1) * order.batch)
    for count in counts:
        least = min(shares[-1].stop - shares[0].start for shares in cut.passes(count))
        if least < parts:
            raise UserError(
                f"a pass of {least} sample(s) can't be shared out among {parts} processes, as some op does",
                "train.batch",
                (
                    f"another --batch: {order.length} samples in batches of {order.batch} end with one of {least}",
                    "or leave that one out: --train.drop-last",
                ),
            )


def _rehearse(trial: Trial, classes: int, count: int, world: World, journal: Journal) -> Rehearsed:
    """Tries the network on `count` samples; a collective, since all must find the same."""
    found = rehearse(trial, classes, count)
    layers = trial.groups.layers
    unused, draws, rows = broadcast_plain([found.unused, found.draws, [one.rows_per_sample for one in layers]], world)
    for layer, each in zip(layers, rows, strict=True):
        layer.rows_per_sample = each
    if unused:
        journal.event("warning", f"{', '.join(unused[:3])} never get a gradient; freeze them if that is meant", 0)
    return Rehearsed(unused, draws, found.outputs)


def _settle(  # noqa: PLR0913 - what a network meets before its mode
    trial: Trial,
    unused: list[str],
    samples: int,
    mode: str,
    world: World,
    journal: Journal,
    found: Found | None,
    grid: Grid | None,
) -> Synced:
    """Proves that all start from the same, and settles how they will agree; a collective."""
    job, model = trial.job, trial.model
    # A network that its author has split holds pieces already, which differ; what is whole must not.
    start_equal(model, world, journal, always=job.parallel.parameter_broadcast, grid=grid)
    axes = tuple(word.strip() for word in job.parallel.samples.split(",") if word.strip()) or None
    share = -(-min(job.train.batch, samples) // world.size)
    kept = found.snapshot.state.get("sync") if found else None
    wish = Wish(job, mode, _steps(job, samples), kept, lambda: time_step(trial, share, world))
    return settle(wish, model, unused, world, journal, How(bool(unused), grid=grid, samples=axes))


def _tell_of_cutting(network: ParallelNetwork, classes: int, journal: Journal, *, of_plan: bool) -> None:
    """Says which parts stay whole; refuses outputs that don't fit the data."""
    cutting = network.cutting
    if cutting is None or not of_plan:
        return
    if cutting.outputs and cutting.outputs < classes:
        mend = (f"--set model.num_classes={classes}",)
        raise UserError(f"the network has {cutting.outputs} outputs for {classes} classes", "model.name", mend)
    for note in cutting.plan.about.get("notes", []):
        journal.event("note", note)


def _name_all(classes: tuple[str, ...], outputs: int, journal: Journal) -> tuple[str, ...]:
    """A name for each output; says where there are some that no class stands for."""
    if outputs > len(classes):
        told = f"the network has {outputs:,} outputs for {len(classes):,} classes; a guess beyond them counts as wrong"
        journal.event("note", told)
    return name_outputs(classes, outputs)


def _watcher(synced: Synced, job: Job, world: World, total_steps: int) -> Watcher[Any] | None:
    """What says who is slow, and keeps local steps in time with the link; a collective."""
    agreeing, cost = synced.agreeing, synced.cost
    if agreeing.timed is None:
        return None
    hosts = gather_plain(platform.node(), world)
    if not isinstance(agreeing, NowAndThen):
        return Watcher(agreeing.timed, cost, world, hosts)
    steps = agreeing.steps
    work_s = broadcast_plain(PASSES[cost.codec] * pass_seconds(steps.anchor.numel(), world.device), world)
    return Pacer(steps, cost, world, hosts, options=job.sync, total_steps=total_steps, compressing_s=work_s)


def _release(
    samples: Samples,
    restore_norms: Callable[[], None],
    network: ParallelNetwork,
    agreeing: Agreeing,
) -> None:
    agreeing.close()
    samples.close()
    if network.cutting:
        network.cutting.release()
    restore_norms()


def order_and_cut(
    job: Job, splits: Splits, world: World, mode: str, network: ParallelNetwork, *, together: bool = True
) -> tuple[Order, Cut]:
    """Which samples make up an update, and how processes share them.

    Args:
        job: says how many.
        splits: the data.
        world: who takes part.
        mode: the parallel mode in force.
        network: under it.
        together: False where each process trains by itself, so that BatchNorm's groups are its own.
    """
    options = job.train
    sharing = network.replicas(world.size)
    if options.batch < sharing:
        raise UserError(
            f"train.batch is {options.batch}, and there are {sharing} processes to share it",
            "train.batch",
            (f"--batch {sharing} or more", "or fewer processes"),
        )
    batch = min(options.batch, len(splits.train))
    group = 0
    grouped = together and normalises_in_groups(mode)
    if isinstance(options.norm_group, int) and grouped:
        group = options.norm_group
    elif options.norm_group == "global" and grouped:
        group = batch
    return Order(len(splits.train), batch, options.seed, options.drop_last), Cut(
        sharing, options.micro_batch, group, aligned=network.cutting is None
    )


def grid_of(job: Job, world: World, mode: str) -> Grid | None:
    """The processes as the network's author sees them, for the mode hybrid; one axis dp unless the job says more.

    Raises:
        UserError: the mesh doesn't have as many places as there are processes.
    """
    if mode != "hybrid":
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
    """
    cut = {name for name, one in layouts_of(model, grid.mesh, world.rank).items() if one.cuts} if grid else set[str]()
    named = {name: tensor for name, tensor in model.state_dict().items() if name not in cut}
    if make_equal(named, world, always=always) and not always:
        journal.event("note", "the processes built different networks (an unseeded start?); all take rank 0's")


def _steps(job: Job, samples: int) -> int:
    """Updates of the whole job, of a training split of so many samples."""
    batch = min(job.train.batch, samples)
    return total_steps(job, Order(samples, batch, job.train.seed, job.train.drop_last))


def total_steps(job: Job, order: Order) -> int:
    """Updates of the whole job."""
    steps = job.train.epochs * order.steps_per_epoch
    return min(steps, job.train.max_steps) if job.train.max_steps else steps


def resume(parts: Parts, found: Found) -> None:
    """Goes on where a checkpoint was."""
    names = [name for name, parameter in parts.network.inner.named_parameters() if parameter.requires_grad]
    where = str(found.path)
    check_same_training(parts.job, found.snapshot, where)
    check_position(found.snapshot, parts.digest, parts.feed.order.steps_per_epoch, names, where)
    if parts.world.speaks:
        refuse_later_checkpoints(parts.folder.checkpoints, int(found.snapshot.state.get("step", 0)))
    optimizer, source = parts.update.optimizer, found.source
    parts.progress, anew = restore(found.snapshot, parts.network, optimizer, where=where, source=source)
    if parts.update.scaler and "scaler" in found.snapshot.state:
        parts.update.scaler.load_state_dict(found.snapshot.state["scaler"])
    load_own(parts, found.path)
    for note in (*found.notes, *filter(None, [anew])):
        parts.journal.event("warning", note, parts.progress.step)
    step = parts.progress.step
    parts.journal.event("resumed", f"goes on from step {step} of {where}", step, path=where, processes=parts.world.size)

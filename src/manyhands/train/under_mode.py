"""A network under its parallel mode and sync method, for `fit` and for custom loops."""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.apply import apply_mode, make_equal, normalises_in_groups, refuse_other_networks
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.marks import layouts_of
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.replicas.batch_norm import find_rows, group_batch_norms, leave_batch_norms
from manyhands.sync.choose import BY_MODE, EXACT
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.choose_sync import ChosenSync, SyncRequest, select_sync
from manyhands.train.data_setup import DataSetup, first_picture
from manyhands.train.monitors import Watcher
from manyhands.train.optimize import steps_to_make
from manyhands.train.parts import Parts
from manyhands.train.recover import Resumable
from manyhands.train.state import split_state
from manyhands.train.trial_step import TrialResult, TrialStep, run_trial, sum_of_outputs, time_sample, time_step

# Samples that most custom losses can be tried on, and how a network or a loss fails.
_FEW, _FAILURES = 8, (RuntimeError, TypeError, ValueError, IndexError)


@dataclass(frozen=True)
class UnderMode:
    """A network under its parallel mode, with its sync method."""

    network: ParallelNetwork  # under its mode
    synced: ChosenSync  # the sync method and its choice
    trial: TrialResult  # results of the trial step
    restore_norms: Callable[[], None]  # gives the network its own BatchNorm back
    sample_s: float  # seconds of an update per sample, as far as they are known before

    def watcher(self, world: World) -> Watcher | None:
        """Returns the watcher that reports slow ranks and adapts the method to the link; a collective."""
        if self.synced.synchronizer.timed is None:
            return None
        return Watcher(self.synced.synchronizer, self.synced.cost, world, gather_plain(platform.node(), world))

    def release(self, samples: DataSetup) -> None:
        """Releases loader processes, groups and hooks of a trainer, and restores the network's BatchNorm layers."""
        self.synced.synchronizer.close()
        samples.close()
        self.network.close()
        self.restore_norms()


def put_under_mode(
    parts: Parts, model: nn.Module, samples: DataSetup, grid: Grid | None, found: Resumable | None
) -> UnderMode:
    """Verifies that all processes start from the same network, selects the sync method and applies the mode.

    Args:
        parts: what the trainer is built from.
        model: the network, on its device.
        samples: the data.
        grid: the mesh, for modes with a mesh.
        found: the state that the run resumes from.

    Raises:
        UserError: network, data, mode and sync method don't fit together.
    """
    world = parts.world
    _refuse_untrainable(model, world)
    groups, restore_norms = group_batch_norms(model) if normalises_in_groups(parts.mode) else leave_batch_norms()
    picture = first_picture(samples.train)
    if parts.plan:
        _start_equal(parts, model, grid)
        # It may be too large for one process's gradients, so there is no trial step: the mode tries it without them.
        own = parts.loss_fn.own if parts.loss_fn else None
        request = ModeRequest(plan=parts.plan, picture=picture, cross_entropy=parts.cross_entropy, loss=own)
        synced, trial = ChosenSync(BY_MODE, Synchronizer(), request), TrialResult([], draws=False)
    else:
        loss_fn = parts.loss_fn or sum_of_outputs
        trial_step = TrialStep(model, groups, samples.train, loss_fn, parts.job)
        trial = _run_trial(parts, samples, trial_step)
        _start_equal(parts, model, grid)
        synced = _select_sync(parts, trial_step, trial.unused, len(samples.splits.train), grid, found)
    sample_s = time_sample(model, picture.expand(2, *picture.shape), world)
    return UnderMode(apply_mode(parts.mode, model, world, synced.how), synced, trial, restore_norms, sample_s)


def _refuse_untrainable(model: nn.Module, world: World) -> None:
    """Raises UserError, on all processes alike, where a process has nothing to train, or a complex parameter.

    Fused optimizers and modes refuse complex parameters; those of a network on a mesh may differ between processes.
    """
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    mine = [bool(trained), next((name for name, one in trained.items() if one.is_complex()), "")]
    everybody = gather_plain(mine, world)
    if not all(trains for trains, _ in everybody):
        where = (
            f" on rank {[trains for trains, _ in everybody].index(False)}" if any(one for one, _ in everybody) else ""
        )
        hints = ("unfreeze parameters: parameter.requires_grad_(True)", "or only evaluate: manyhands eval")
        raise UserError(f"the network has no trainable parameters{where}", "the network", hints)
    if name := next(filter(None, (name for _, name in everybody)), ""):
        hints = ("store nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(self.w) in forward",)
        raise UserError(f"the parameter {name} is complex; manyhands trains only real parameters", "the network", hints)


def _run_trial(parts: Parts, samples: DataSetup, trial_step: TrialStep) -> TrialResult:
    """Tries the network on two samples; with a custom loss on eight, and where it needs more, on a micro-batch.

    A collective, since all must find the same.
    """
    world, train = parts.world, parts.job.train
    count = most = min(2, len(samples.splits.train))
    if parts.loss_fn and parts.loss_fn.own:
        most = min(max(count, train.micro_batch or train.batch // world.size), len(samples.splits.train))
        count = min(_FEW, most)
    layers = trial_step.groups.layers
    if parts.loss_fn is None and (world.alone or parts.job.sync.method == EXACT):
        # Nothing asks for more, and it isn't known how the user's own loop calls the network.
        find_rows(trial_step.model, layers, next(iter(samples.train.batches(0, [torch.arange(count)]))).images)
        return TrialResult([], draws=False)
    try:
        found = _tried(trial_step, len(samples.classes) if parts.loss_fn else 0, count, most, world)
    except _FAILURES as error:
        if parts.loss_fn:
            raise
        method = parts.job.sync.method
        what = f"the network failed on the two test samples that sync.method = {method} needs: {error}"
        hints = (f"accept model(x) for a batch x, or set --sync {EXACT}, which needs no test",)
        raise UserError(what, "session.prepare", hints) from error
    unused, draws, rows = broadcast_plain([found.unused, found.draws, [one.rows_per_sample for one in layers]], world)
    for layer, each in zip(layers, rows, strict=True):
        layer.rows_per_sample = each
    if unused:
        message = f"{', '.join(unused[:3])} never get a gradient (do: freeze parameters that should not train)"
        parts.journal.event("warning", message, 0)
    return TrialResult(unused, draws, found.outputs, found.count)


def _tried(trial_step: TrialStep, classes: int, count: int, most: int, world: World) -> TrialResult:
    """Tries the network on `count` samples, and where that fails on `most`, whose error counts."""
    try:
        return run_trial(trial_step, classes, count, world)
    except _FAILURES as error:
        if count == most or isinstance(error, torch.OutOfMemoryError):
            raise
    return run_trial(trial_step, classes, most, world)


def _select_sync(
    parts: Parts, trial_step: TrialStep, unused: list[str], samples: int, grid: Grid | None, found: Resumable | None
) -> ChosenSync:
    """Selects the sync method; a collective."""
    job, world = parts.job, parts.world
    axes = tuple(word.strip() for word in job.parallel.samples.split(",") if word.strip()) or None
    share = -(-min(job.train.batch, samples) // world.size)
    state = found.snapshot.state if found else {}
    sync_request = SyncRequest(
        job,
        parts.mode,
        steps_to_make(job.train, samples),
        state.get("sync"),
        lambda: time_step(trial_step, share, world),
    )
    request = ModeRequest(
        bool(unused),
        grid=grid,
        samples=axes,
        shared_memory=job.parallel.shared_memory,
    )
    return select_sync(sync_request, trial_step.model, unused, world, parts.journal, request)


def _start_equal(parts: Parts, model: nn.Module, grid: Grid | None) -> None:
    """Verifies that all processes start from the same network, or (if asked to) gives them rank 0's.

    Of a network that its author has split over a grid, what is cut is left out: the pieces differ.

    Raises:
        UserError: the processes have other tensors, or train others.
    """
    world, always = parts.world, parts.job.parallel.parameter_broadcast
    sharded = (
        {name for name, one in layouts_of(model, grid.mesh, world.rank).items() if one.cuts} if grid else set[str]()
    )
    named = {name: tensor for name, tensor in split_state(model)[0].items() if name not in sharded}
    refuse_other_networks(model, named, world)
    if make_equal(named, world, always=always) and not always:
        parts.journal.event("note", "the processes built different networks (missing seed?); all use rank 0's network")

"""Builds what a loop of the user's own trains with: the same trainer as `fit`'s, around their network and optimizer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from manyhands.checkpoint.snapshot import unflatten
from manyhands.checkpoint.trained import find_record
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh
from manyhands.core.phases import CLOCK
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.terminal import say
from manyhands.core.world import World
from manyhands.data.objects import has_targets
from manyhands.parallel.apply import follows_plan, resolve_mode
from manyhands.parallel.marks import layouts_of
from manyhands.parallel.options import MODE_OF_PLANS
from manyhands.parallel.plain import broadcast_plain
from manyhands.parallel.plan import Plan, read_plan, shared_plan
from manyhands.train.choose_sync import check_combination
from manyhands.train.compiled import keep_compiled
from manyhands.train.data_setup import class_names, open_samples, open_splits
from manyhands.train.feed import Feed
from manyhands.train.job import record_setup, refuse_uncuttable, resume, say_expected, set_determinism
from manyhands.train.journal import Journal
from manyhands.train.objects import Objects, digest_objects
from manyhands.train.optimize import total_steps
from manyhands.train.own_optimizer import make_custom, mark_own
from manyhands.train.own_schedule import CustomScheduler, make_schedule
from manyhands.train.prepared import take_groups
from manyhands.train.recover import Resumable, find_state, training_digest
from manyhands.train.same_data import digest_trainable
from manyhands.train.scheduler_state import reading_of, restore_scheduler
from manyhands.train.sharing import order_and_sharing, refuse_small_micro_batches
from manyhands.train.state import Progress
from manyhands.train.status import StatusRound
from manyhands.train.step import Updater
from manyhands.train.trained import describe_trained
from manyhands.train.trainer import Trainer, seconds_between_saves
from manyhands.train.trial_step import warm_up
from manyhands.train.under_mode import BeforeMode, grid_of, put_under_mode

# The key of a checkpoint's state for what a session alone knows.
SESSION = "session"
_SAID = {"setup", "note", "warning", "resumed", "stall", "sync", "changed", "stopped"}
PlanLike = Plan | str | Path | Mapping[str, str]


class SpokenJournal(Journal):
    """Says what the user must know, since nobody draws a screen; without a run folder nothing is recorded."""

    def __init__(self, folder: RunFolder | None, rank: int) -> None:
        super().__init__(folder or NOWHERE, rank)
        self._recorded = folder is not None

    @override
    def event(self, kind: str, message: str = "", step: int | None = None, **data: Any) -> None:
        if self._rank == 0 and kind in _SAID:
            say(message)
        super().event(kind, message, step, **data)

    @override
    def _keep(self, write: Callable[[], None]) -> None:
        if self._recorded:
            super()._keep(write)


@dataclass(frozen=True)
class CustomParts:
    """What a loop of the user's own brings."""

    model: nn.Module  # the network
    optimizer: torch.optim.Optimizer  # of its parameters
    train_set: Any  # a torch Dataset of (x, y)
    plan: Plan | None = None  # how the network is split; None where it isn't
    # the user's own, of that optimizer; None where there is none, or it needn't be saved
    scheduler: LRScheduler | None = None
    scheduled: bool = False  # the job moves the learning rate


def as_plan(plan: PlanLike) -> Plan:
    """A plan from what users write: a Plan, the path of a plan.json, or strategies by op with the mesh among them."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return read_plan(Path(plan))
    given: Any = plan
    if not isinstance(given, Mapping) or not all(
        isinstance(word, str) for word in (given.get("mesh"), *given.values())
    ):
        raise UserError("unknown type of plan", "plan", ('pass plan.json or {"mesh": "dp=2", "fc": "o@dp"}',))
    return Plan(parse_mesh(plan["mesh"]), {name: text for name, text in plan.items() if name != "mesh"})


def prepare_trainer(
    job: Job, folder: RunFolder | None, world: World, own: CustomParts
) -> tuple[Trainer, dict[str, Any]]:
    """Builds the trainer, and puts it where the run folder's newest checkpoint was; a collective.

    The job has the batch; without a folder nothing is kept.

    Returns:
        The trainer, and what a session had noted in the checkpoint that it resumes from; empty at a start.

    Raises:
        UserError: network, data, plan and job don't fit together.
    """
    journal = SpokenJournal(folder, world.rank)
    mode, plan = _mode_and_plan(job, world, own.plan)
    if job.train.deterministic:
        set_determinism(job)
    # Layers that the user has frozen, such as a pretrained network's BatchNorm.
    frozen = [module for module in own.model.modules() if not module.training] if own.model.training else []
    model, job = _placed(own.model, job, world)
    digests = digest_objects(network=model) | digest_trainable(model)
    objects = Objects(model, own.train_set, own.train_set, targets=has_targets(own.train_set), digests=digests)
    found = find_state(job, folder, world, in_pieces=plan is not None) if folder else None
    splits, grid = open_splits(job, world, objects), grid_of(job, world, mode)
    layouts = layouts_of(model, grid.mesh, world.rank) if grid else {}
    known = journal, job, world, splits, class_names(job, splits), objects, model, layouts
    record_setup(*known, optimizer=own.optimizer, custom_loop=True)
    refuse_uncuttable(job, plan, mode, journal, resumes=folder is not None and folder.has_checkpoints())
    samples = open_samples(job, world, objects, journal, splits=splits)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    under = put_under_mode(BeforeMode(job, model, samples, mode, world, journal, plan=plan, grid=grid, found=found))
    network, synced = under.network, under.synced
    _follow_parameters(own, names)
    # Measured shares of a checkpoint aren't kept: nothing measures them anew here.
    local_statistics, kept = synced.synchronizer.local_statistics, [] if found else None
    order, sharing = order_and_sharing(job, samples.splits, world, mode, network, journal, kept, own=local_statistics)
    refuse_small_micro_batches(order, sharing, network)
    if job.train.compile:
        keep_compiled()
        model.compile()
    if own.scheduled:
        make_custom(lambda _: own.optimizer, model)
    else:
        mark_own(own.optimizer)
    set_rates = make_schedule(own.optimizer, job.train, order.steps_per_epoch) if own.scheduled else lambda _step: None
    if isinstance(set_rates, CustomScheduler) and set_rates.waits:
        hints = ("pass the scheduler to session.prepare(…, scheduler=scheduler), and call scheduler.step(loss)",)
        raise UserError("this schedule needs evaluations, which sessions don't make", "train.schedule", hints)
    update = Updater(
        network,
        own.optimizer,
        None,
        job.train,
        world,
        set_rates,
        synchronizer=synced.synchronizer,
        gradients_mean=job.parallel.gradients_mean,
        unused=under.trial.unused,
    )
    warm_up(update, samples.train, min(2, order.length))
    for module in frozen:
        module.training = False
    trainer = Trainer(
        job=job,
        folder=folder or NOWHERE,
        world=world,
        journal=journal,
        mode=mode,
        classes=samples.classes,
        trained=describe_trained(job, samples, samples.classes, mode, objects, world.size),
        feed=Feed(order, sharing, samples.train, network.replica(world.rank)),
        network=network,
        update=update,
        evaluate=_not_by_itself,
        status_round=StatusRound(
            world, job.run.log_every_s, seconds_between_saves(job.checkpoint.every), synced.cost.every
        ),
        progress=Progress(),
        total_steps=total_steps(job.train, order.steps_per_epoch),
        digest=training_digest(job, order.length),
        sync=synced.cost,
        augment=samples.pixels.augment,
        draws=under.trial.draws,
        watcher=under.watcher(world),
        communication=synced.communication,
        custom_loop=True,
        release=lambda: under.release(samples),
    )
    say_expected(under.sample_s, trainer)
    noted = _start(trainer, found, own)
    return trainer, noted


def _start(trainer: Trainer, found: Resumable | None, own: CustomParts) -> dict[str, Any]:
    """Restores the trainer from the checkpoint, if there is one; returns the session's saved notes."""
    noted = _resume(trainer, found, own) if found else {}
    CLOCK.take()
    trainer.status_round.reset(trainer.progress.step)
    trainer.epoch_mean.whole = trainer.progress.step_in_epoch == 0
    return noted


def _not_by_itself(*_: object) -> Any:
    raise AssertionError("sessions don't evaluate by themselves")


def _mode_and_plan(job: Job, world: World, plan: Plan | None) -> tuple[str, Plan | None]:
    """Returns the parallel mode and the plan, from the argument of `prepare` or from the job; a collective."""
    if job.cluster.shares == "auto" and not world.alone:
        hints = ("set the shares, such as --set cluster.shares=[24,8]", "or remove cluster.shares")
        raise UserError("cluster.shares = auto is not available in a session", "cluster.shares", hints)
    mode = MODE_OF_PLANS if plan else resolve_mode(job.parallel.mode, world)
    check_combination(job.sync.method, mode)
    if plan or not follows_plan(mode):
        return mode, plan
    if job.parallel.searches:
        what = f"--parallel {mode} times plans with the job's loss, but sessions have their own loss"
        hints = ("call session.prepare(…, plan=manyhands.find_plan(net, x, world_size=here.size))",)
        raise UserError(what, "parallel.mode", hints)
    return mode, shared_plan(job.parallel, world)


def _placed(model: nn.Module, job: Job, world: World) -> tuple[nn.Module, Job]:
    """The network on this process's device, in training; and the job with the precision that its numbers have.

    What the loop computes beside the network can't be measured, so nothing is chosen for it.
    """
    options, changes = job.train, dict[str, Any]()
    if options.precision == "fp64":
        model = model.double()
    elif {parameter.dtype for parameter in model.parameters()} == {torch.float64}:
        changes["precision"] = "fp64"
    elif options.precision == "auto":
        changes["precision"] = "fp32"
    changes["channels_last"] = options.channels_last is True
    named = job.model.model_copy(update={"name": type(model).__name__})
    model = model.to(world.device)
    if job.train.channels_last is True:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - missing in its types
    return model.train(), job.model_copy(update={"model": named, "train": options.model_copy(update=changes)})


def _follow_parameters(own: CustomParts, names: dict[int, str]) -> None:
    """Gives the optimizer the network's parameters as they are under its mode; `names` are of those before it."""
    live = dict(own.model.named_parameters())
    for group in own.optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            hints = ("create the optimizer from model.parameters() before session.prepare",)
            raise UserError("the optimizer has parameters that don't belong to the network", "session.prepare", hints)
        group["params"] = [live[names[id(parameter)]] for parameter in group["params"]]


def _resume(trainer: Trainer, found: Resumable, own: CustomParts) -> dict[str, Any]:
    """Puts network, optimizer, scheduler and progress where a checkpoint was; what the session had noted."""
    saved: Any = (found.snapshot.optimizer or {}).get("param_groups", [])
    if found.source:
        saved = unflatten(found.source.branches.get("param_groups", []), {})
    if not isinstance(trainer.update.set_rates, CustomScheduler):
        take_groups(own.optimizer, saved)
    resume(trainer, found)
    noted = found.snapshot.state.get(SESSION, {})
    if own.scheduler and noted.get("scheduler"):
        with reading_of(str(found.path)):
            restore_scheduler(own.scheduler, json.loads(noted["scheduler"]))
    record = find_record(found.path, found.snapshot.state)
    changed = record.changed(trainer.trained.digests) if record else []
    changed = broadcast_plain(changed, trainer.world)  # objects may hold a rank
    return {"epochs": trainer.progress.epoch, **noted, "changed": changed}

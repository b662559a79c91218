"""The parts that a trainer is built from, for a job or for a custom loop."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.config.job import Job
from manyhands.core.devices import device_name
from manyhands.core.errors import UserError
from manyhands.core.machine import cores
from manyhands.core.mesh import TensorLayout
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.terminal import plain
from manyhands.core.world import World
from manyhands.data.order import Order
from manyhands.data.samples import has_targets
from manyhands.data.splits import Splits, describe_samples
from manyhands.models.build import resolve_model
from manyhands.parallel.apply import follows_plan, one_process, resolve_mode, takes_mesh
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.options import MODE_ALONE, MODE_OF_PLANS, USUAL_MODE
from manyhands.train.choose_sync import check_combination
from manyhands.train.data_setup import DataSetup, class_names, name_outputs, open_splits, pixels_for
from manyhands.train.journal import Journal, RunContext
from manyhands.train.loss import LossFn, make_loss_fn
from manyhands.train.metrics import CustomMetric, make_metrics
from manyhands.train.network import initialize_from_data, make_model, mesh_of, refuse_other_head, without_first_weights
from manyhands.train.objects import Objects, digest_objects
from manyhands.train.optimize import largest_rate, make_custom, make_optimizer, mark_own
from manyhands.train.recover import Resumable
from manyhands.train.same_data import digest_trainable
from manyhands.train.schedule import CustomScheduler, SetRates, make_schedule
from manyhands.train.shares import MACHINES, BalancedShares, largest_pass, previous_shares
from manyhands.train.trainer import Trainer
from manyhands.train.trial_step import TrialResult, compile_updates, keep_compiled

if TYPE_CHECKING:
    from manyhands.parallel.mesh.grid import Grid
    from manyhands.parallel.plan import Plan


@dataclass(frozen=True)
class CustomParts:
    """The objects of a custom loop."""

    model: nn.Module  # the network
    optimizer: torch.optim.Optimizer  # of its parameters
    train_set: Any  # a torch Dataset of (x, y)
    plan: "Plan | None" = None  # how the network is split; None where it isn't
    # the user's own, of that optimizer; None where there is none, or it needn't be saved
    scheduler: LRScheduler | None = None
    scheduled: bool = False  # the job moves the learning rate


@dataclass(frozen=True)
class Parts(RunContext):
    """The parts of a trainer. Jobs and custom loops differ only in these fields."""

    objects: Objects  # what the user brought instead of names
    # the network on its device, from the data, the processes as its author sees them, and what the run resumes from
    make_model: Callable[[DataSetup, "Grid | None", Resumable | None], nn.Module]
    make_optimizer: Callable[[nn.Module, ParallelNetwork], torch.optim.Optimizer]
    make_schedule: Callable[[torch.optim.Optimizer, int], SetRates]  # of the optimizer and the updates of an epoch
    # a name for each output of the network, from those of the classes
    name_outputs: Callable[[tuple[str, ...], ParallelNetwork, TrialResult], tuple[str, ...]]
    # shares of the checkpoint, and the samples that a process took in one pass
    previous_shares: Callable[[Resumable | None], tuple[list[int] | None, int]]
    finish: Callable[[Trainer], Trainer]  # what changes a trainer that has been built and resumed; a collective
    plan: "Plan | None" = None  # how ops are split, for modes that follow a plan
    splits: Splits | None = None  # the data, where that was opened before
    loss_fn: LossFn | None = None  # None where the user computes the loss
    cross_entropy: bool = False  # the loss can be computed from parts of the classes
    metrics: Sequence[CustomMetric] = ()  # of the user's own
    header: bool = True  # what is trained on isn't recorded yet
    custom_loop: bool = False  # the user's own loop ends epochs and evaluates
    frozen: Sequence[nn.Module] = ()  # modules that the user keeps in evaluation mode
    before_resume: Callable[[Trainer, Resumable], object] = lambda _trainer, _found: None
    after_resume: Callable[[Trainer, Resumable], object] = lambda _trainer, _found: None

    @classmethod
    def from_job(  # noqa: PLR0913 - everything that meets in a run
        cls,
        job: Job,
        folder: RunFolder,
        world: World,
        mode: str,
        objects: Objects | None = None,
        plan: "Plan | None" = None,
        splits: Splits | None = None,
        *,
        header: bool = True,
    ) -> "Parts":
        """Creates the parts of a job for `fit`.

        Args:
            job: the job without "auto" values that a measurement resolves.
            folder: the run folder.
            world: the processes.
            mode: the parallel mode.
            objects: the Python objects of the user.
            plan: for modes that follow a plan.
            splits: the data, if it is open already.
            header: False if the setup was recorded.
        """
        set_determinism(job)
        brought, journal = objects or Objects(), Journal(folder, world.rank)

        def model_of(samples: DataSetup, grid: "Grid | None", found: Resumable | None) -> nn.Module:
            classes, pixels = len(samples.classes), samples.pixels
            starting = without_first_weights(job, pixels.size, brought) if found else job
            model = make_model(starting, pixels, classes, world, brought, journal, grid)
            if not found:
                initialize_from_data(model, job, samples, world)
            elif grid is None:
                refuse_other_head(found.snapshot, model, classes, str(found.path))
            return model

        return cls(
            *(job, folder, world, journal, mode, brought),
            plan=plan,
            splits=splits,
            header=header,
            loss_fn=make_loss_fn(job.train, brought.loss),
            cross_entropy=brought.loss is None and job.train.loss == "cross-entropy",
            metrics=make_metrics(job.train.metrics, brought.metrics),
            make_model=model_of,
            make_optimizer=lambda model, network: make_optimizer(
                model, job.train, sharded=network.traits.sharded, own=brought.optimizer
            ),
            make_schedule=lambda optimizer, steps: make_schedule(optimizer, job.train, steps, brought.schedule),
            name_outputs=functools.partial(_name_outputs, journal),
            previous_shares=lambda found: (previous_shares(found), largest_pass(found)),
            finish=_compiled_and_balanced,
        )

    @classmethod
    def from_objects(cls, job: Job, folder: RunFolder | None, world: World, own: CustomParts) -> "Parts":
        """Creates the parts of a custom loop from its network and optimizer; a collective.

        Records the setup. The batch comes from the job; without a folder nothing is saved.

        Raises:
            UserError: network, data, plan and job don't fit together.
        """
        mode, plan = _mode_and_plan(job, world, own.plan)
        if job.train.deterministic:
            set_determinism(job)
        # Layers that the user has frozen, such as a pretrained network's BatchNorm.
        frozen = [module for module in own.model.modules() if not module.training] if own.model.training else []
        model, job = _placed(own.model, job, world)
        digests = digest_objects(network=model) | digest_trainable(model)
        objects = Objects(model, own.train_set, own.train_set, targets=has_targets(own.train_set), digests=digests)
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def optimizer_of(model: nn.Module, _network: ParallelNetwork) -> torch.optim.Optimizer:
            _follow_parameters(own, names)
            if job.train.compile:
                keep_compiled()
                model.compile()
            if own.scheduled:
                return make_custom(lambda _: own.optimizer, model)
            mark_own(own.optimizer)
            return own.optimizer

        parts = cls(
            *(job, folder or NOWHERE, world, Journal(folder or NOWHERE, world.rank, spoken=True), mode, objects),
            plan=plan,
            splits=open_splits(job, world, objects),
            header=False,
            custom_loop=True,
            frozen=frozen,
            make_model=lambda _samples, _grid, _found: model,
            make_optimizer=optimizer_of,
            make_schedule=functools.partial(_schedule_of_loop, job, own),
            name_outputs=lambda classes, _network, _trial: classes,
            # Measured shares of a checkpoint aren't kept: nothing measures them anew here.
            previous_shares=lambda found: ([] if found else None, 0),
            finish=lambda trainer: trainer,
        )
        assert parts.splits
        grid = grid_of(job, world, mode)
        layouts: Mapping[str, TensorLayout] = {}
        if grid:
            from manyhands.parallel.mesh.marks import layouts_of

            layouts = layouts_of(model, grid.mesh, world.rank)
        record_setup(parts, objects, parts.splits, class_names(job, parts.splits), model, layouts, own.optimizer)
        return parts


def set_determinism(job: Job) -> None:
    if job.train.deterministic:
        # Without it torch refuses matrix products on CUDA. Source: the documentation of the function below.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != job.train.deterministic:
        torch.use_deterministic_algorithms(job.train.deterministic)  # imports torch's compiler


def refuse_uncuttable(parts: Parts) -> None:
    """Raises UserError for options that contradict a sharded network, or for a pin that can't be applied.

    Pins of an earlier start have no effect under another mode, which is reported.
    """
    job, plan, mode = parts.job, parts.plan, parts.mode
    if plan is None and job.parallel.pin and not (parts.folder is not NOWHERE and parts.folder.has_checkpoints()):
        why = "one process has nothing to split" if one_process(mode) else f"the mode {mode} splits no ops"
        hints = ("start two or more processes with --parallel semi", "or remove --pin")
        raise UserError(f"the pin {job.parallel.pin[0]} can't be applied: {why}", "parallel.pin", hints)
    if plan is None and not takes_mesh(mode):
        idle = [name for name in ("pin", "mesh", "plan") if getattr(job.parallel, name)]
        if idle and mode != MODE_ALONE and not job.parallel.searches:
            parts.journal.event("warning", f"the parallel mode {mode} ignores parallel.{idle[0]}")
        return
    if job.checkpoint.pth_tar:
        hints = ("remove checkpoint.pth_tar, and after training run: manyhands checkpoint merge RUN weights.pth",)
        raise UserError("a .pth.tar checkpoint can't store a sharded network", "checkpoint.pth_tar", hints)
    if job.train.compile:
        raise UserError("torch.compile doesn't support sharded networks", "train.compile", ("remove train.compile",))


def record_setup(
    run: RunContext,
    objects: Objects,
    splits: Splits,
    classes: Sequence[str],
    model: nn.Module,
    layouts: Mapping[str, TensorLayout] = {},
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Records data, network and training settings in three lines, the first ones on screen, in a log and in the report.

    `layouts` are those of sharded parameters, `optimizer` is the custom optimizer if it exists already. A custom loop
    decides the number of epochs and the evaluated data.
    """
    job, world, custom_loop = run.job, run.world, isinstance(run, Parts) and run.custom_loop
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
    run.journal.event("setup", "\n".join(lines))


def _name_outputs(
    journal: Journal, classes: tuple[str, ...], network: ParallelNetwork, trial: TrialResult
) -> tuple[str, ...]:
    """A name for each output of a job's network. Says how gradients are averaged, and where no class has some output.

    Raises:
        UserError: the network has too few outputs.
    """
    outputs = network.traits.outputs
    if outputs and outputs < len(classes):
        hints = (f"add outputs: --set model.num_classes={len(classes)}",)
        raise UserError(f"the network has {outputs} outputs for {len(classes)} classes", "model.name", hints)
    if network.traits.averages:
        journal.event("averaging", network.traits.averages, 0)
    for note in network.traits.plan.about.get("notes", []) if network.traits.plan else ():
        journal.event("note", note)
    outputs = max(trial.outputs, outputs)
    if outputs > len(classes):
        message = f"the network has {outputs:,} outputs for {len(classes):,} classes; extra outputs count as wrong"
        journal.event("note", message)
    return name_outputs(classes, outputs)


def _schedule_of_loop(job: Job, own: CustomParts, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> SetRates:
    """Sets the learning rates of a user's own loop, where its job moves them."""
    if not own.scheduled:
        return lambda _step: None
    set_rates = make_schedule(optimizer, job.train, steps_per_epoch)
    if isinstance(set_rates, CustomScheduler) and set_rates.waits:
        hints = ("pass the scheduler to session.prepare(…, scheduler=scheduler), and call scheduler.step(loss)",)
        raise UserError("this schedule needs evaluations, which sessions don't run", "train.schedule", hints)
    return set_rates


def _compiled_and_balanced(trainer: Trainer) -> Trainer:
    """Compiles a job's updates and balances its shares, where it asks for that; a collective."""
    sharing, wanted = trainer.feed.sharing, trainer.job.cluster.shares
    if sharing.processes > 1 and (wanted == "auto" or (wanted == MACHINES and _may_differ(trainer))):
        trainer.hooks.balance_shares = functools.partial(BalancedShares(known=bool(sharing.shares)).balance, trainer)
        trainer.hooks.balance_shares()
    elif wanted == MACHINES:
        # What a checkpoint from other machines may have kept.
        trainer.feed.sharing = dataclasses.replace(sharing, shares=())
    if trainer.job.train.compile:
        compile_updates(trainer)
    return trainer


def _may_differ(trainer: Trainer) -> bool:
    """True where several machines take part whose kinds differ, so that it is worth measuring; a collective there.

    Machines of one kind aren't measured: a passing difference would change the bits from run to run.
    """
    world = trainer.world
    able = trainer.run.mode == USUAL_MODE and not trainer.synchronizer.local_statistics
    if not able or world.local_size == world.size:
        return False
    kinds = gather_plain(f"{device_name(world.device)}, {cores():.3g} cores", world)
    return broadcast_plain(len(set(kinds)) > 1, world)


def _mode_and_plan(job: Job, world: World, plan: "Plan | None") -> "tuple[str, Plan | None]":
    """Returns the parallel mode and the plan, from the argument of `prepare` or from the job; a collective."""
    if job.cluster.shares == "auto" and not world.alone:
        hints = ("set the shares, such as --set cluster.shares=[24,8]", "or remove cluster.shares")
        raise UserError("cluster.shares = auto is not available in a session", "cluster.shares", hints)
    mode = MODE_OF_PLANS if plan else resolve_mode(job.parallel.mode, world)
    check_combination(job.sync.method, mode)
    if plan or not follows_plan(mode):
        return mode, plan
    if job.parallel.searches:
        what = f"--parallel {mode} benchmarks plans with the job's loss, but sessions have their own loss"
        hints = ("call session.prepare(…, plan=manyhands.find_plan(net, x, world_size=here.size))",)
        raise UserError(what, "parallel.mode", hints)
    from manyhands.parallel.plan import shared_plan

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


def grid_of(job: Job, world: World, mode: str) -> "Grid | None":
    """Returns the mesh of the job for modes with a mesh; by default one axis, dp.

    Raises:
        UserError: the size of the mesh is not the number of processes.
    """
    if not takes_mesh(mode):
        return None
    mesh = mesh_of(job, world)
    mesh.check_size(world.size)
    from manyhands.parallel.mesh.grid import Grid

    return Grid(mesh, world)

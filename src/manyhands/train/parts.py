"""The inputs from which `build` creates a trainer, for a job or a custom loop. Also creates the network."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.checkpoint.folders import choose_checkpoint
from manyhands.checkpoint.snapshot import Snapshot, renamed
from manyhands.checkpoint.trained import Preprocessing, TrainedNetwork, record_trained_on
from manyhands.config.job import Job, TrainOptions
from manyhands.core.devices import device_name
from manyhands.core.errors import UserError
from manyhands.core.machine import cores
from manyhands.core.mesh import Mesh, TensorLayout, parse_mesh
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.seeds import derive_seed
from manyhands.core.terminal import plain
from manyhands.core.user_code import code_digests
from manyhands.core.world import World
from manyhands.data.order import Order
from manyhands.data.samples import has_targets
from manyhands.data.splits import Splits, describe_samples
from manyhands.data.transforms import Pixels, spread
from manyhands.models.build import build_model, picture_needs, resolve_model
from manyhands.models.interface import INITIALIZATION_SAMPLES, InitializedFromData
from manyhands.parallel.apply import follows_plan, one_process_label, resolve_mode, takes_mesh
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.options import MODE_ALONE, MODE_OF_PLANS, USUAL_MODE
from manyhands.train import data_setup, optimize
from manyhands.train.choose_sync import check_sync_and_mode
from manyhands.train.journal import Journal, RunContext
from manyhands.train.loss import CustomMetric, LossFn, make_loss_fn, make_metrics
from manyhands.train.objects import Objects, digest_objects
from manyhands.train.shares import MACHINES, ShareBalancer, previous_shares
from manyhands.train.state import Resumable, load_snapshot, read_snapshot, split_state
from manyhands.train.trainer import Trainer
from manyhands.train.trial_step import TrialResult, compile_updates, set_compile_cache

if TYPE_CHECKING:
    from manyhands.parallel.mesh.grid import Grid
    from manyhands.parallel.plan import Plan

PICTURES = ("image_size", "channels", "mean", "std")  # options of the preprocessing of pictures


@dataclass(frozen=True)
class CustomParts:
    """The objects that a custom loop passes to `session.prepare`."""

    model: nn.Module
    optimizer: Optimizer
    train_set: Any  # a torch Dataset of (x, y)
    plan: "Plan | None" = None
    scheduler: LRScheduler | None = None  # a scheduler of `optimizer`, saved in checkpoints
    scheduled: bool = False  # the job sets the learning rate


@dataclass(frozen=True)
class Parts(RunContext):
    """The inputs of `build`, which creates a trainer. A job and a custom loop differ only in these fields."""

    objects: Objects  # the user's Python objects
    make_model: Callable[[data_setup.DataSetup, "Grid | None", Resumable | None], nn.Module]
    make_optimizer: Callable[..., Optimizer]  # takes the network, and `sharded`: its tensors are sharded
    make_schedule: Callable[..., optimize.SetRates]  # takes the optimizer, and `steps_per_epoch`
    # returns a name for each output of the network, given the class names
    name_outputs: Callable[[tuple[str, ...], ParallelNetwork, TrialResult], tuple[str, ...]] = lambda names, *_: names
    previous_shares: Callable[[Resumable | None], tuple[list[int] | None, int]] = previous_shares
    finish: Callable[[Trainer], Trainer] = lambda trainer: trainer  # completes the resumed trainer; a collective
    plan: "Plan | None" = None  # for modes that follow a plan
    splits: Splits | None = None  # the data, if it is open already
    loss_fn: LossFn | None = None  # None if the user computes the loss
    cross_entropy: bool = False  # the job's loss, which can be computed from shards of the classes
    metrics: Sequence[CustomMetric] = ()
    header: bool = True  # the setup is not recorded yet
    custom_loop: bool = False  # the user's loop ends epochs and evaluates
    frozen: Sequence[nn.Module] = ()  # modules that the user keeps in evaluation mode
    before_resume: Callable[[Trainer, Resumable], object] = lambda _trainer, _found: None
    after_resume: Callable[[Trainer, Resumable], object] = lambda _trainer, _found: None

    @classmethod
    def from_job(  # noqa: PLR0913 - all inputs of a run
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
        """Creates the parts of a job for `fit`. "auto" options that need measurements must already be resolved."""
        set_determinism(job)
        brought, journal = objects or Objects(), Journal(folder, world.rank)

        def model_of(samples: data_setup.DataSetup, grid: "Grid | None", found: Resumable | None) -> nn.Module:
            classes, pixels = len(samples.classes), samples.pixels
            starting = without_initial_weights(job, pixels.size, brought) if found else job
            model = make_model(starting, pixels, classes, world, brought, journal, grid)
            if not found and isinstance(model, InitializedFromData) and not job.model.weights:
                chosen = spread(INITIALIZATION_SAMPLES, len(samples.splits.train))
                loader = data_setup.make_loader(job, samples.splits.train, pixels, world, train=False)
                model.initialize(next(iter(loader.batches(0, [chosen]))).images)
                loader.close()
            if found and grid is None:
                refuse_other_class_count(found.snapshot, model, classes, str(found.path))
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
            make_optimizer=functools.partial(optimize.make_optimizer, options=job.train, custom=brought.optimizer),
            make_schedule=functools.partial(optimize.make_schedule, options=job.train, custom=brought.schedule),
            name_outputs=functools.partial(_name_outputs, journal),
            finish=_compile_and_balance,
        )

    @classmethod
    def from_objects(cls, job: Job, folder: RunFolder | None, world: World, loop: CustomParts) -> "Parts":
        """Creates the parts of a custom loop and records the setup. A collective."""
        mode, plan = _mode_and_plan(job, world, loop.plan)
        if job.train.deterministic:
            set_determinism(job)
        # Layers that the user keeps in evaluation mode, such as a pretrained network's BatchNorm.
        frozen = [module for module in loop.model.modules() if not module.training] if loop.model.training else []
        model, job = _resolve_and_move(loop.model, job, world)
        digests = digest_objects(network=model) | data_setup.digest_trainable(model)
        objects = Objects(model, loop.train_set, loop.train_set, targets=has_targets(loop.train_set), digests=digests)
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def optimizer_of(model: nn.Module, *, sharded: bool) -> Optimizer:  # noqa: ARG001 - as for a job
            live = dict(loop.model.named_parameters())  # the parameters after the mode was applied
            for group in loop.optimizer.param_groups:
                if any(id(parameter) not in names for parameter in group["params"]):
                    hints = ("create the optimizer from model.parameters() before session.prepare",)
                    what = "the optimizer has parameters that don't belong to the network"
                    raise UserError(what, "session.prepare", hints)
                group["params"] = [live[names[id(parameter)]] for parameter in group["params"]]
            if job.train.compile:
                set_compile_cache()
                model.compile()
            if loop.scheduled:
                return optimize.make_custom_optimizer(lambda _: loop.optimizer, model)
            optimize.mark_custom_optimizer(loop.optimizer)
            return loop.optimizer

        splits, grid = data_setup.open_splits(job, world, objects), job_grid(job, world, mode)
        parts = cls(
            *(job, folder or NOWHERE, world, Journal(folder or NOWHERE, world.rank, prints=True), mode, objects),
            plan=plan,
            splits=splits,
            header=False,
            custom_loop=True,
            frozen=frozen,
            make_model=lambda _samples, _grid, _found: model,
            make_optimizer=optimizer_of,
            make_schedule=functools.partial(_custom_loop_schedule, job, loop),
            previous_shares=lambda found: ([] if found else None, 0),  # a session doesn't measure shares
        )
        classes, layouts = data_setup.class_names(job, splits), layouts_from_code(model, grid, world)
        record_setup(parts, objects, splits, classes, model, layouts, loop.optimizer)
        return parts


def set_determinism(job: Job) -> None:
    if job.train.deterministic:  # without this variable torch refuses matrix products on CUDA
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != job.train.deterministic:
        torch.use_deterministic_algorithms(job.train.deterministic)  # imports torch's compiler


def refuse_unshardable(parts: Parts) -> None:
    """Raises UserError if an option doesn't support sharded networks, or --pin (an op's sharding) can't be used."""
    job, plan, mode = parts.job, parts.plan, parts.mode
    if plan is None and job.parallel.pin and not (parts.folder is not NOWHERE and parts.folder.has_checkpoints()):
        why = "one process shards no ops" if one_process_label(mode) else f"the parallel mode {mode} shards no ops"
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
    optimizer: Optimizer | None = None,
) -> None:
    """Records the lines on data, network and training. `layouts`: layouts of sharded parameters, by name."""
    job, world, custom_loop = run.job, run.world, isinstance(run, Parts) and run.custom_loop
    options, count = job.train, len(splits.train)
    order = Order(count, min(options.batch, count), 0, options.drop_last)
    parameters = sum(math.prod(layouts.get(name, each).shape) for name, each in model.named_parameters())
    named = job.model.name
    if objects.model is None:
        named = resolve_model(job.model, data_setup.pixels_for(job, splits, objects).size).name
    data = job.data.name if objects.train_set is None else type(objects.train_set).__name__
    tested = None if custom_loop else len(splits.test)
    counted = describe_samples(count, tested, classes, "samples" if splits.pixels.own else "pictures")
    kind, rate = plain(options.optimizer), f" at learning rate {options.lr:g}" if options.built_in else ""
    if optimizer and (custom_loop or not options.built_in):
        kind, rate = type(optimizer).__name__, f" at learning rate {optimize.largest_learning_rate(optimizer):g}"
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
    """Returns a name for each output of a job's network; records notes. Raises UserError for too few outputs."""
    outputs = network.traits.class_count
    if outputs and outputs < len(classes):
        hints = (f"add outputs: --set model.num_classes={len(classes)}",)
        raise UserError(f"the network has {outputs} outputs for {len(classes)} classes", "model.name", hints)
    if network.traits.averaging:
        journal.event("averaging", network.traits.averaging, 0)
    for note in network.traits.plan.about.get("notes", []) if network.traits.plan else ():
        journal.event("note", note)
    outputs = max(trial.outputs, outputs)
    if outputs > len(classes):
        message = f"the network has {outputs:,} outputs for {len(classes):,} classes; extra outputs count as wrong"
        journal.event("note", message)
    return data_setup.name_outputs(classes, outputs)


def _custom_loop_schedule(job: Job, loop: CustomParts, optimizer: Optimizer, steps_per_epoch: int) -> optimize.SetRates:
    """Returns the function that sets a custom loop's learning rates. It does nothing without a schedule."""
    if not loop.scheduled:
        return lambda _step: None
    set_rates = optimize.make_schedule(optimizer, job.train, steps_per_epoch)
    if isinstance(set_rates, optimize.CustomScheduler) and set_rates.waits:
        hints = ("pass the scheduler to session.prepare(…, scheduler=scheduler), and call scheduler.step(loss)",)
        raise UserError("this schedule needs evaluations, which sessions don't run", "train.schedule", hints)
    return set_rates


def _compile_and_balance(trainer: Trainer) -> Trainer:
    """Balances shares by measured speeds, and compiles the network, if the job requests these. A collective."""
    world, sharing, wanted = trainer.world, trainer.feed.sharing, trainer.job.cluster.shares
    balance = sharing.processes > 1 and wanted == "auto"
    if sharing.processes > 1 and wanted == MACHINES:
        # Equal machines aren't measured, because random differences would change the last bits from run to run.
        able = trainer.run.mode == USUAL_MODE and not trainer.synchronizer.local_statistics
        if able and world.local_size < world.size:
            kinds = gather_plain(f"{device_name(world.device)}, {cores():.3g} cores", world)
            balance = len(set(kinds)) > 1
    if balance:
        trainer.hooks.balance_shares = functools.partial(ShareBalancer(measured=bool(sharing.shares)).balance, trainer)
        trainer.hooks.balance_shares()
    elif wanted == MACHINES:  # the checkpoint's shares were measured on other machines
        trainer.feed.sharing = replace(sharing, shares=())
    if trainer.job.train.compile:
        compile_updates(trainer)
    return trainer


def _mode_and_plan(job: Job, world: World, plan: "Plan | None") -> "tuple[str, Plan | None]":
    """Returns a session's parallel mode, and the plan from `session.prepare` or from the job. A collective."""
    if job.cluster.shares == "auto" and not world.alone:
        hints = ("set the shares, such as --set cluster.shares=[24,8]", "or remove cluster.shares")
        raise UserError("cluster.shares = auto is not available in a session", "cluster.shares", hints)
    mode = MODE_OF_PLANS if plan else resolve_mode(job.parallel.mode, world)
    check_sync_and_mode(job.sync.method, mode)
    if plan or not follows_plan(mode):
        return mode, plan
    if job.parallel.searches:
        what = f"--parallel {mode} benchmarks plans with the job's loss, but sessions have their own loss"
        hints = ("call session.prepare(…, plan=manyhands.find_plan(net, x, world_size=here.size))",)
        raise UserError(what, "parallel.mode", hints)
    from manyhands.parallel.plan import broadcast_plan

    return mode, broadcast_plan(job.parallel, world)


def _resolve_and_move(model: nn.Module, job: Job, world: World) -> tuple[nn.Module, Job]:
    """Resolves "auto" options. Returns the network on this process's device, and the resolved job."""
    options, changes = job.train, dict[str, Any](channels_last=job.train.channels_last is True)
    if options.precision != "fp64" and {parameter.dtype for parameter in model.parameters()} == {torch.float64}:
        changes["precision"] = "fp64"
    elif options.precision == "auto":
        changes["precision"] = "fp32"
    named = job.model.model_copy(update={"name": type(model).__name__})
    changed = job.model_copy(update={"model": named, "train": options.model_copy(update=changes)})
    return prepare_on_device(model, options, world.device), changed


def job_grid(job: Job, world: World, mode: str) -> "Grid | None":
    """Creates the job's device mesh; None for a mode without one. Raises UserError if it isn't of the world size."""
    if not takes_mesh(mode):
        return None
    mesh = job_mesh(job, world)
    mesh.check_size(world.size)
    from manyhands.parallel.mesh.grid import Grid

    return Grid(mesh, world)


def layouts_from_code(model: nn.Module, grid: "Grid | None", world: World) -> Mapping[str, TensorLayout]:
    """Returns the layouts of tensors, by name, if the network's own code shards them over `grid`, else {}."""
    if grid is None:
        return {}
    from manyhands.parallel.mesh.marks import state_dict_layouts

    return state_dict_layouts(model, grid.mesh, world.rank)


def make_model(
    job: Job, pixels: Pixels, classes: int, world: World, objects: Objects, journal: Journal, grid: "Grid | None" = None
) -> nn.Module:
    """Creates the job's network on its device. All processes use the same seed. The network may shard itself."""
    torch.manual_seed(derive_seed(job.train.seed, "model"))
    model = objects.model
    if model is None:
        for note in picture_needs(job.model, pixels.size).notes:
            journal.event("note", note)
        model = build_model(job.model, channels=pixels.channels, size=pixels.size, num_classes=classes, mesh=grid)
    if job.model.weights:
        load_initial_weights(model, Path(job.model.weights).expanduser(), classes, journal)
    if job.train.precision != "fp64" and {one.dtype for one in model.parameters()} == {torch.float64}:
        what = f"the network is float64, but train.precision is {job.train.precision}"
        raise UserError(what, "train.precision", ("add --set train.precision=fp64", "or make the network float32"))
    return prepare_on_device(model, job.train, world.device)


def prepare_on_device(model: nn.Module, options: TrainOptions, device: str) -> nn.Module:
    """Moves a network to a device, in training mode, with the precision and memory format of `options`."""
    model = model.double() if options.precision == "fp64" else model
    model = model.to(device).train()
    if options.channels_last is not True:  # lazy layers have no memory format yet
        return model
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - missing in its types


def without_initial_weights(job: Job, size: int, objects: Objects) -> Job:
    """Returns the job without initial weights, because a checkpoint has them. `size`: picture size in pixels."""
    model = resolve_model(job.model, size) if objects.model is None else job.model.model_copy(update={"weights": ""})
    return job.model_copy(update={"model": model})


def load_initial_weights(model: nn.Module, reference: Path, classes: int, journal: Journal) -> None:
    """Loads the weights in a file, a checkpoint or a run, but no last layer that has another number of classes."""
    path, passed_over = choose_checkpoint(reference, "best")
    for note in passed_over:
        journal.event("warning", note)
    snapshot, (live, _) = renamed(read_snapshot(path), model.state_dict()), split_state(model)
    saved = snapshot.model
    if head := _differing_last_layers(saved, live, classes):
        outputs = len(saved[head[0]])
        journal.event("note", f"{', '.join(head)} not loaded: {path.name} has {outputs:,} classes, not {classes:,}")
        saved.update({name: live[name] for name in head})
    try:
        load_snapshot(snapshot, model, "model.weights", renames=False)
    except UserError as error:
        hints = ("choose the network of these weights; only the last layer may have a different number of classes",)
        raise UserError(error.message, f"model.weights: {path}", hints) from None
    for note in snapshot.notes:
        journal.event("note", note)


def refuse_other_class_count(snapshot: Snapshot, model: nn.Module, classes: int, where: str) -> None:
    """Raises UserError if the last layer in a checkpoint doesn't have `classes` outputs."""
    saved, live = renamed(snapshot, model.state_dict()).model, split_state(model)[0]
    if head := _differing_last_layers(saved, live, classes):
        outputs = len(saved[head[0]])
        hints = (
            f"start from these weights with a new last layer: --model.weights {where}",
            f"or keep all outputs: --set model.num_classes={outputs}",
        )
        raise UserError(f"the network has {outputs:,} outputs, but the data has {classes:,} classes", where, hints)


def _differing_last_layers(saved: dict[str, Tensor], live: dict[str, Tensor], classes: int) -> list[str]:
    """Returns the last layers' tensor names if the saved network differs only in the number of outputs, else []."""
    if saved.keys() != live.keys():
        return []
    other = [name for name in live if saved[name].shape != live[name].shape]
    same_else = all(saved[name].ndim and saved[name].shape[1:] == live[name].shape[1:] for name in other)
    lengths = {(len(saved[name]), len(live[name])) for name in other} if same_else else set()
    return other if len(lengths) == 1 and lengths.pop()[1] == classes else []


def describe_trained(parts: Parts, samples: data_setup.DataSetup, classes: tuple[str, ...]) -> TrainedNetwork:
    """Returns the description of network and data that checkpoints contain. `classes`: a name for each output."""
    job, objects, pixels = parts.job, parts.objects, samples.pixels
    fields = {name: getattr(pixels, name) for name in ("own", "size", "channels", "mean", "std")}
    pictures = Preprocessing(resize=pixels.resized_to, **fields)
    if objects.model is not None:
        record_trained_on(objects.model, pictures, classes)
    model = job.model if objects.model is not None else resolve_model(job.model, pixels.size)
    grid = job_mesh(job, parts.world) if takes_mesh(parts.mode) else None
    return TrainedNetwork(
        name=model.name,
        made_in_python=objects.model is not None,
        arguments=model.arguments,
        num_classes=len(samples.classes),
        axes=tuple(grid.names) if grid else (),
        double=job.train.precision == "fp64",
        precision=job.train.precision,
        channels_last=job.train.channels_last is True,
        pictures=pictures,
        classes=classes,
        code=code_digests((model.name, job.data.name, job.data.held_out, *job.train.custom_code)),
        digests={**objects.digests, **data_setup.digest_data(samples.splits)},
        samples={word: len(source) for word, source in data_setup.named_splits(samples.splits)},
    )


def job_mesh(job: Job, world: World) -> Mesh:
    """Returns the job's device mesh. By default, it has one axis, dp, over all processes."""
    return parse_mesh(job.parallel.mesh) if job.parallel.mesh else Mesh((("dp", world.size),))


def pixels_of(saved: Preprocessing) -> Pixels:
    """Converts the preprocessing in a checkpoint to the `Pixels` of an evaluation."""
    return Pixels(saved.size, saved.channels, saved.mean, saved.std, "none", resize=saved.resize, own=saved.own)

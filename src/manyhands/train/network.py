"""The network of a job, built on its device with its initial weights, and what checkpoints record of it."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyhands.checkpoint.folders import choose
from manyhands.checkpoint.read import load
from manyhands.checkpoint.snapshot import Snapshot, fitted
from manyhands.checkpoint.trained import Pictures, TrainedNetwork, note_trained_on
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.seeds import derive
from manyhands.core.user_code import code_digests
from manyhands.core.world import World
from manyhands.data.random import spread
from manyhands.data.transforms import Pixels
from manyhands.models.build import build_model, describe, resolve_model
from manyhands.models.outputs import INITIALIZATION_SAMPLES, InitializedFromData
from manyhands.parallel.apply import takes_mesh
from manyhands.train.data_setup import DataSetup, make_loader
from manyhands.train.journal import Journal, RunContext
from manyhands.train.objects import Objects
from manyhands.train.same_data import digest_data, split_names
from manyhands.train.state import load_snapshot, split_state

if TYPE_CHECKING:
    from manyhands.parallel.mesh.grid import Grid

# Options that say what pictures become.
PICTURES = ("image_size", "channels", "mean", "std")


def make_model(
    job: Job, pixels: Pixels, classes: int, world: World, objects: Objects, journal: Journal, grid: "Grid | None" = None
) -> nn.Module:
    """Creates the network on its device: equal on all processes (same seed), or sharded over `grid` by its own code."""
    torch.manual_seed(derive(job.train.seed, "model"))
    if objects.model is not None:
        model = objects.model
    else:
        for note in describe(job.model, pixels.size).notes:
            journal.event("note", note)
        model = build_model(job.model, channels=pixels.channels, size=pixels.size, num_classes=classes, mesh=grid)
    if job.model.weights:
        begin_with(model, Path(job.model.weights).expanduser(), classes, journal)
    if job.train.precision == "fp64":
        model = model.double()
    elif {one.dtype for one in model.parameters()} == {torch.float64}:
        what = f"the network is float64, but train.precision is {job.train.precision}"
        raise UserError(what, "train.precision", ("add --set train.precision=fp64", "or make the network float32"))
    model = model.to(world.device)
    if job.train.channels_last is True:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - missing in its types
    return model.train()


def initialize_from_data(model: nn.Module, job: Job, samples: DataSetup, world: World) -> None:
    """Initializes a network from training pictures if it supports that and has no weights to start from."""
    if isinstance(model, InitializedFromData) and not job.model.weights:
        loader = make_loader(job, samples.splits.train, samples.pixels, world, train=False)
        model.look(next(iter(loader.batches(0, [spread(INITIALIZATION_SAMPLES, len(samples.splits.train))]))).images)
        loader.close()


def without_first_weights(job: Job, size: int, objects: Objects) -> Job:
    """Returns the job without initial weights, because the weights come from a checkpoint; `size` is in pixels."""
    resolved = (
        job.model.model_copy(update={"weights": ""}) if objects.model is not None else resolve_model(job.model, size)
    )
    return job.model_copy(update={"model": resolved})


def read_any(path: Path) -> Snapshot:
    """Reads a checkpoint of manyhands or of another tool."""
    if path.is_dir():
        return load(path)
    from manyhands.checkpoint.foreign import read_foreign

    return read_foreign(path)


def begin_with(model: nn.Module, reference: Path, classes: int, journal: Journal) -> None:
    """Loads the weights of a file, a checkpoint or a run; a last layer with another number of classes is not loaded.

    Raises:
        UserError: there is no such file, or it belongs to another network.
    """
    path, passed_over = choose(reference, "best")
    for note in passed_over:
        journal.event("warning", note)
    snapshot, (live, _) = fitted(read_any(path), model.state_dict()), split_state(model)
    saved = snapshot.model
    head = _other_head(saved, live, classes)
    if head:
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


def refuse_other_head(snapshot: Snapshot, model: nn.Module, classes: int, where: str) -> None:
    """Refuses to resume a foreign checkpoint whose last layer has another number of outputs than the data has classes.

    Raises:
        UserError: only the last layer differs.
    """
    saved, live = fitted(snapshot, model.state_dict()).model, split_state(model)[0]
    head = _other_head(saved, live, classes)
    if head:
        outputs = len(saved[head[0]])
        hints = (
            f"start from these weights with a new last layer: --model.weights {where}",
            f"or keep all outputs: --set model.num_classes={outputs}",
        )
        raise UserError(f"the network has {outputs:,} outputs, but the data has {classes:,} classes", where, hints)


def _other_head(saved: dict[str, Tensor], live: dict[str, Tensor], classes: int) -> list[str]:
    """The tensors of the last layers, where they differ in the number of outputs and nothing else does."""
    if saved.keys() != live.keys():
        return []
    other = [name for name in live if saved[name].shape != live[name].shape]
    same_else = all(saved[name].ndim and saved[name].shape[1:] == live[name].shape[1:] for name in other)
    lengths = {(len(saved[name]), len(live[name])) for name in other} if same_else else set()
    return other if len(lengths) == 1 and lengths.pop()[1] == classes else []


def describe_trained(run: RunContext, samples: DataSetup, classes: tuple[str, ...], objects: Objects) -> TrainedNetwork:
    """Describes the network and its data beyond the weights, for checkpoints; `classes` names each output."""
    job, pixels = run.job, samples.pixels
    pictures = Pictures(
        own=pixels.own,
        size=pixels.size,
        resize=pixels.resized_to,
        channels=pixels.channels,
        mean=pixels.mean,
        std=pixels.std,
    )
    if objects.model is not None:
        note_trained_on(objects.model, pictures, classes)
    model = job.model if objects.model is not None else resolve_model(job.model, pixels.size)
    grid = mesh_of(job, run.world) if takes_mesh(run.mode) else None
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
        digests={**objects.digests, **digest_data(samples.splits)},
        samples={word: len(source) for word, source in split_names(samples.splits)},
    )


def mesh_of(job: Job, world: World) -> Mesh:
    """Returns the mesh of the job, by default one axis, dp."""
    return parse_mesh(job.parallel.mesh) if job.parallel.mesh else Mesh((("dp", world.size),))


def pixels_of(about: Pictures) -> Pixels:
    """Returns the preprocessing of pictures for an evaluation."""
    return Pixels(about.size, about.channels, about.mean, about.std, "none", resize=about.resize, own=about.own)

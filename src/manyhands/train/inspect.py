"""Evaluation and prediction with a finished network."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.foreign import read_foreign
from manyhands.checkpoint.load import load
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.config.job import Job
from manyhands.core.folder import RunFolder
from manyhands.core.journal import Journal
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.world import World
from manyhands.data.transforms import Pixels
from manyhands.parallel.apply import apply_mode, follows_plan, resolve_mode
from manyhands.parallel.grid import Grid
from manyhands.parallel.network import How, ParallelNetwork
from manyhands.parallel.plan import Plan, read_plan
from manyhands.parallel.shared_plan import shared_plan
from manyhands.train.evaluate import Evaluation, Evaluator
from manyhands.train.job import make_model
from manyhands.train.recover import Found, find_state, outputs_of
from manyhands.train.samples import (
    Objects,
    check_labels,
    class_names,
    first_picture,
    make_loader,
    name_outputs,
    open_splits,
    pixels_for,
)
from manyhands.train.state import check_fits, restore
from manyhands.train.step import AUTOCAST


def read_any(path: Path) -> Snapshot:
    """A checkpoint of ours or of somebody else."""
    return load(path) if path.is_dir() else read_foreign(path)


def evaluate_checkpoint(job: Job, path: Path | None, world: World, objects: Objects | None = None) -> dict[str, Any]:
    """Evaluates a checkpoint on the job's test split; a collective where there are several processes.

    Without one the network is evaluated as the job makes it, with published weights or untrained.

    Returns:
        count, loss, top1, top5, per_class and confusion (sparse), as plain data.
    """
    objects = objects or Objects()
    plan = _fitting_plan(job, world)
    found = _shared(job, path, world, in_pieces=plan is not None) if path else None
    snapshot = found.snapshot if found else None
    splits = open_splits(job, world, objects)
    known = snapshot.state.get("classes") if snapshot else None
    classes = tuple(known or class_names(job, splits, outputs_of(snapshot) if snapshot else 0))
    check_labels(splits, len(classes))
    pixels = pixels_for(job, splits, objects)
    loader = make_loader(job, splits.test, pixels, world, train=False, classes=len(classes))
    network = None
    if job.parallel.mode == "hybrid":
        network = _hybrid_network(job, pixels, classes, world, objects)
        if found:
            restore(found.snapshot, network, None, where=str(path))
        model = network.call.eval()
    elif plan:
        network = _cut_network(job, pixels, classes, world, objects, How(plan=plan, picture=first_picture(loader)))
        if found:
            restore(found.snapshot, network, None, where=str(path), source=found.source)
        model = network.call.eval()
    elif snapshot:
        model = _network(job, pixels, classes, world, objects, snapshot, str(path))
    else:
        model = make_model(job, pixels, len(classes), world, objects, _silent()).eval()
    evaluator = Evaluator(
        loader,
        len(splits.test),
        len(classes),
        job.train.evaluate_batch,
        world,
        log_probabilities=job.train.loss == "nll",
        cutting=network.cutting if network else None,
    )
    kind = AUTOCAST.get(job.train.precision)
    autocast = torch.autocast(world.device.partition(":")[0], dtype=kind) if kind else contextlib.nullcontext()
    try:
        return as_plain(evaluator(model, autocast), classes)
    finally:
        loader.close()
        if network and network.cutting:
            network.cutting.release()


def _fitting_plan(job: Job, world: World) -> Plan | None:
    """The plan to evaluate under: the job's, where there are as many processes as it is for."""
    if world.alone or not follows_plan(resolve_mode(job.parallel.mode, world)):
        return None
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else None
    mesh = mesh or (read_plan(Path(job.parallel.plan)).mesh if job.parallel.plan else None)
    return shared_plan(job.parallel, world) if mesh is None or mesh.size == world.size else None


def _shared(job: Job, path: Path, world: World, *, in_pieces: bool) -> Found | None:
    """Rank 0's file on every process: other machines needn't have it."""
    named = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": str(path)})})
    return find_state(named, RunFolder(Path()), world, in_pieces=in_pieces)


def _hybrid_network(
    job: Job, pixels: Pixels, classes: tuple[str, ...], world: World, objects: Objects
) -> ParallelNetwork:
    """A network that its author has split over the job's mesh; on another number of processes each has all of it."""
    plain = job.model_copy(update={"model": job.model.model_copy(update={"weights": "", "pretrained": False})})
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else Mesh((("dp", world.size),))
    fits = mesh.size == world.size
    grid = (
        Grid(mesh, world) if fits else Grid(Mesh(tuple((name, 1) for name in mesh.names)), World(device=world.device))
    )
    model = make_model(plain, pixels, len(classes), world, objects, _silent(), grid)
    network = apply_mode("hybrid", model, world, How(grid=grid))
    return network if fits else replace(network, cutting=None)


def _cut_network(
    job: Job, pixels: Pixels, classes: tuple[str, ...], world: World, objects: Objects, how: How
) -> ParallelNetwork:
    """The network under a plan, its weights not yet read."""
    plain = job.model_copy(update={"model": job.model.model_copy(update={"weights": "", "pretrained": False})})
    model = make_model(plain, pixels, len(classes), world, objects, _silent())
    return apply_mode("semi", model, world, how)


def _network(
    job: Job, pixels: Pixels, classes: tuple[str, ...], world: World, objects: Objects, snapshot: Snapshot, where: str
) -> nn.Module:
    plain = job.model_copy(update={"model": job.model.model_copy(update={"weights": "", "pretrained": False})})
    model = make_model(plain, pixels, len(classes), world, objects, _silent())
    check_fits(snapshot.model, model, where)
    model.load_state_dict(snapshot.model)
    return model.eval()


def _silent() -> Journal:
    return Journal(RunFolder(Path()), rank=-1)


def as_plain(found: Evaluation, classes: tuple[str, ...]) -> dict[str, Any]:
    """An evaluation as JSON data."""
    classes = name_outputs(classes, found.classes)
    totals, right = [0] * len(classes), [0] * len(classes)
    cells: list[list[int]] = found.cells.tolist()
    for true, guessed, count in cells:
        totals[true] += count
        right[true] += count if true == guessed else 0
    return {
        "count": found.count,
        "loss": found.loss,
        "top1": found.top1,
        "top5": found.top5,
        "per_class": [
            {"name": name, "count": total, "top1": hits / total}
            for name, total, hits in zip(classes, totals, right, strict=True)
            if total
        ],
        "confusion": [(true, guessed, count) for true, guessed, count in cells],
    }


def predict_pictures(
    job: Job, path: Path, pictures: Sequence[Path], most: int = 5
) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """The most likely classes of picture files, with their probabilities."""
    from manyhands.data.splits import ImageFiles

    world = World(device=job.cluster.device if job.cluster.device != "auto" else "cpu")
    objects = Objects()
    snapshot = read_any(path)
    splits = open_splits(job, world, objects)
    classes = tuple(snapshot.state.get("classes") or class_names(job, splits, outputs_of(snapshot)))
    pixels = pixels_for(job, splits, objects)
    model = _network(job, pixels, classes, world, objects, snapshot, str(path))
    source = ImageFiles(tuple(map(str, pictures)), torch.zeros(len(pictures), dtype=torch.int64))
    loader = make_loader(
        job.model_copy(update={"data": job.data.model_copy(update={"workers": 0})}), source, pixels, world, train=False
    )
    requests = (torch.tensor([number]) for number in range(len(pictures)))
    with torch.inference_mode():
        for picture, batch in zip(pictures, loader.batches(0, requests), strict=True):
            shares = model(batch.images).float().softmax(1)[0]
            top = shares.topk(min(most, len(classes)))
            yield picture, [(classes[n], float(p)) for p, n in zip(top.values, top.indices, strict=True)]

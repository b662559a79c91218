"""Evaluation of a finished network."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.checkpoint.trained import TrainedNetwork, find_record, parse_record
from manyhands.config.job import Job
from manyhands.core.choices import module_names
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.data.open import resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.splits import Source, by_names
from manyhands.data.transforms import Pixels
from manyhands.parallel.apply import apply_mode, follows_plan, one_process, resolve_mode, takes_mesh
from manyhands.parallel.gradients import autocast
from manyhands.parallel.group.plain import broadcast_plain
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.options import MODES
from manyhands.parallel.plan import Plan, read_plan, shared_plan
from manyhands.train.data_setup import (
    check_labels,
    class_names,
    first_picture,
    make_loader,
    name_outputs,
    open_splits,
    pixels_for,
)
from manyhands.train.evaluate import make_evaluator
from manyhands.train.metrics import Evaluation, make_metrics
from manyhands.train.network import PICTURES, make_model, pixels_of, without_first_weights
from manyhands.train.objects import Objects
from manyhands.train.recover import Resumable, find_state, outputs_of
from manyhands.train.state import load_snapshot, restore
from manyhands.train.trained import job_of_record, need_network, silent


@dataclass(frozen=True)
class Subject:
    """The network and the data of an evaluation."""

    job: Job  # with the network that was trained
    source: Source  # the samples, their labels those of `classes`
    pixels: Pixels  # what pictures become
    classes: tuple[str, ...]  # a name for each output that is known
    num_classes: int  # what the network's builder is given


def evaluate_checkpoint(
    job: Job,
    path: Path | None,
    world: World,
    objects: Objects | None = None,
    *,
    given: Collection[str] = (),
    whole: bool = False,
) -> dict[str, Any]:
    """Evaluates a checkpoint on the data of the job; a collective if there are several processes.

    Network and preprocessing come from the checkpoint if it records them. Without a checkpoint, the network of the job
    is evaluated, with published weights or untrained.

    Args:
        job: names the data.
        path: the checkpoint.
        world: the processes.
        objects: the Python objects of the user.
        given: dotted keys of options that count although the checkpoint says otherwise.
        whole: the data is a plain folder of class folders, all of which is evaluated.

    Returns:
        count, loss, top1, top5, metrics, classes (how many), per_class and confusion (sparse), as plain data.
    """
    objects = objects or Objects()
    plan = _fitting_plan(job, world)
    found = _shared(job, path, world, in_pieces=plan is not None) if path else None
    subject = _subject(job, path, found, world, objects, given, whole=whole)
    job, pixels, classes = subject.job, subject.pixels, subject.classes
    loader = make_loader(job, subject.source, pixels, world, train=False, classes=len(classes))
    network = None
    if takes_mesh(_mode(job, world)):
        network = _hybrid_network(subject, world, objects)
    elif plan:
        model = make_model(job, pixels, subject.num_classes, world, objects, silent())
        network = apply_mode(job.parallel.mode, model, world, ModeRequest(plan=plan, picture=first_picture(loader)))
    if network:
        if found:
            restore(found.snapshot, network, None, where=str(path), source=found.source)
    else:
        model = make_model(job, pixels, subject.num_classes, world, objects, silent())
        if found:
            load_snapshot(found.snapshot, model, str(path))
        network = ParallelNetwork(model)
    metrics = make_metrics(job.train.metrics, objects.metrics, live_only=True)
    evaluator = make_evaluator(loader, len(subject.source), len(classes), job, network, world, metrics)
    network.call.eval()
    try:
        return as_plain(evaluator(autocast(job.train.precision, world.device)), classes)
    finally:
        loader.close()
        network.close()


def _subject(
    job: Job,
    path: Path | None,
    found: Resumable | None,
    world: World,
    objects: Objects,
    given: Collection[str],
    *,
    whole: bool,
) -> Subject:
    record = _shared_record(path, found, world) if path and found else None
    if record is None:
        splits = open_splits(job, world, objects, whole=whole)
        classes = class_names(job, splits, outputs_of(found.snapshot) if found else 0)
        check_labels(splits, len(classes))
        pixels = pixels_for(job, splits, objects)
        plain = without_first_weights(job, pixels.size, objects) if found else job
        return Subject(plain, splits.test, pixels, classes, len(classes))
    if "model.name" in given:
        named = {"name": job.model.name, "arguments": job.model.arguments, "made_in_python": False}
        record = record.model_copy(update=named)
    need_network(record, objects, str(path))
    splits = open_splits(job, world, objects, whole=whole)
    source = by_names(splits.test, splits.classes, record.classes, job.data.name)
    now = DataOptions(**{key: getattr(job.data, key) for key in PICTURES if f"data.{key}" in given})
    pixels = resolve_pixels(now, pixels_of(record.pictures))
    return Subject(job_of_record(job, record), source, pixels, record.classes, record.num_classes)


def _shared_record(path: Path, found: Resumable, world: World) -> TrainedNetwork | None:
    """Rank 0's word on what the network is: other machines needn't have the file."""
    record = find_record(path, found.snapshot.state) if world.is_main else None
    content = broadcast_plain(record.model_dump(mode="json") if record else None, world)
    return parse_record(content, str(path)) if content else None


def _mode(job: Job, world: World) -> str:
    """The job's mode; what one process trained, any number evaluates: each holds the whole network."""
    mode = job.parallel.mode
    return mode if mode in module_names(MODES) and one_process(mode) else resolve_mode(mode, world)


def _fitting_plan(job: Job, world: World) -> Plan | None:
    """The plan to evaluate under: the job's, where there are as many processes as it is for."""
    if world.alone or not follows_plan(_mode(job, world)):
        return None
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else None
    mesh = mesh or (read_plan(Path(job.parallel.plan)).mesh if job.parallel.plan else None)
    return shared_plan(job.parallel, world) if mesh is None or mesh.size == world.size else None


def _shared(job: Job, path: Path, world: World, *, in_pieces: bool) -> Resumable | None:
    """Rank 0's file on every process: other machines needn't have it."""
    named = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": str(path)})})
    return find_state(named, RunFolder(Path()), world, in_pieces=in_pieces)


def _hybrid_network(subject: Subject, world: World, objects: Objects) -> ParallelNetwork:
    """A network that its author has split over the job's mesh; on another number of processes each has all of it."""
    job = subject.job
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else Mesh((("dp", world.size),))
    fits = mesh.size == world.size
    grid = (
        Grid(mesh, world) if fits else Grid(Mesh(tuple((name, 1) for name in mesh.names)), World(device=world.device))
    )
    model = make_model(job, subject.pixels, subject.num_classes, world, objects, silent(), grid)
    network = apply_mode(job.parallel.mode, model, world, ModeRequest(grid=grid))
    return network if fits else ParallelNetwork(model)


def as_plain(found: Evaluation, classes: tuple[str, ...]) -> dict[str, Any]:
    """Returns an evaluation as JSON data."""
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
        "metrics": found.metrics,
        "classes": len(classes),
        "per_class": [
            {"name": name, "count": total, "top1": hits / total}
            for name, total, hits in zip(classes, totals, right, strict=True)
            if total
        ],
        "confusion": [(true, guessed, count) for true, guessed, count in cells],
    }

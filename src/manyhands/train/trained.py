"""The network of a checkpoint: loads it with its preprocessing, predicts, and evaluates it on data."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from manyhands.checkpoint.trained import TrainedNetwork, find_record, note_trained_on, parse_record
from manyhands.config.job import Job
from manyhands.core.choices import module_names
from manyhands.core.devices import require_device
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.data.decode import CorruptImageError, to_mode
from manyhands.data.open import resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.pictures import prepare, read_picture, to_tensor
from manyhands.data.samples import as_picture
from manyhands.data.splits import Source, by_names
from manyhands.data.transforms import Normalise, Pixels
from manyhands.models.interface import main_and_auxiliary
from manyhands.parallel.apply import apply_mode, follows_plan, one_process, resolve_mode, takes_mesh
from manyhands.parallel.gradients import autocast
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
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
from manyhands.train.evaluate import Evaluator
from manyhands.train.journal import Journal
from manyhands.train.metrics import Evaluation, make_metrics
from manyhands.train.network import PICTURES, make_model, mesh_of, pixels_of, read_any, without_first_weights
from manyhands.train.objects import Objects
from manyhands.train.state import Resumable, find_state, outputs_of, restore


@dataclass(frozen=True)
class Subject:
    """A network of a checkpoint, or of a job, and its input."""

    job: Job  # with the network that was trained
    pixels: Pixels  # what pictures become
    classes: tuple[str, ...]  # a name for each output that is known
    num_classes: int  # what the network's builder is given

    def build(
        self,
        world: World,
        objects: Objects,
        found: Resumable | None,
        grid: Grid | None = None,
        request: ModeRequest | None = None,
    ) -> ParallelNetwork:
        """Builds the network and loads its weights; a collective.

        Without a checkpoint (`found`) the network has its initial weights. `grid` is the
        mesh that the network's code takes; without a `request` of a parallel mode each process has the entire network.
        """
        model = make_model(self.job, self.pixels, self.num_classes, world, objects, Journal(NOWHERE, rank=-1), grid)
        network = apply_mode(self.job.parallel.mode, model, world, request) if request else ParallelNetwork(model)
        if found:
            restore(found, network, None)
        return network


def _grid_of_one(names: Collection[str], world: World) -> Grid:
    """Returns a mesh with these axes for a process that has the entire network."""
    return Grid(Mesh(tuple((name, 1) for name in names)), World(device=world.device))


def subject_of(job: Job, record: TrainedNetwork, pixels: Pixels) -> Subject:
    """Returns the network of a record, without initial weights, in place of the job's."""
    plain = {"name": record.name, "arguments": record.arguments, "pretrained": False, "weights": "", "num_classes": 0}
    train = {"precision": "fp64"} if record.double else {}
    sections = {"model": job.model.model_copy(update=plain), "train": job.train.model_copy(update=train)}
    return Subject(job.model_copy(update=sections), pixels, record.classes, record.num_classes)


def need_network(record: TrainedNetwork, objects: Objects, where: str) -> None:
    """Raises UserError if the network can't be created by name and the user passed no network."""
    if record.made_in_python and objects.model is None:
        raise UserError(
            f"the run's network {record.name} was a Python object, and checkpoints hold only weights",
            where,
            (
                "name the network's code: manyhands predict RUN PICTURE --model file.py:object",
                "or manyhands eval RUN DATA file.py:object",
                "or use Python: manyhands.load(RUN, model=NETWORK), manyhands.predict(RUN, PICTURES, model=NETWORK)",
            ),
        )


class Trained(NamedTuple):
    """A trained network, ready for inference in one process.

    Attributes:
        network: the network on its device, in evaluation mode.
        transform: converts a picture to the network's input.
        classes: the class name of each output.
    """

    network: nn.Module
    transform: "Transform"
    classes: tuple[str, ...]


def open_trained(path: Path, *, model: nn.Module | str | None = None, device: str = "cpu") -> Trained:
    """Creates the network of a checkpoint and loads its weights.

    Args:
        path: a checkpoint folder or file.
        model: a network to load the weights into, or its name; required if it can't be created by name.
        device: the torch device.

    Raises:
        UserError: the checkpoint doesn't record its network, or belongs to another network.
    """
    require_device(device)
    snapshot, where = read_any(path), str(path)
    record = find_record(path, snapshot.state)
    if record is None:
        hints = (
            "choose a run folder of manyhands, or a checkpoint in a run folder",
            "for other files, use manyhands eval FILE DATA MODEL",
        )
        raise UserError("the file has no record of its network and data", where, hints)
    if isinstance(model, str):
        record = record.model_copy(update={"name": model, "arguments": {}, "made_in_python": False})
    objects = Objects(model=model if isinstance(model, nn.Module) else None)
    need_network(record, objects, where)
    subject = subject_of(Job(), record, pixels_of(record.pictures))
    world = World(device=device)
    grid = _grid_of_one(record.axes, world) if record.axes else None
    network = subject.build(world, objects, Resumable(snapshot, path), grid).model
    note_trained_on(network, record.pictures, record.classes)
    dtype = torch.float64 if record.double else torch.float32
    return Trained(network.eval(), Transform(subject.pixels, device, dtype), record.classes)


class Transform:
    """Converts a picture (a path, a PIL image, 8-bit pixels or a tensor) to the network's input.

    Args:
        pixels: the preprocessing.
        device: the device of the result.
        dtype: the dtype of the result.
    """

    def __init__(self, pixels: Pixels, device: str, dtype: torch.dtype) -> None:
        self._pixels, self._dtype, self._device = pixels, dtype, torch.device(device)
        # A run on the user's own numbers may have any number of channels, and normalises none of them.
        plain = replace(pixels, channels=1, mean=(0.0,), std=(1.0,)) if pixels.own else pixels
        self._normalise: Callable[[Tensor], Tensor] = Normalise(plain, self._device, dtype)

    def __call__(self, picture: Any) -> Tensor:
        """[C, S, S] of a picture; numbers of the user's own data set in the shape that they have.

        Raises:
            UserError: the picture can't be read, or only the run's custom data set could convert it.
        """
        if isinstance(picture, str | Path):
            self._refuse_own("a picture file")
            return self._normalised(read_picture(str(picture), self._pixels, None))
        image = as_picture(picture)
        if image is not None:
            self._refuse_own("a picture")
            return self._normalised(prepare(to_tensor(to_mode(image, self._pixels.channels)), self._pixels, None))
        if not isinstance(picture, Tensor | numpy.ndarray):
            what = f"a {type(picture).__name__} is neither a picture nor a path"
            raise UserError(what, "", ("pass a path, a PIL image, uint8 pixels, or a tensor like the data set's",))
        if not self._pixels.own:
            what = f"the picture has dtype {str(picture.dtype).removeprefix('torch.')} instead of uint8"
            raise UserError(what, "", ("pass a path, a PIL image, or uint8 [C, H, W]",))
        return torch.as_tensor(picture).to(self._device, self._dtype)

    def _normalised(self, values: Tensor) -> Tensor:
        return self._normalise(values[None].to(self._device))[0]

    def _refuse_own(self, what: str) -> None:
        if self._pixels.own:
            raise UserError(
                f"{what} can't be converted, because the run has a custom data set, which returns tensors",
                "",
                ("pass tensors like those that the data set returns: manyhands.predict(RUN, [dataset[0][0]])",),
            )


Guesses = list[tuple[str, float]]
# Whole blocks are dealt out, so that a picture is computed in the same company at any number of processes.
BLOCK = 32


def guess(trained: Trained, pictures: Sequence[Any], most: int = 5, *, skip: bool = False) -> Iterator[Guesses | str]:
    """Returns the most likely classes of each picture with their probabilities, in the order of the pictures.

    With `skip`, the result for an unreadable picture is a message.

    Raises:
        UserError: a picture can't be read (without `skip`) or doesn't fit the network.
    """
    for start in range(0, len(pictures), BLOCK):
        yield from _block(trained, pictures[start : start + BLOCK], most, skip=skip)


def guess_together(trained: Trained, pictures: Sequence[Any], world: World) -> list[Guesses | str]:
    """Like `guess` with `skip`, divided among the processes of a group; a collective. Returns all results."""
    starts = range(0, len(pictures), BLOCK)
    mine = [
        _block(trained, pictures[start : start + BLOCK], 5, skip=True) for start in starts[world.rank :: world.size]
    ]
    everybody = gather_plain(mine, world)
    blocks = [everybody[number % world.size][number // world.size] for number in range(len(starts))]
    return [
        one if isinstance(one, str) else [(name, share) for name, share in one] for block in blocks for one in block
    ]


def _block(trained: Trained, pictures: Sequence[Any], most: int, *, skip: bool) -> list[Guesses | str]:
    images: list[Tensor] = []
    unreadable: dict[int, str] = {}
    for number, picture in enumerate(pictures):
        try:
            images.append(trained.transform(picture))
        except CorruptImageError as error:
            if not skip:
                raise
            unreadable[number] = error.message
    if not images:
        return list(unreadable.values())
    with torch.inference_mode():
        shares = main_and_auxiliary(trained.network(_stack(images)))[0].float().softmax(1)
    names = name_outputs(trained.classes, shares.shape[1])
    top = shares.topk(min(most, shares.shape[1]), dim=1)
    found = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    guesses = ([(names[number], share) for share, number in zip(*both, strict=True)] for both in found)
    return [unreadable.get(number) or next(guesses) for number in range(len(pictures))]


def _stack(images: list[Tensor]) -> Tensor:
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise UserError(f"the samples have different shapes: {shown}", "", ("pass samples of one shape per call",))
    return torch.stack(images)


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
    found = find_state(str(path), NOWHERE, world, in_pieces=plan is not None) if path else None
    subject, source = _subject(job, path, found, world, objects, given, whole=whole)
    job, classes = subject.job, subject.classes
    loader = make_loader(job, source, subject.pixels, world, train=False, classes=len(classes))
    grid = request = None
    if takes_mesh(_mode(job, world)):
        mesh = mesh_of(job, world)
        fits = mesh.size == world.size
        grid = Grid(mesh, world) if fits else _grid_of_one(mesh.names, world)
        request = ModeRequest(grid=grid) if fits else None
    elif plan:
        request = ModeRequest(plan=plan, picture=first_picture(loader))
    network = subject.build(world, objects, found, grid, request)
    metrics = make_metrics(job.train.metrics, objects.metrics, live_only=True)
    try:
        evaluator = Evaluator(loader, len(source), len(classes), job, world, network, metrics)
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
) -> tuple[Subject, Source]:
    """Returns the network to evaluate and the samples, whose labels are those of its classes."""
    record = None
    if path and found:  # rank 0's record, because other machines needn't have the file
        mine = find_record(path, found.snapshot.state) if world.is_main else None
        content = broadcast_plain(mine.model_dump(mode="json") if mine else None, world)
        record = parse_record(content, str(path)) if content else None
    if record is None:
        splits = open_splits(job, world, objects, whole=whole)
        classes = class_names(job, splits, outputs_of(found.snapshot) if found else 0)
        check_labels(splits, len(classes))
        pixels = pixels_for(job, splits, objects)
        plain = without_first_weights(job, pixels.size, objects) if found else job
        return Subject(plain, pixels, classes, len(classes)), splits.test
    if "model.name" in given:
        named = {"name": job.model.name, "arguments": job.model.arguments, "made_in_python": False}
        record = record.model_copy(update=named)
    need_network(record, objects, str(path))
    splits = open_splits(job, world, objects, whole=whole)
    source = by_names(splits.test, splits.classes, record.classes, job.data.name)
    now = DataOptions(**{key: getattr(job.data, key) for key in PICTURES if f"data.{key}" in given})
    return subject_of(job, record, resolve_pixels(now, pixels_of(record.pictures))), source


def _mode(job: Job, world: World) -> str:
    """The job's mode; what one process trained, any number evaluates: each holds the whole network."""
    mode = job.parallel.mode
    return mode if mode in module_names(MODES) and one_process(mode) else resolve_mode(mode, world)


def _fitting_plan(job: Job, world: World) -> Plan | None:
    """Returns the job's plan if it is for this number of processes, else None."""
    if world.alone or not follows_plan(_mode(job, world)):
        return None
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else None
    mesh = mesh or (read_plan(Path(job.parallel.plan)).mesh if job.parallel.plan else None)
    return shared_plan(job.parallel, world) if mesh is None or mesh.size == world.size else None


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

"""The network of a checkpoint: loads it with its preprocessing, predicts, and evaluates it on data."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from manyhands.checkpoint.trained import TrainedNetwork, find_record, parse_record, record_trained_on
from manyhands.config.job import Job
from manyhands.core.choices import module_names
from manyhands.core.devices import require_device
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.data.decode import CorruptImageError, read_content, to_mode
from manyhands.data.open import resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.pictures import prepare_pixels, read_picture, to_tensor
from manyhands.data.samples import to_pil_image
from manyhands.data.splits import Source, map_labels_by_name
from manyhands.data.transforms import Normalize, Pixels
from manyhands.models.interface import main_and_auxiliary
from manyhands.parallel.apply import apply_mode, follows_plan, one_process_label, resolve_mode, takes_mesh
from manyhands.parallel.gradients import autocast
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.options import MODES
from manyhands.parallel.plan import Plan, broadcast_plan, read_plan
from manyhands.train import data_setup
from manyhands.train.evaluate import Evaluator
from manyhands.train.journal import Journal
from manyhands.train.loss import Evaluation, make_metrics
from manyhands.train.objects import Objects
from manyhands.train.parts import PICTURES, job_mesh, make_model, pixels_of, without_initial_weights
from manyhands.train.state import Resumable, find_resumable, foreign_outputs, read_snapshot, restore_state


@dataclass(frozen=True)
class NetworkSpec:
    """Describes the network of a checkpoint or a job, and the network's input. `build` creates the network."""

    job: Job  # with the network that was trained
    pixels: Pixels
    classes: tuple[str, ...]  # a name for each known output
    num_classes: int  # the argument of the network's builder

    def build(
        self, world: World, objects: Objects, found: Resumable | None, grid: Grid | None, request: ModeRequest | None
    ) -> ParallelNetwork:
        """Builds the network (unsharded if `request` is None) and loads the weights of `found`. A collective."""
        model = make_model(self.job, self.pixels, self.num_classes, world, objects, Journal(NOWHERE, rank=-1), grid)
        network = apply_mode(self.job.parallel.mode, model, world, request) if request else ParallelNetwork(model)
        if found:
            restore_state(found, network, None)
        return network


def _single_process_grid(names: Collection[str], world: World) -> Grid:
    """Returns a mesh of one process, which has the axes `names`, for an unsharded network."""
    return Grid(Mesh(tuple((name, 1) for name in names)), World(device=world.device))


def network_spec(job: Job, record: TrainedNetwork, pixels: Pixels) -> NetworkSpec:
    """Returns the NetworkSpec of a checkpoint's network, without initial weights. Other options come from `job`."""
    plain = {"name": record.name, "arguments": record.arguments, "pretrained": False, "weights": "", "num_classes": 0}
    train = {"precision": "fp64"} if record.double else {}
    sections = {"model": job.model.model_copy(update=plain), "train": job.train.model_copy(update=train)}
    return NetworkSpec(job.model_copy(update=sections), pixels, record.classes, record.num_classes)


def require_network(record: TrainedNetwork, objects: Objects, where: str) -> None:
    """Raises UserError if the network can't be created by name and the user passed no network."""
    if record.made_in_python and objects.model is None:
        hints = (
            "name the network's code: manyhands predict RUN PICTURE --model file.py:object",
            "or manyhands eval RUN DATA file.py:object",
            "or use Python: manyhands.load(RUN, model=NETWORK), manyhands.predict(RUN, PICTURES, model=NETWORK)",
        )
        what = f"the run's network {record.name} was a Python object, and checkpoints hold only weights"
        raise UserError(what, where, hints)


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
    """Creates the network of a checkpoint folder or file, on a device, and loads its weights.

    `model` is a network to load the weights into, or its name. It is required if the run's has no name. Raises
    UserError if the checkpoint doesn't record its network, or belongs to another network.
    """
    require_device(device)
    snapshot, where = read_snapshot(path), str(path)
    record = find_record(path, snapshot.state)
    if record is None:
        hint = "choose a run folder of manyhands, or a checkpoint in a run folder"
        hints = (hint, "for other files, use manyhands eval FILE DATA MODEL")
        raise UserError("the file has no record of its network and data", where, hints)
    if isinstance(model, str):
        record = record.model_copy(update={"name": model, "arguments": {}, "made_in_python": False})
    objects = Objects(model=model if isinstance(model, nn.Module) else None)
    require_network(record, objects, where)
    spec = network_spec(Job(), record, pixels_of(record.pictures))
    world = World(device=device)
    grid = _single_process_grid(record.axes, world) if record.axes else None
    network = spec.build(world, objects, Resumable(snapshot, path), grid, None).model
    record_trained_on(network, record.pictures, record.classes)
    dtype = torch.float64 if record.double else torch.float32
    return Trained(network.eval(), Transform(spec.pixels, device, dtype), record.classes)


class Transform:
    """Converts a picture (a path, a PIL image, 8-bit pixels or a tensor) to the network's input."""

    def __init__(self, pixels: Pixels, device: str, dtype: torch.dtype) -> None:
        self._pixels, self._dtype, self._device = pixels, dtype, torch.device(device)
        # A run on a custom data set may have any number of channels, which aren't normalized.
        plain = replace(pixels, channels=1, mean=(0.0,), std=(1.0,)) if pixels.own else pixels
        self._normalize: Callable[[Tensor], Tensor] = Normalize(plain, self._device, dtype)

    def __call__(self, picture: Any) -> Tensor:
        """Returns the input [C, S, S] for a picture. Tensors keep their shape. Raises UserError for other objects."""
        named, image = isinstance(picture, str | Path), to_pil_image(picture)
        if named or image is not None:
            if self._pixels.own:
                given = "a picture file" if named else "a picture"
                what = f"{given} can't be converted, because the run has a custom data set, which returns tensors"
                hint = "pass tensors like those that the data set returns: manyhands.predict(RUN, [dataset[0][0]])"
                raise UserError(what, "", (hint,))
            if image is None:
                values = read_picture(str(picture), self._pixels, None, read_content(str(picture)))
            else:
                values = prepare_pixels(to_tensor(to_mode(image, self._pixels.channels)), self._pixels, None)
            return self._normalize(values[None].to(self._device))[0]
        if not isinstance(picture, Tensor | numpy.ndarray):
            what = f"a {type(picture).__name__} is neither a picture nor a path"
            raise UserError(what, "", ("pass a path, a PIL image, uint8 pixels, or a tensor like the data set's",))
        if not self._pixels.own:
            what = f"the picture has dtype {str(picture.dtype).removeprefix('torch.')} instead of uint8"
            raise UserError(what, "", ("pass a path, a PIL image, or uint8 [C, H, W]",))
        return torch.as_tensor(picture).to(self._device, self._dtype)


Guesses = list[tuple[str, float]]  # up to five classes and their probabilities, best first
BLOCK = 32  # pictures computed together, so that results are the same at any number of processes


def guess(trained: Trained, pictures: Sequence[Any], *, skip: bool = False) -> Iterator[Guesses | str]:
    """Yields each picture's list of (class, probability), best first, or with `skip` a message if unreadable."""
    for start in range(0, len(pictures), BLOCK):
        yield from _guess_block(trained, pictures[start : start + BLOCK], skip=skip)


def guess_together(trained: Trained, pictures: Sequence[Any], world: World) -> list[Guesses | str]:
    """Divides pictures among processes, and returns each picture's result of `guess`. A collective."""
    starts = range(0, len(pictures), BLOCK)
    mine = starts[world.rank :: world.size]
    everybody = gather_plain([_guess_block(trained, pictures[at : at + BLOCK], skip=True) for at in mine], world)
    blocks = [everybody[number % world.size][number // world.size] for number in range(len(starts))]
    return [one if isinstance(one, str) else list(map(tuple, one)) for block in blocks for one in block]


def _guess_block(trained: Trained, pictures: Sequence[Any], *, skip: bool) -> list[Guesses | str]:
    images, unreadable = list[Tensor](), dict[int, str]()
    for number, picture in enumerate(pictures):
        try:
            images.append(trained.transform(picture))
        except CorruptImageError as error:
            if not skip:
                raise
            unreadable[number] = error.message
    if not images:
        return list(unreadable.values())
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        what = f"the samples have different shapes: {list(shapes[0])} and {list(shapes[1])}"
        raise UserError(what, "", ("pass samples of one shape per call",))
    with torch.inference_mode():
        shares = main_and_auxiliary(trained.network(torch.stack(images)))[0].float().softmax(1)
    names = data_setup.name_outputs(trained.classes, shares.shape[1])
    top = shares.topk(min(5, shares.shape[1]), dim=1)
    found = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    guesses = ([(names[number], share) for share, number in zip(*both, strict=True)] for both in found)
    return [unreadable.get(number) or next(guesses) for number in range(len(pictures))]


def evaluate_checkpoint(
    job: Job,
    path: Path | None,
    world: World,
    objects: Objects,
    *,
    given: Collection[str],
    whole: bool,
) -> dict[str, Any]:
    """Evaluates a checkpoint (or the job's initial network if `path` is None) on the job's data. A collective.

    Returns the evaluation as a dict. Network and preprocessing come from the checkpoint if it records them, except for
    the options whose keys are in `given`. With `whole`, the data is a plain folder of class folders, used completely.
    """
    mode, plan = _mode_and_plan(job, world)
    found = find_resumable(str(path), NOWHERE, world, in_pieces=plan is not None) if path else None
    spec, source = _network_and_samples(job, found, world, objects, given, whole=whole)
    job, classes = spec.job, spec.classes
    loader = data_setup.make_loader(job, source, spec.pixels, world, train=False, classes=len(classes))
    grid = request = None
    if takes_mesh(mode):
        mesh = job_mesh(job, world)
        fits = mesh.size == world.size
        grid = Grid(mesh, world) if fits else _single_process_grid(mesh.names, world)
        request = ModeRequest(grid=grid) if fits else None
    elif plan:
        request = ModeRequest(plan=plan, picture=data_setup.first_picture(loader))
    network = spec.build(world, objects, found, grid, request)
    metrics = make_metrics(job.train.metrics, objects.metrics, skip_missing=True)
    try:
        evaluator = Evaluator(loader, len(source), len(classes), job, world, network, metrics)
        return evaluation_as_plain(evaluator(autocast(job.train.precision, world.device)), classes)
    finally:
        loader.close()
        network.close()


def _network_and_samples(
    job: Job, found: Resumable | None, world: World, objects: Objects, given: Collection[str], *, whole: bool
) -> tuple[NetworkSpec, Source]:
    """Returns the network to evaluate, and the samples with labels in the order of the network's classes."""
    record = None
    if found:  # rank 0's record, because other machines may lack the file
        mine = find_record(found.path, found.snapshot.state) if world.is_main else None
        content = broadcast_plain(mine.model_dump(mode="json") if mine else None, world)
        record = parse_record(content, str(found.path)) if content else None
    if record and "model.name" in given:
        named = {"name": job.model.name, "arguments": job.model.arguments, "made_in_python": False}
        record = record.model_copy(update=named)
    if record:
        require_network(record, objects, str(found and found.path))
    splits = data_setup.open_splits(job, world, objects, whole=whole)
    if record is None:
        classes = data_setup.class_names(job, splits, foreign_outputs(found.snapshot) if found else 0)
        data_setup.check_labels(splits, len(classes))
        pixels = data_setup.pixels_for(job, splits, objects)
        plain = without_initial_weights(job, pixels.size, objects) if found else job
        return NetworkSpec(plain, pixels, classes, len(classes)), splits.test
    source = map_labels_by_name(splits.test, splits.classes, record.classes, job.data.name)
    now = DataOptions(**{key: getattr(job.data, key) for key in PICTURES if f"data.{key}" in given})
    return network_spec(job, record, resolve_pixels(now, pixels_of(record.pictures))), source


def _mode_and_plan(job: Job, world: World) -> tuple[str, Plan | None]:
    """Returns the parallel mode of an evaluation, and the job's plan or None if it is for another world size."""
    mode = job.parallel.mode
    if mode not in module_names(MODES) or not one_process_label(mode):  # a mode of one process suits any number here
        mode = resolve_mode(mode, world)
    if world.alone or not follows_plan(mode):
        return mode, None
    mesh = parse_mesh(job.parallel.mesh) if job.parallel.mesh else None
    mesh = mesh or (read_plan(Path(job.parallel.plan)).mesh if job.parallel.plan else None)
    return mode, broadcast_plan(job.parallel, world) if mesh is None or mesh.size == world.size else None


def evaluation_as_plain(found: Evaluation, classes: tuple[str, ...]) -> dict[str, Any]:
    classes = data_setup.name_outputs(classes, found.classes)
    totals, right = [0] * len(classes), [0] * len(classes)
    cells: list[list[int]] = found.cells.tolist()
    for true, guessed, count in cells:
        totals[true] += count
        right[true] += count if true == guessed else 0
    rows = zip(classes, totals, right, strict=True)
    per_class = [{"name": name, "count": total, "top1": hits / total} for name, total, hits in rows if total]
    figures = {name: getattr(found, name) for name in ("count", "loss", "top1", "top5", "metrics")}
    return {**figures, "classes": len(classes), "per_class": per_class, "confusion": list(map(tuple, cells))}

"""Loads the network of a checkpoint for inference, with its preprocessing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from manyhands.checkpoint.trained import TrainedNetwork, find_record, note_trained_on
from manyhands.config.job import Job
from manyhands.core.devices import require_device
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.data.decode import CorruptImageError, to_mode
from manyhands.data.pictures import prepare, read_picture, to_tensor
from manyhands.data.samples import as_picture
from manyhands.data.transforms import Normalise, Pixels
from manyhands.models.outputs import main_and_auxiliary
from manyhands.parallel.grid import Grid
from manyhands.parallel.plain import gather_plain
from manyhands.train.data_setup import name_outputs
from manyhands.train.journal import Journal
from manyhands.train.network import make_model, pixels_of, read_any
from manyhands.train.objects import Objects
from manyhands.train.state import load_snapshot


def job_of_record(job: Job, record: TrainedNetwork) -> Job:
    """Returns the job with the trained network, without initial weights."""
    plain = {"name": record.name, "arguments": record.arguments, "pretrained": False, "weights": "", "num_classes": 0}
    train = {"precision": "fp64"} if record.double else {}
    return job.model_copy(
        update={"model": job.model.model_copy(update=plain), "train": job.train.model_copy(update=train)}
    )


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
    record = with_model(record, model) if isinstance(model, str) else record
    objects = Objects(model=model if isinstance(model, nn.Module) else None)
    need_network(record, objects, where)
    world, pixels = World(device=device), pixels_of(record.pictures)
    grid = Grid(Mesh(tuple((name, 1) for name in record.axes)), world) if record.axes else None
    network = make_model(job_of_record(Job(), record), pixels, record.num_classes, world, objects, silent(), grid)
    load_snapshot(snapshot, network, where)
    note_trained_on(network, record.pictures, record.classes)
    dtype = torch.float64 if record.double else torch.float32
    return Trained(network.eval(), Transform(pixels, device, dtype), record.classes)


def with_model(record: TrainedNetwork, name: str) -> TrainedNetwork:
    """Returns the record with the network that the user names."""
    return record.model_copy(update={"name": name, "arguments": {}, "made_in_python": False})


def silent() -> Journal:
    """Returns a journal that records nothing."""
    return Journal(RunFolder(Path()), rank=-1)


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
            raise UserError(what, "", ("pass a path, a PIL image, 8-bit pixels, or a tensor as the data set returns",))
        if not self._pixels.own:
            what = (
                f"the picture has the type {str(picture.dtype).removeprefix('torch.')} instead of 8-bit pixels (uint8)"
            )
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

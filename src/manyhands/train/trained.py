"""From a checkpoint to a network that can be used: made again as its record says, with the pictures that it wants."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from manyhands.checkpoint.trained import Pictures, TrainedNetwork, find_record, note_trained_on
from manyhands.config.job import Job
from manyhands.core.devices import require_device
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.run_folder import RunFolder
from manyhands.core.user_code import code_digests
from manyhands.core.world import World
from manyhands.data.decode import to_mode
from manyhands.data.on_demand import as_picture
from manyhands.data.pictures import prepare, read_picture, to_tensor
from manyhands.data.transforms import Normalise, Pixels
from manyhands.models.build import resolve_model
from manyhands.parallel.apply import takes_mesh
from manyhands.parallel.grid import Grid
from manyhands.train.data_setup import DataSetup
from manyhands.train.journal import Journal
from manyhands.train.network import make_model, read_any
from manyhands.train.objects import Objects
from manyhands.train.same_data import digest_data, split_names
from manyhands.train.state import load_snapshot

# Options that say what pictures become.
PICTURES = ("image_size", "channels", "mean", "std")


def describe_trained(
    job: Job, samples: DataSetup, classes: tuple[str, ...], mode: str, objects: Objects, size: int
) -> TrainedNetwork:
    """What the weights of this run will not say.

    Args:
        job: that it is trained by.
        samples: that it learns from.
        classes: a name for each output.
        mode: the parallel mode in force.
        objects: what the user brought instead of names.
        size: processes.
    """
    pixels = samples.pixels
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
    mesh = (parse_mesh(job.parallel.mesh) if job.parallel.mesh else Mesh((("dp", size),))) if takes_mesh(mode) else None
    return TrainedNetwork(
        name=model.name,
        made_in_python=objects.model is not None,
        arguments=model.arguments,
        num_classes=len(samples.classes),
        axes=tuple(mesh.names) if mesh else (),
        double=job.train.precision == "fp64",
        precision=job.train.precision,
        channels_last=job.train.channels_last is True,
        pictures=pictures,
        classes=classes,
        code=code_digests((model.name, job.data.name, job.data.held_out, *job.train.custom_code)),
        digests={**objects.digests, **digest_data(samples.splits)},
        samples={word: len(source) for word, source in split_names(samples.splits)},
    )


def pixels_of(about: Pictures) -> Pixels:
    """What the pictures of an evaluation become."""
    return Pixels(about.size, about.channels, about.mean, about.std, "none", resize=about.resize, own=about.own)


def job_of_record(job: Job, record: TrainedNetwork) -> Job:
    """The job with the network that was trained, without what its weights began with."""
    plain = {"name": record.name, "arguments": record.arguments, "pretrained": False, "weights": "", "num_classes": 0}
    train = {"precision": "fp64"} if record.double else {}
    return job.model_copy(
        update={"model": job.model.model_copy(update=plain), "train": job.train.model_copy(update=train)}
    )


def need_network(record: TrainedNetwork, objects: Objects, where: str) -> None:
    """Raises UserError where no name makes the network again and the user hasn't brought one."""
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
    """Makes the network of a checkpoint again and gives it its weights.

    Args:
        path: a checkpoint folder or file.
        model: the network, for one that no name makes again, or the name of another; it is given the weights.
        device: torch's name of where to compute.

    Raises:
        UserError: the checkpoint doesn't say what it is of, or is of another network.
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
    """The record of a network that the user names otherwise."""
    return record.model_copy(update={"name": name, "arguments": {}, "made_in_python": False})


def silent() -> Journal:
    """A journal that nobody reads."""
    return Journal(RunFolder(Path()), rank=-1)


class Transform:
    """A picture as the network wants it: a file's path, a PIL image, 8-bit pixels, or the numbers themselves.

    Args:
        pixels: what pictures become.
        device: where the result is to lie.
        dtype: of the result.
    """

    def __init__(self, pixels: Pixels, device: str, dtype: torch.dtype) -> None:
        self._pixels, self._dtype, self._device = pixels, dtype, torch.device(device)
        # A run on the user's own numbers may have any number of channels, and normalises none of them.
        plain = replace(pixels, channels=1, mean=(0.0,), std=(1.0,)) if pixels.own else pixels
        self._normalise: Callable[[Tensor], Tensor] = Normalise(plain, self._device, dtype)

    def __call__(self, picture: Any) -> Tensor:
        """[C, S, S] of a picture; numbers of the user's own data set in the shape that they have.

        Raises:
            UserError: it can't be read, or the run's own data set made its samples in a way that isn't known here.
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
                f"{what} can't be converted, because the run's custom data set made its own tensors",
                "",
                ("pass tensors like those that the data set returns: manyhands.predict(RUN, [dataset[0][0]])",),
            )

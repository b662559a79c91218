"""Samples that are made when they are asked for: pictures in files, and the user's own data set.

The objects here travel to worker processes. A request is (epoch, indices); the answer is a part (images, labels),
or the error, which the asking process raises: an exception that passes through torch's queues loses its fields.
"""

import math
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from manyhands.core.errors import ManyhandsError, RunError, UserError, shortened
from manyhands.core.seeds import derive
from manyhands.core.user_code import users_line, users_traceback
from manyhands.data.decode import CorruptImageError, to_mode
from manyhands.data.pictures import prepare, read_picture, to_tensor
from manyhands.data.random import epoch_rng
from manyhands.data.splits import ImageFiles, UserSamples, check_labels
from manyhands.data.transforms import Pixels

_PAIR = ("give (x, y): x as a tensor or a PIL image, y as a whole number",)
_TARGET = ("give y as numbers or tensors of one shape",)
Request = tuple[int, list[int]]
# Images, labels, and the pictures that couldn't be read and were replaced.
Answer = tuple[Tensor, Tensor, list[str]]
# Values of a tensor that an error shows.
_MOST_SHOWN = 4
# So many others are tried in the place of a picture.
_TRIES = 100


class FileSamples:
    """Decodes, crops and mirrors pictures in files; `replaces` those for training that can't be read by others."""

    def __init__(self, source: ImageFiles, pixels: Pixels, *, train: bool, seed: int, replaces: bool = False) -> None:
        self._source, self._pixels, self._train, self._seed = source, pixels, train, seed
        self._replaces = replaces and train

    def __getitems__(self, request: Request) -> Answer | ManyhandsError:
        """Images uint8 [n, C, S, S] and labels int64 [n], or the error."""
        epoch, samples = request
        try:
            images = _batch_memory((len(samples), self._pixels.channels, self._pixels.size, self._pixels.size))
            shown, replaced = [*samples], list[str]()
            for place, sample in enumerate(samples):
                try:
                    self._one(epoch, sample, images[place])
                except CorruptImageError:
                    if not self._replaces:
                        raise
                    shown[place] = self._other(epoch, sample, images[place])
                    replaced.append(self._source.paths[sample])
            return images, self._source.labels[shown], replaced
        except ManyhandsError as error:
            return error

    def _one(self, epoch: int, sample: int, out: Tensor) -> None:
        draws = epoch_rng(self._seed, epoch, sample) if self._train else None
        read_picture(self._source.paths[sample], self._pixels, draws, self._source.content(sample), out)

    def _other(self, epoch: int, sample: int, out: Tensor) -> int:
        """What takes the place that a sample has in an epoch: the same on every process."""
        for number in range(_TRIES):
            other = derive(self._seed, "in its place", epoch, sample, number) % len(self._source)
            with suppress(CorruptImageError):
                self._one(epoch, other, out)
                return other
        self._one(epoch, sample, out)  # raises
        return sample


def _batch_memory(shape: tuple[int, ...]) -> Tensor:
    """Uint8 of any content; in a worker process where the asking one sees it too, so that it isn't copied there."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class CustomSamples:
    """Reads the user's data set, with every generator that it may use seeded for each sample."""

    def __init__(self, source: UserSamples, pixels: Pixels, *, train: bool, seed: int, classes: int = 0) -> None:
        self._source, self._pixels, self._train, self._seed = source, pixels, train, seed
        self._classes = classes
        # Plain tensors hold no chance and need no loop.
        plain = type(source.dataset) is TensorDataset and source.numbers is None
        self._tensors = source.dataset.tensors if plain else None

    @property
    def cheap(self) -> bool:
        """True where a worker process would cost more than it saves."""
        return self._tensors is not None

    def __getitems__(self, request: Request) -> Answer | ManyhandsError:
        """Images [n, …] (uint8 pictures, or the user's own type) and labels int64 [n], or the error."""
        epoch, samples = request
        try:
            if self._tensors is not None and self._tensors[0].is_floating_point():
                images, labels = (tensor[samples] for tensor in self._tensors[:2])
                return images, labels if self._source.targets else labels.to(torch.int64).reshape(-1), []
            with restored_generators():
                pairs = [self._one(epoch, sample) for sample in samples]
            images = _stack([image for image, _ in pairs], samples)
            if self._source.targets:
                return images, as_targets([target for _, target in pairs]), []
            labels = torch.tensor([label for _, label in pairs])
            # Labels that the data set knows are checked when it is opened.
            return images, check_labels(labels, self._classes, "the data set", samples) if self._classes else labels, []
        except ManyhandsError as error:
            return _with_excerpt(error)

    def _one(self, epoch: int, sample: int) -> tuple[Tensor, Any]:
        seed_generators(derive(self._seed, "sample", epoch, sample))
        image, label = read_own(self._source, sample)
        draws = epoch_rng(self._seed, epoch, sample) if self._train else None
        picture = as_picture(image)
        if picture is not None:
            return prepare(to_tensor(to_mode(picture, self._pixels.channels)), self._pixels, draws), label
        if str(getattr(image, "dtype", "")).endswith("uint8"):
            what = f"sample {sample:,} has 8-bit pixels of shape {list(image.shape)}"
            raise UserError(what, "the data set", ("give pictures as [H, W], [1 or 3, H, W] or an array [H, W, 3]",))
        if isinstance(image, Tensor | numpy.ndarray):
            return torch.as_tensor(image), label
        what = f"sample {sample:,} is a {type(image).__name__}, not a tensor, an array or a picture"
        raise UserError(what, "the data set", _PAIR)


def read_own(source: UserSamples, sample: int) -> tuple[Any, Any]:
    """Reads (x, y) of the user's own data set; y becomes an int unless it is a target.

    Raises:
        RunError: the data set raised something.
        UserError: the sample isn't a pair, or y is no whole number.
    """
    try:
        content = source.dataset[sample]
    except (ManyhandsError, MemoryError):
        raise
    except Exception as error:
        what = f"the data set raised {type(error).__name__} for sample {sample:,}: {error}"
        raise RunError(what, users_line(error)) from error
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise UserError(f"sample {sample:,} is a {type(content).__name__}, not a pair (x, y)", "the data set", _PAIR)
    image, label = content
    if source.targets:
        return image, label
    number = whole_number(label)
    if number is None:
        swapped = whole_number(image) is not None and getattr(label, "ndim", 0)
        hints = ("return (x, y): the label comes second",) if swapped else _PAIR
        shown = _shown(label)
        raise UserError(f"the label of sample {sample:,} is {shown}, not a whole number", "the data set", hints)
    if source.numbers is None:
        return image, number
    if not 0 <= number < len(source.numbers):
        what = f"the label of sample {sample:,} is {number}, but the data set names {len(source.numbers)} classes"
        raise UserError(what, "the data set", (f"labels are whole numbers from 0 to {len(source.numbers) - 1}",))
    return image, source.numbers[number]


def _shown(label: Any) -> str:
    """A label in a few words: its value, or the shape and type of a larger tensor or array."""
    if isinstance(label, Tensor | numpy.ndarray) and math.prod(label.shape) > _MOST_SHOWN:
        return f"of shape {list(label.shape)} and type {str(label.dtype).removeprefix('torch.')}"
    return shortened(repr(label))


def whole_number(label: Any) -> int | None:
    """A label as an int, or None if it isn't one whole number."""
    if isinstance(label, Tensor | numpy.ndarray | numpy.generic) and all(size == 1 for size in label.shape):
        label = label.item()
    return None if isinstance(label, bool) or not isinstance(label, int) else label


def as_targets(found: list[Any]) -> Tensor:
    """The y of several samples as one tensor, of the type that torch's own loader gives it."""
    try:
        targets: Any = default_collate(found)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"several samples' y don't form a tensor: {error}", "the data set", _TARGET) from error
    if not isinstance(targets, Tensor):
        raise UserError(f"the target y is a {type(found[0]).__name__}", "the data set", _TARGET)
    return targets


def _with_excerpt(error: ManyhandsError) -> ManyhandsError:
    """An error on its way from a worker process, where its cause stays: with what of that is the user's own."""
    if error.__cause__ is not None:
        cause = error.__cause__
        error.add_note(users_traceback(cause) or "".join(traceback.format_exception(cause)).rstrip())
    return error


def as_picture(image: Any) -> Image.Image | None:
    """A PIL image, or 8-bit pixels [H, W], [1 or 3, H, W] (tensor), [H, W, 1 or 3] (array) as one; else None."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim in (2, 3):
        image = (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    if not isinstance(image, numpy.ndarray) or image.dtype != numpy.uint8:
        return None
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    return Image.fromarray(image) if image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3) else None


def seed_generators(seed: int) -> None:
    """Seeds torch's CPU generator, random's and numpy's; touches no accelerator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Puts the three generators back afterwards, so that reading data here never changes a dropout."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def _stack(images: list[Tensor], samples: list[int]) -> Tensor:
    for image, sample in zip(images, samples, strict=True):
        if image.shape != images[0].shape or image.dtype != images[0].dtype:
            first, other = (f"{list(x.shape)} {x.dtype}" for x in (images[0], image))
            what = f"sample {sample:,} is {other}, but sample {samples[0]:,} is {first}"
            raise UserError(what, "the data set", ("give every x the same shape and type",))
    return torch.stack(images)

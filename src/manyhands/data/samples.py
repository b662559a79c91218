"""Reads samples on request, from picture files and the user's data sets.

Runs in worker processes, which return errors as answers, because torch drops the fields of raised exceptions.
"""

import math
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, default_collate, get_worker_info

from manyhands.core.errors import ManyhandsError, RunError, UserError, shortened
from manyhands.core.seeds import derive_seed
from manyhands.core.user_code import user_line, user_traceback
from manyhands.data import splits
from manyhands.data.decode import CorruptImageError, is_grey, to_mode
from manyhands.data.options import DataOptions
from manyhands.data.pictures import prepare_pixels, read_picture, to_tensor
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source, Splits, UserSamples, check_labels, describe, take
from manyhands.data.transforms import Pixels, imagenet_pixels, measure_pixels, sample_rng, spread

_PAIR = ("give (x, y): x as a tensor or a PIL image, y as a whole number",)
_TARGET = ("give y as numbers or tensors of one shape",)
Request = tuple[int, list[int]]  # epoch and sample indices
Answer = tuple[Tensor, Tensor, list[str]]  # images, labels, and paths of replaced unreadable pictures
_MOST_SHOWN = 4  # values of a tensor in an error message
_TRIES = 100  # attempts to replace a picture
_PROBES = 8
_SMALL = 64


class FileSamples:
    """Decodes, crops and mirrors picture files. With `replaces`, replaces unreadable training pictures by others."""

    def __init__(self, source: ImageFiles, pixels: Pixels, *, train: bool, seed: int, replaces: bool = False) -> None:
        self._source, self._pixels, self._train, self._seed = source, pixels, train, seed
        self._replaces = replaces and train

    def __getitems__(self, request: Request) -> Answer | ManyhandsError:
        """Returns (images uint8 [n, C, S, S], labels int64 [n], paths of replaced pictures), or an error object."""
        epoch, samples = request
        try:
            shape = (len(samples), self._pixels.channels, self._pixels.size, self._pixels.size)
            images = torch.empty(0, dtype=torch.uint8)
            if get_worker_info() is not None:  # in memory shared with the training process, to avoid a copy
                images.set_(torch.UntypedStorage._new_shared(math.prod(shape)))
            images = images.resize_(shape)
            shown, replaced = [*samples], list[str]()
            for place, sample in enumerate(samples):
                try:
                    self._read_sample(epoch, sample, images[place])
                except CorruptImageError:
                    if not self._replaces:
                        raise
                    shown[place] = self._replace(epoch, sample, images[place])
                    replaced.append(self._source.paths[sample])
            return images, self._source.labels[shown], replaced
        except ManyhandsError as error:
            return error

    def _read_sample(self, epoch: int, sample: int, out: Tensor) -> None:
        rng = sample_rng(self._seed, epoch, sample) if self._train else None
        read_picture(self._source.paths[sample], self._pixels, rng, self._source.paths.read(sample), out)

    def _replace(self, epoch: int, sample: int, out: Tensor) -> int:
        """Reads another picture, the same on every process, in place of `sample`. Returns the other's index."""
        for number in range(_TRIES):
            other = derive_seed(self._seed, "in its place", epoch, sample, number) % len(self._source)
            with suppress(CorruptImageError):
                self._read_sample(epoch, other, out)
                return other
        self._read_sample(epoch, sample, out)  # raises
        return sample


class CustomSamples:
    """Reads the user's data set. Seeds the generators of torch, Python and NumPy before each sample."""

    def __init__(self, source: UserSamples, pixels: Pixels, *, train: bool, seed: int, classes: int = 0) -> None:
        self._source, self._pixels, self._train, self._seed = source, pixels, train, seed
        self._classes = classes
        # Plain tensors need no seeds and no loop, and a worker process would cost more than it saves.
        plain = type(source.dataset) is TensorDataset and source.numbers is None
        self.tensors = source.dataset.tensors if plain else None

    def __getitems__(self, request: Request) -> Answer | ManyhandsError:
        """Returns (images [n, …] of uint8 or the user's type, labels int64 [n] or targets, []), or an error object."""
        epoch, samples = request
        try:
            if self.tensors is not None and self.tensors[0].is_floating_point():
                images, labels = (tensor[samples] for tensor in self.tensors[:2])
                return images, labels if self._source.targets else labels.to(torch.int64).reshape(-1), []
            with restored_generators():
                pairs = [self._read_sample(epoch, sample) for sample in samples]
            images = _stack_images([image for image, _ in pairs], samples)
            if self._source.targets:
                return images, collate_targets([target for _, target in pairs]), []
            labels = torch.tensor([label for _, label in pairs])
            # Labels that the data set knows without reading samples were checked when it was opened.
            return images, check_labels(labels, self._classes, "the data set", samples) if self._classes else labels, []
        except ManyhandsError as error:
            if (cause := error.__cause__) is not None:  # the queue drops the cause; a note keeps its traceback
                error.add_note(user_traceback(cause) or "".join(traceback.format_exception(cause)).rstrip())
            return error

    def _read_sample(self, epoch: int, sample: int) -> tuple[Tensor, Any]:
        seed_generators(derive_seed(self._seed, "sample", epoch, sample))
        image, label = read_user_sample(self._source, sample)
        rng = sample_rng(self._seed, epoch, sample) if self._train else None
        picture = to_pil_image(image)
        if picture is not None:
            return prepare_pixels(to_tensor(to_mode(picture, self._pixels.channels)), self._pixels, rng), label
        if str(getattr(image, "dtype", "")).endswith("uint8"):
            what = f"sample {sample:,} has 8-bit pixels of shape {list(image.shape)}"
            raise UserError(what, "the data set", ("give pictures as [H, W], [1 or 3, H, W] or an array [H, W, 3]",))
        if isinstance(image, Tensor | numpy.ndarray):
            return torch.as_tensor(image), label
        what = f"sample {sample:,} is a {type(image).__name__}, not a tensor, an array or a picture"
        raise UserError(what, "the data set", _PAIR)


def read_user_sample(source: UserSamples, sample: int) -> tuple[Any, Any]:
    """Reads (x, y) from the user's data set. Converts y to a class index unless y is the target of a custom loss."""
    try:
        content = source.dataset[sample]
    except (ManyhandsError, MemoryError):
        raise
    except Exception as error:
        what = f"the data set raised {type(error).__name__} for sample {sample:,}: {error}"
        raise RunError(what, user_line(error)) from error
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise UserError(f"sample {sample:,} is a {type(content).__name__}, not a pair (x, y)", "the data set", _PAIR)
    image, label = content
    if source.targets:
        return image, label
    number = label_as_int(label)
    if number is None:
        swapped = label_as_int(image) is not None and getattr(label, "ndim", 0)
        hints = ("return (x, y): the label comes second",) if swapped else _PAIR
        shown = shortened(repr(label))
        if isinstance(label, Tensor | numpy.ndarray) and math.prod(label.shape) > _MOST_SHOWN:
            shown = f"of shape {list(label.shape)} and type {str(label.dtype).removeprefix('torch.')}"
        raise UserError(f"the label of sample {sample:,} is {shown}, not a whole number", "the data set", hints)
    if source.numbers is None:
        return image, number
    if not 0 <= number < len(source.numbers):
        what = f"the label of sample {sample:,} is {number}, but the data set names {len(source.numbers)} classes"
        raise UserError(what, "the data set", (f"return labels from 0 to {len(source.numbers) - 1}",))
    return image, source.numbers[number]


def label_as_int(label: Any) -> int | None:
    """Converts a label to an int. Returns None if it is not a single integer."""
    if isinstance(label, Tensor | numpy.ndarray | numpy.generic) and all(size == 1 for size in label.shape):
        label = label.item()
    return None if isinstance(label, bool) or not isinstance(label, int) else label


def collate_targets(found: list[Any]) -> Tensor:
    try:
        targets: Any = default_collate(found)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"the targets y can't be collated into a tensor: {error}", "the data set", _TARGET) from error
    if not isinstance(targets, Tensor):
        raise UserError(f"the target y is a {type(found[0]).__name__}, not a number or tensor", "the data set", _TARGET)
    return targets


def to_pil_image(image: Any) -> Image.Image | None:
    """Converts uint8 [H, W], [1 or 3, H, W] (tensor) or [H, W, 1 or 3] (array) to a PIL image, others to None."""
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
    """Seeds the CPU generators of torch, random and numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restores the generators of torch, Python and NumPy on exit, so that reading data doesn't change dropout masks."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def _stack_images(images: list[Tensor], samples: list[int]) -> Tensor:
    for image, sample in zip(images, samples, strict=True):
        if image.shape != images[0].shape or image.dtype != images[0].dtype:
            first, other = (f"{list(x.shape)} {x.dtype}" for x in (images[0], image))
            what = f"sample {sample:,} is {other}, but sample {samples[0]:,} is {first}"
            raise UserError(what, "the data set", ("give every x the same shape and type",))
    return torch.stack(images)


def splits_of_objects(train: Any, test: Any | None, options: DataOptions, title: str = "") -> Splits:
    """Wraps the user's data sets. Without `test`, holds out random training samples, the same in every run.

    Uint8 tensors in a TensorDataset become pictures in memory. Raises UserError if an object isn't a usable data set.
    """
    datasets = [train] if test is None else [train, test]
    for word, dataset in zip(("train", "test"), datasets, strict=False):
        _check_dataset(dataset, word)
    labels = [stored_labels(dataset) for dataset in datasets]
    classes = next((names for names in map(_class_names, datasets) if len(names) > 1), ())
    if not classes:
        for number, dataset in enumerate(datasets):
            if labels[number] is None:
                with restored_generators():
                    found = [read_user_sample(UserSamples(dataset), sample)[1] for sample in range(len(dataset))]
                labels[number] = torch.tensor(found)
        classes = _numbered_classes([found for found in labels if found is not None])
    source = _wrap_samples(train, labels[0], len(classes), "the train set")
    if test is None:
        source, evaluated = _hold_out(source, options.validation)
    else:
        evaluated = source_to_evaluate(test, labels[1], classes, "the test set")
    text = describe(title or f"your {type(train).__name__}", source, evaluated)
    return Splits(source, evaluated, classes, text, _pixels(source))


def splits_to_evaluate(dataset: Any, known: tuple[str, ...], place: str = "the data set") -> Splits:
    """Wraps a data set to evaluate a network trained on the classes `known`. Returns all samples as both splits."""
    _check_dataset(dataset, place.removeprefix("the ").removesuffix(" set"))
    source = source_to_evaluate(dataset, stored_labels(dataset), known, place)
    return Splits(source, source, known, describe(f"your {type(dataset).__name__}", source, source), _pixels(source))


def source_to_evaluate(dataset: Any, labels: Tensor | None, known: tuple[str, ...], place: str) -> Source:
    """Wraps a data set for a network with the classes `known`. Converts labels by name if both have class names.

    Names aren't compared if the data set has a target_transform, which may already have changed the labels.
    """
    names = _class_names(dataset)
    transformed = getattr(dataset, "target_transform", None) is not None
    if splits.are_numbered(names) or splits.are_numbered(known) or transformed:
        return _wrap_samples(dataset, labels, len(known), place)
    return splits.map_labels_by_name(_wrap_samples(dataset, labels, len(names), place), names, known, place)


def has_targets(dataset: Any) -> bool:
    """Returns True if the first sample's y is not an integer, as for a custom loss."""
    _check_dataset(dataset, "train")
    if stored_labels(dataset) is not None:
        return False
    with restored_generators():
        seed_generators(0)
        return label_as_int(read_user_sample(UserSamples(dataset, targets=True), 0)[1]) is None


def splits_of_targets(train: Any) -> Splits:
    source = UserSamples(train, targets=True)
    text = describe(f"your {type(train).__name__}", source, source)
    return Splits(source, source, ("output",), text, _pixels(source))


def _check_dataset(dataset: Any, word: str) -> None:
    hints = ("give a torch Dataset with __len__ and __getitem__, such as a TensorDataset",)
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, IterableDataset | str | dict):
        raise UserError(f"the {word} set is a {type(dataset).__name__}, not a map-style data set", word, hints)
    if len(dataset) == 0:
        raise UserError(f"the {word} set is empty", word)


def _wrap_samples(dataset: Any, labels: Tensor | None, classes: int, place: str) -> Source:
    if labels is not None and classes:
        labels = check_labels(labels, classes, place)
    if type(dataset) is TensorDataset and labels is not None:
        images = dataset.tensors[0]
        if images.dtype == torch.uint8 and images.ndim in (3, 4):
            return ImagesInMemory(images.unsqueeze(1) if images.ndim == 3 else images, labels)
    return UserSamples(dataset, labels)


def _hold_out(source: Source, share: float) -> tuple[Source, Source]:
    """Splits a source into (training, evaluation). Evaluation gets the fraction `share`, the same in every run."""
    kept = spread(max(1, round(len(source) * share)), len(source))
    rest = torch.ones(len(source), dtype=torch.bool)
    rest[kept] = False
    if not rest.any():
        what = f"no training sample is left after samples are held out for evaluation: the data has {len(source)}"
        raise UserError(what, "train", ("give a test set",))
    return take(source, rest.nonzero().flatten()), take(source, kept)


def stored_labels(dataset: Any) -> Tensor | None:
    """Returns the labels, int64 [N], if the data set has them without reading samples. Otherwise returns None."""
    if isinstance(dataset, Subset):
        labels = stored_labels(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [stored_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat([p for p in parts if p is not None])
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        found: Any = dataset.tensors[1]
    elif getattr(dataset, "target_transform", None) is None:
        found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    else:
        found = None
    count = len(dataset)
    if not isinstance(found, Tensor | numpy.ndarray | list | tuple) or len(found) != count:
        return None
    values = found.numpy(force=True) if isinstance(found, Tensor) else numpy.asarray(found)
    known = values.size == count and values.dtype.kind in "iu"  # [N], or a column [N, 1]
    return torch.from_numpy(values.astype(numpy.int64).reshape(count)) if known else None


def _class_names(dataset: Any) -> tuple[str, ...]:
    """Returns the data set's class names, "0", "1" … if it has only `num_classes`, or () if it has neither."""
    if isinstance(dataset, Subset):
        return _class_names(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = {_class_names(part) for part in dataset.datasets}
        return parts.pop() if len(parts) == 1 else ()
    names, number = getattr(dataset, "classes", None), getattr(dataset, "num_classes", None)
    if isinstance(names, list | tuple) and names:
        return tuple(" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names)
    return tuple(map(str, range(number))) if isinstance(number, int) and number > 1 else ()


def _numbered_classes(found: list[Tensor]) -> tuple[str, ...]:
    greatest = max(int(labels.max()) for labels in found)
    for labels in found:
        check_labels(labels, max(2, greatest + 1), "the data set")  # refuses negative labels
    if greatest < 1:
        raise UserError("the data has only one class", "train", ("give labels of two or more classes, from 0 on",))
    return tuple(str(label) for label in range(greatest + 1))


def _pixels(source: Source) -> Pixels:
    """Returns default preprocessing from a few samples. Large pictures of different sizes are resized to 224."""
    if isinstance(source, ImagesInMemory):
        return measure_pixels(source.images, "none")
    assert isinstance(source, UserSamples)
    with restored_generators():
        seed_generators(0)
        images = [read_user_sample(source, index)[0] for index in spread(_PROBES, len(source)).tolist()]
    pictures = [picture for picture in map(to_pil_image, images) if picture is not None]
    if len(pictures) < len(images):
        shape = tuple(getattr(images[0], "shape", ())) or (1,)
        pixels = imagenet_pixels(int(shape[-1]), int(shape[0]) if len(shape) == 3 else 1, "none")
        return replace(pixels, own=True)
    sizes = {size for picture in pictures for size in picture.size}
    size = max(sizes) if len(sizes) == 1 or max(sizes) <= _SMALL else 224
    return imagenet_pixels(size, 1 if all(map(is_grey, pictures)) else 3, "none")

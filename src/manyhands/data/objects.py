"""The user's own data sets, wrapped: what they hold is found out without reading more than needed."""

from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from manyhands.core.errors import UserError
from manyhands.data.decode import is_grey
from manyhands.data.on_demand import (
    as_picture,
    read_own,
    restored_generators,
    seed_generators,
    whole_number,
)
from manyhands.data.options import DataOptions
from manyhands.data.random import spread
from manyhands.data.splits import (
    ImagesInMemory,
    Source,
    Splits,
    UserSamples,
    by_names,
    check_labels,
    describe,
    only_numbers,
    take,
)
from manyhands.data.transforms import Pixels, measured_pixels, photograph_pixels

_PROBES = 8
_SMALL = 64


def splits_of_objects(train: Any, test: Any | None, options: DataOptions, title: str = "") -> Splits:
    """Wraps the user's training and test data.

    Uint8 tensors in a TensorDataset become pictures in memory; everything else is read when it is needed. Without a
    test set, every so many-th training sample is kept for evaluation, always the same ones. Raises UserError: an object
    is no data set, is empty, or its samples or labels can't be used.
    """
    given = [("train", train)] if test is None else [("train", train), ("test", test)]
    for word, dataset in given:
        _check(dataset, word)
    datasets = [dataset for _, dataset in given]
    labels = [known_labels(dataset) for dataset in datasets]
    classes = next((names for names in map(_classes_of, datasets) if len(names) > 1), ())
    if not classes:
        # Each sample's must be read to count them; what has been read is known.
        labels = [_read_labels(one) if known is None else known for one, known in zip(datasets, labels, strict=True)]
        classes = _counted_classes([found for found in labels if found is not None])
    source = _source(train, labels[0], len(classes), "the train set")
    evaluated = None if test is None else source_to_evaluate(test, labels[1], classes, "the test set")
    sources = _split(source, options.validation) if evaluated is None else [source, evaluated]
    text = describe(title or f"your {type(train).__name__}", sources[0], sources[1])
    return Splits(sources[0], sources[1], classes, text, _pixels(sources[0]))


def splits_to_evaluate(dataset: Any, known: tuple[str, ...], place: str = "the data set") -> Splits:
    """Wraps a data set that is only evaluated, by a network with the classes `known`; both splits are all of it.

    Raises:
        UserError: the object is no data set, is empty, or has other classes.
    """
    _check(dataset, place.removeprefix("the ").removesuffix(" set"))
    source = source_to_evaluate(dataset, known_labels(dataset), known, place)
    return Splits(source, source, known, describe(f"your {type(dataset).__name__}", source, source), _pixels(source))


def source_to_evaluate(dataset: Any, labels: Tensor | None, known: tuple[str, ...], place: str) -> Source:
    """A data set with its labels turned into numbers of the classes `known`, by name where both have names.

    Names aren't compared where the data set has a target_transform, which may have changed the numbers already.
    """
    names = _classes_of(dataset)
    transformed = getattr(dataset, "target_transform", None) is not None
    if only_numbers(names) or only_numbers(known) or transformed:
        return _source(dataset, labels, len(known), place)
    return by_names(_source(dataset, labels, len(names), place), names, known, place)


def has_targets(dataset: Any) -> bool:
    """True where y isn't one whole number, by its first sample; for a loss of the user's own."""
    _check(dataset, "train")
    if known_labels(dataset) is not None:
        return False
    with restored_generators():
        seed_generators(0)
        return whole_number(read_own(UserSamples(dataset, targets=True), 0)[1]) is None


def splits_of_targets(train: Any) -> Splits:
    """Wraps the user's own samples with targets that no class stands for."""
    source = UserSamples(train, targets=True)
    return Splits(
        source, source, ("output",), describe(f"your {type(train).__name__}", source, source), _pixels(source)
    )


def _check(dataset: Any, word: str) -> None:
    hints = ("give a torch Dataset with __len__ and __getitem__, such as a TensorDataset",)
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, IterableDataset | str | dict):
        raise UserError(f"the {word} set is a {type(dataset).__name__}, not a map-style data set", word, hints)
    if len(dataset) == 0:
        raise UserError(f"the {word} set is empty", word)


def _source(dataset: Any, labels: Tensor | None, classes: int, place: str) -> Source:
    if labels is not None and classes:
        labels = check_labels(labels, classes, place)
    if type(dataset) is TensorDataset and labels is not None:
        images = dataset.tensors[0]
        if images.dtype == torch.uint8 and images.ndim in (3, 4):
            return ImagesInMemory(images.unsqueeze(1) if images.ndim == 3 else images, labels)
    return UserSamples(dataset, labels)


def _split(source: Source, share: float) -> list[Source]:
    """Keeps a share of the samples for evaluation: a fixed choice, spread evenly."""
    kept = spread(max(1, round(len(source) * share)), len(source))
    rest = torch.ones(len(source), dtype=torch.bool)
    rest[kept] = False
    if not rest.any():
        raise UserError("one sample can't serve for both training and evaluation", "train", ("give a test set",))
    return [take(source, rest.nonzero().flatten()), take(source, kept)]


def known_labels(dataset: Any) -> Tensor | None:
    """The labels int64 [N] where the data set knows them without reading samples, else None."""
    if isinstance(dataset, Subset):
        labels = known_labels(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [known_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat([p for p in parts if p is not None])
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        found: Any = dataset.tensors[1]
    elif getattr(dataset, "target_transform", None) is None:
        found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    else:
        found = None
    return _as_labels(found, len(dataset))


def _as_labels(found: Any, count: int) -> Tensor | None:
    if not isinstance(found, Tensor | numpy.ndarray | list | tuple) or len(found) != count:
        return None
    values = found.numpy(force=True) if isinstance(found, Tensor) else numpy.asarray(found)
    known = values.size == count and values.dtype.kind in "iu"  # [N], or a column [N, 1]
    return torch.from_numpy(values.astype(numpy.int64).reshape(count)) if known else None


def _classes_of(dataset: Any) -> tuple[str, ...]:
    """The data set's own names of its classes, or numbers where it says how many; else none."""
    if isinstance(dataset, Subset):
        return _classes_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = {_classes_of(part) for part in dataset.datasets}
        return parts.pop() if len(parts) == 1 else ()
    names, number = getattr(dataset, "classes", None), getattr(dataset, "num_classes", None)
    if isinstance(names, list | tuple) and names:
        return tuple(" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names)
    return tuple(map(str, range(number))) if isinstance(number, int) and number > 1 else ()


def _counted_classes(found: list[Tensor]) -> tuple[str, ...]:
    greatest = max(int(labels.max()) for labels in found)
    for labels in found:
        check_labels(labels, max(2, greatest + 1), "the data set")  # refuses negative labels
    if greatest < 1:
        raise UserError("the data has only one class", "train", ("give labels of two or more classes, from 0 on",))
    return tuple(str(label) for label in range(greatest + 1))


def _read_labels(dataset: Any) -> Tensor:
    with restored_generators():
        return torch.tensor([read_own(UserSamples(dataset), sample)[1] for sample in range(len(dataset))])


def _pixels(source: Source) -> Pixels:
    """Looks at a few samples: pictures keep a small common size; tensors of numbers are used as they are."""
    if isinstance(source, ImagesInMemory):
        return measured_pixels(source.images, "none")
    assert isinstance(source, UserSamples)
    with restored_generators():
        seed_generators(0)
        images = [read_own(source, index)[0] for index in spread(_PROBES, len(source)).tolist()]
    pictures = [picture for picture in map(as_picture, images) if picture is not None]
    if len(pictures) < len(images):
        shape = tuple(getattr(images[0], "shape", ())) or (1,)
        pixels = photograph_pixels(int(shape[-1]), int(shape[0]) if len(shape) == 3 else 1, "none")
        return replace(pixels, own=True)
    sizes = {size for picture in pictures for size in picture.size}
    size = max(sizes) if len(sizes) == 1 or max(sizes) <= _SMALL else 224
    return photograph_pixels(size, 1 if all(map(is_grey, pictures)) else 3, "none")

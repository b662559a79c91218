"""An open data set: sources of samples, classes and default preprocessing."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from manyhands.core.errors import UserError, first_names
from manyhands.core.terminal import plain
from manyhands.data.transforms import Pixels

if TYPE_CHECKING:
    from manyhands.data.packed import PictureNames


@dataclass(frozen=True)
class ImagesInMemory:
    """Decoded pictures in memory."""

    images: Tensor  # uint8 [N, C, H, W]; C is 1 or 3
    labels: Tensor  # int64 [N]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] not in (1, 3):
            found = f"{self.images.dtype} {list(self.images.shape)}"
            raise UserError("pictures in memory must be uint8 [N, C, H, W] with 1 or 3 channels", f"found {found}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            found = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise UserError(f"labels must be int64 of shape [{len(self.images)}]", f"found {found}")

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class ImageFiles:
    """Pictures that are decoded on request."""

    paths: "PictureNames"  # one path per sample
    labels: Tensor  # int64 [N]

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class UserSamples:
    """The user's map-style data set."""

    # Returns (x, y). x is a float tensor, used unchanged, or a picture: a uint8 tensor [C, H, W] or [H, W], a PIL
    # image, or a uint8 array [H, W] or [H, W, C]. y is an integer, or a target.
    dataset: Any
    labels: Tensor | None = None  # int64 [N]; None: unknown without reading every sample
    targets: bool = False  # y is anything that torch's default_collate accepts, for a custom loss
    numbers: tuple[int, ...] | None = None  # class index of each y; None: y is the index. `labels` has indices

    def __len__(self) -> int:
        return len(self.dataset)


Source = ImagesInMemory | ImageFiles | UserSamples


@dataclass(frozen=True)
class Splits:
    """An open data set: the splits, their classes and the default preprocessing."""

    train: Source
    test: Source
    classes: tuple[str, ...]  # the name of each label
    description: str  # such as "digits: 1,437 + 360 pictures"
    pixels: Pixels  # defaults for this data set
    skipped: tuple[str, ...] = ()  # unreadable pictures that were skipped
    notes: tuple[str, ...] = ()  # messages for the user
    packed: str = ""  # the name of the packed copy in use
    held_out: Source | None = None  # evaluated once, after training

    def named_sources(self) -> list[tuple[str, Source]]:
        found = [("training", self.train), ("test" if self.held_out is None else "validation", self.test)]
        return found if self.held_out is None else [*found, ("test", self.held_out)]


def describe(title: str, train: Source, test: Source, place: str = "") -> str:
    return f"{title}: {len(train):,} + {len(test):,} pictures" + (f" from {place}" if place else "")


def check_labels(labels: Tensor, classes: int, place: str, samples: Sequence[int] | None = None) -> Tensor:
    """Converts integer labels [N] to int64. Raises UserError if a label is outside 0 … classes - 1."""
    labels = labels.to(torch.int64)
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        what = f"the label of sample {samples[row] if samples else row:,} is {int(labels[row])}"
        hints = (f"labels are whole numbers from 0 to {classes - 1}; correct or remove the sample",)
        raise UserError(f"{what}, but there are {classes} classes", place, hints)
    return labels


def map_labels_by_name(source: Source, names: tuple[str, ...], target_names: tuple[str, ...], place: str) -> Source:
    """Converts labels (indices into `names`) to indices into `target_names`. Raises UserError if a name is missing.

    Numbered classes have no names: labels are kept if `names` are numbered, or all `target_names` are.
    """
    if names == target_names[: len(names)]:
        return source
    unknown = [name for name in names if name not in target_names]
    indices = are_numbered(names) and len(names) <= len(target_names)
    if unknown and (indices or (are_numbered(target_names) and len(names) == len(target_names))):
        return source
    if unknown:
        from manyhands.data.layout import lookalike_difference

        shown = first_names([f'"{name}"' for name in unknown], 5)
        classes = ", ".join(target_names[:8]) + (f" … ({len(target_names)} in all)" if len(target_names) > 8 else "")
        alike = filter(None, (lookalike_difference(name, target_names) for name in unknown))
        hint = "give the folder that holds the class folders"
        if isinstance(source, UserSamples):
            hint = "correct the class names in the data set's attribute classes"
        raise UserError(f"the run has no class {shown}", place, (*alike, f"the run's classes: {classes}", hint))
    numbers = [target_names.index(name) for name in names]
    labels = None if source.labels is None else torch.tensor(numbers)[source.labels]
    if not isinstance(source, UserSamples):
        return replace(source, labels=labels)
    now = tuple(numbers[number] for number in source.numbers or range(len(numbers)))
    return replace(source, labels=labels, numbers=now)


def are_numbered(names: tuple[str, ...]) -> bool:
    """Returns True if the classes are named "0", "1" …."""
    return names == tuple(str(number) for number in range(len(names)))


def take(source: Source, samples: Tensor) -> Source:
    """Returns a source with only the samples whose indices are in `samples`, int64 [n]."""
    if isinstance(source, ImagesInMemory):
        return ImagesInMemory(source.images[samples], source.labels[samples])
    if isinstance(source, ImageFiles):
        return ImageFiles(source.paths.take(samples.numpy()), source.labels[samples])
    labels = None if source.labels is None else source.labels[samples]
    if type(source.dataset) is TensorDataset:
        part: Any = TensorDataset(*(tensor[samples] for tensor in source.dataset.tensors))
    else:
        part = Subset(source.dataset, samples.tolist())
    return replace(source, dataset=part, labels=labels)


def describe_samples(train: int, test: int | None, classes: Sequence[str], what: str = "pictures") -> str:
    """Describes the numbers of samples, and the classes, in one line. `test` is None if there is no evaluation."""
    names = textwrap.shorten(", ".join(map(plain, classes)), 72, placeholder=" …")
    evaluated = "" if test is None else f" and {test:,} evaluation"
    return f"{train:,} training{evaluated} {what}" + (f", {len(classes):,} classes: {names}" if classes else "")

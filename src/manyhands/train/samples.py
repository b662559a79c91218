"""The samples of a run: from its job to data that all processes agree on, pixels, classes and loaders."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.journal import Journal
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.data.loader import Loader
from manyhands.data.open import from_objects, open_data, open_whole, resolve_pixels
from manyhands.data.splits import Splits, UserSamples
from manyhands.data.transforms import Pixels
from manyhands.data.workers import worker_count
from manyhands.models.build import describe
from manyhands.parallel.apply import compare_replicas

DTYPES = {"fp64": torch.float64}


@dataclass
class Objects:
    """What a user of the Python interface brings instead of names."""

    model: nn.Module | None = None
    train_set: Any = None
    test_set: Any = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Samples:
    """A run's data, ready to be read.

    Attributes:
        splits: the sources.
        pixels: what pictures become.
        classes: their names.
        train: serves the training split.
        test: serves the split that is evaluated.
    """

    splits: Splits
    pixels: Pixels
    classes: tuple[str, ...]
    train: Loader
    test: Loader

    def close(self) -> None:
        """Ends the loaders' processes."""
        self.train.close()
        self.test.close()


def open_samples(job: Job, world: World, objects: Objects, journal: Journal, outputs: int = 0) -> Samples:
    """Opens the data, says what can't be read of it, and checks its labels; `outputs` as `class_names` has it."""
    splits = open_splits(job, world, objects)
    tell_of_skipped(splits, journal)
    pixels = pixels_for(job, splits, objects)
    classes = class_names(job, splits, 0 if splits.classes else outputs)
    check_labels(splits, len(classes))
    train = make_loader(job, splits.train, pixels, world, train=True, classes=len(classes))
    test = make_loader(job, splits.test, pixels, world, train=False, classes=len(classes))
    return Samples(splits, pixels, classes, train, test)


def open_splits(job: Job, world: World, objects: Objects, *, whole: bool = False) -> Splits:
    """The data; all processes must see the same. `whole`: of a plain folder both splits are all of it."""
    if objects.train_set is not None:
        splits = from_objects(objects.train_set, objects.test_set, job.data)
    else:
        splits = open_whole(job.data) if whole else open_data(job.data)
    for split, word in ((splits.train, "training"), (splits.test, "test")):
        if not len(split):
            mend = ("give more samples", "or another share for evaluation, such as --set data.validation=0.3")
            raise UserError(f"the {word} split holds no samples", "data.name", mend)
    drift = compare_replicas({name: t.to(world.device) for name, t in _fingerprints(splits).items()}, world)
    if drift:
        name, ranks = drift
        raise UserError(
            f"rank {', '.join(map(str, ranks))} sees other {name} than rank 0",
            "data.name",
            ("copy the same data to every machine, then compare the number of files",),
        )
    return splits


def _fingerprints(splits: Splits) -> dict[str, Tensor]:
    """Numbers that differ when two processes see different data."""
    words = hashlib.sha256("\0".join(splits.classes).encode()).digest()[:8]
    prints = {"classes": torch.frombuffer(bytearray(words), dtype=torch.int64)}
    for word, source in (("training data", splits.train), ("test data", splits.test)):
        labels = source.labels
        text = labels.numpy().tobytes() if labels is not None else b""
        digest = hashlib.sha256(text + str(len(source)).encode()).digest()[:8]
        prints[word] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    return prints


def pixels_for(job: Job, splits: Splits, objects: Objects) -> Pixels:
    """What pictures become: the user's word first, then what the network needs, then the data's own."""
    if objects.model is not None:
        return resolve_pixels(job.data, splits.pixels, model_channels=None, model_size=None)
    needs = describe(job.model, job.data.image_size or splits.pixels.size)
    return resolve_pixels(job.data, splits.pixels, model_channels=needs.channels, model_size=needs.size)


def class_names(job: Job, splits: Splits, outputs: int = 0) -> tuple[str, ...]:
    """A name for each output of the network; `outputs` is what a checkpoint from elsewhere has."""
    names = splits.classes
    if not names:
        found = [source.labels for source in (splits.train, splits.test) if source.labels is not None]
        names = tuple(str(n) for n in range(1 + max((int(labels.max()) for labels in found), default=-1)))
    wanted = job.model.num_classes or outputs
    if not names and not wanted:
        raise UserError(
            "the data does not say how many classes it has",
            "model.num_classes",
            ("--set model.num_classes=10", "or give the data set an attribute `classes`"),
        )
    return name_outputs(names, wanted)


def name_outputs(names: tuple[str, ...], outputs: int) -> tuple[str, ...]:
    """A name for each of so many outputs: those of the classes, and the numbers of outputs beyond them."""
    return names + tuple(str(number) for number in range(len(names), outputs))


def check_labels(splits: Splits, classes: int) -> None:
    """Raises UserError for a label outside the network's outputs, before anything is computed."""
    for word, source in (("training", splits.train), ("test", splits.test)):
        if source.labels is None:
            continue
        bad = ((source.labels < 0) | (source.labels >= classes)).nonzero()
        if len(bad):
            sample = int(bad[0])
            raise UserError(
                f"{word} sample {sample} has label {int(source.labels[sample])}; "
                f"the network has outputs 0 to {classes - 1}",
                f"{word} data, {len(bad)} such sample(s)",
                (f"--set model.num_classes={int(source.labels.max()) + 1}", "or mend the labels"),
            )


def tell_of_skipped(splits: Splits, journal: Journal) -> None:
    """Says which pictures can't be read, and what else isn't as it looks."""
    for note in splits.notes:
        journal.event("warning", note)
    if splits.skipped:
        left_out = f"{len(splits.skipped)} picture(s) can't be read and are left out: {', '.join(splits.skipped[:3])}"
        journal.event("warning", left_out + (" …" if len(splits.skipped) > 3 else ""))


def make_loader(job: Job, source: Any, pixels: Pixels, world: World, *, train: bool, classes: int = 0) -> Loader:
    """Samples to pixels on this process's device; `classes`: what labels are below, where that is known."""
    return Loader(
        source,
        pixels,
        train=train,
        seed=derive(job.train.seed, "augment"),
        device=world.device,
        workers=loader_workers(job, source, world),
        dtype=DTYPES.get(job.train.precision, torch.float32),
        channels_last=job.train.channels_last,
        classes=classes,
    )


def loader_workers(job: Job, source: Any, world: World) -> int:
    """Decoding processes for this rank: what the user says, else a share of the cores."""
    if job.data.workers < 0 and isinstance(source, UserSamples) and world.device == "cpu":
        # Most data sets of users' own are light, and their objects need not survive another process.
        return 0
    if job.data.machine_workers:
        return math.ceil(job.data.machine_workers / world.local_size)
    return worker_count(job.data.workers, world.local_size)


def first_picture(loader: Loader) -> Tensor:
    """One sample, as the network gets it."""
    return next(iter(loader.batches(0, [torch.zeros(1, dtype=torch.int64)]))).images[0]

"""The samples of a run: opens and checks the data, and derives pixels, classes and loaders."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.config.job import Job
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.data.loading import Loader, open_loader, worker_count
from manyhands.data.open import from_objects, from_targets, open_data, open_whole, resolve_pixels
from manyhands.data.order import batch_noted
from manyhands.data.pictures import decode_jpeg
from manyhands.data.splits import ImageFiles, Source, Splits, UserSamples
from manyhands.data.transforms import Pixels
from manyhands.models.build import describe
from manyhands.train.journal import Journal, RunContext
from manyhands.train.objects import Objects
from manyhands.train.same_data import refuse_other_data

DTYPES = {"fp64": torch.float64}
# So many pictures, or such a part of all, may be bad; more is a disk or a data set that is.
_MOST_BAD, _MOST_BAD_SHARE = 10, 1 / 1000


@dataclass(frozen=True)
class DataSetup:
    """The opened data of a run."""

    splits: Splits  # the sources
    pixels: Pixels  # what pictures become
    classes: tuple[str, ...]  # their names
    train: Loader  # serves the training split
    test: Loader  # serves the split that is evaluated
    held_out: Loader | None = None  # serves what is evaluated once at the end; None where there is nothing of that kind

    def close(self) -> None:
        """Ends the loaders' processes."""
        self.train.close()
        self.test.close()
        if self.held_out:
            self.held_out.close()


def open_samples(run: RunContext, objects: Objects, outputs: int, splits: Splits | None) -> DataSetup:
    """Opens the data unless it is open, reports unreadable pictures, and checks the labels.

    For `outputs`, see `class_names`.
    """
    job, world, journal = run.job, run.world, run.journal
    splits = splits or open_splits(job, world, objects)
    record_skipped(splits, journal)
    smaller = batch_noted(job.train.batch, len(splits.train))
    if smaller:
        journal.event("warning", smaller)
    pixels = pixels_for(job, splits, objects)
    classes = class_names(job, splits, 0 if splits.classes else outputs)
    check_labels(splits, len(classes))
    for missing in missing_classes(splits):
        journal.event("warning", missing)

    def loader(source: Source, *, train: bool = False) -> Loader:
        return make_loader(job, source, pixels, world, train=train, classes=len(classes))

    held_out = None if splits.held_out is None else loader(splits.held_out)
    return DataSetup(splits, pixels, classes, loader(splits.train, train=True), loader(splits.test), held_out)


def open_splits(job: Job, world: World, objects: Objects, *, whole: bool = False) -> Splits:
    """Opens the data, the same on all processes. `whole`: both splits are the entire folder if it has no splits."""
    if objects.targets:
        splits = from_targets(objects.train_set, job.data)
    elif objects.train_set is not None:
        splits = from_objects(objects.train_set, objects.test_set, job.data, objects.held_out_set)
    else:
        splits = open_whole(job.data) if whole else open_data(job.data)
    for word, split in splits.named():
        if not len(split):
            hints = ("add samples", "or change the share for evaluation, such as --set data.validation=0.3")
            raise UserError(f"the {word} split is empty", "data.name", hints)
    refuse_other_data(splits, world)
    return splits


def pixels_for(job: Job, splits: Splits, objects: Objects) -> Pixels:
    """Returns the preprocessing: from the job, else from the network's requirements, else from the data."""
    if objects.model is not None:
        return resolve_pixels(job.data, splits.pixels, model_channels=None, model_size=None)
    needs = describe(job.model, job.data.image_size or splits.pixels.size)
    return resolve_pixels(job.data, splits.pixels, model_channels=needs.channels, model_size=needs.size)


def class_names(job: Job, splits: Splits, outputs: int = 0) -> tuple[str, ...]:
    """Returns a name for each output of the network; `outputs` is their number in a foreign checkpoint."""
    names = splits.classes
    if not names:
        found = [source.labels for _, source in splits.named() if source.labels is not None]
        names = tuple(str(n) for n in range(1 + max((int(labels.max()) for labels in found), default=-1)))
    wanted = job.model.num_classes or outputs
    if not names and not wanted:
        raise UserError(
            "the number of classes is unknown",
            "model.num_classes",
            ("set the number, such as --set model.num_classes=10", "or give the data set an attribute `classes`"),
        )
    return name_outputs(names, wanted)


def name_outputs(names: tuple[str, ...], outputs: int) -> tuple[str, ...]:
    """Returns a name for each output: the class names, then the numbers of further outputs."""
    return names + tuple(str(number) for number in range(len(names), outputs))


def check_labels(splits: Splits, classes: int) -> None:
    """Raises UserError for a label outside the network's outputs, before anything is computed."""
    for word, source in splits.named():
        if source.labels is None:
            continue
        bad = ((source.labels < 0) | (source.labels >= classes)).nonzero()
        if len(bad):
            sample = int(bad[0])
            raise UserError(
                f"{word} sample {sample} has label {int(source.labels[sample])}; "
                f"the network has outputs 0 to {classes - 1}",
                f"{word} data, {len(bad)} such sample(s)",
                (f"add outputs: --set model.num_classes={int(source.labels.max()) + 1}", "or correct the labels"),
            )


def missing_classes(splits: Splits) -> list[str]:
    """Returns a sentence for each split that lacks classes of the other splits or of the data set's list of names."""
    counts = {word: source.labels.bincount() for word, source in splits.named() if source.labels is not None}
    total = max(len(splits.classes), *map(len, counts.values())) if counts else 0
    names = name_outputs(splits.classes, total)
    present = {word: set(found.nonzero().flatten().tolist()) for word, found in counts.items()}
    known = set(range(len(splits.classes))) | set().union(*present.values())
    sentences: list[str] = []
    for word, seen in present.items():
        expected = known if word == "training" else present.get("training", known)
        if missing := sorted(expected - seen):
            shown = ", ".join(names[number] for number in missing[:5]) + (" …" if len(missing) > 5 else "")
            effect = "" if word == "training" else ", so no evaluation covers them"
            sentences.append(f"{len(missing):,} of {len(known):,} classes have no {word} sample{effect}: {shown}")
    return sentences


def record_skipped(splits: Splits, journal: Journal) -> None:
    """Records unreadable pictures, the packed copy and notes on the data."""
    if splits.packed:
        journal.event("note", f"reading pictures from the packed copy {splits.packed}")
    if isinstance(splits.train, ImageFiles) and decode_jpeg is None:
        journal.event("note", "JPEGs are decoded with Pillow; simplejpeg is faster (do: pip install simplejpeg)")
    for note in splits.notes:
        journal.event("warning", note)
    if splits.skipped:
        check_bad_pictures(splits.skipped, len(splits.train) + len(splits.test), UserError)
        left_out = f"{len(splits.skipped)} unreadable picture(s) are skipped: {some_pictures(splits.skipped)}"
        journal.event("warning", left_out)


def check_bad_pictures(bad: Collection[str], samples: int, kind: type[ManyhandsError]) -> None:
    """Raises a `kind` if more than ten pictures, and more than 0.1 %, can't be read."""
    most = max(_MOST_BAD, int(samples * _MOST_BAD_SHARE))
    if len(bad) > most:
        hints = (f"repair or remove the pictures (limit: {most} of {samples:,})", "check the disk: dmesg | tail")
        raise kind(f"{len(bad)} pictures can't be read, such as {some_pictures(bad)}", "data.skip_corrupt", hints)


def some_pictures(pictures: Collection[str]) -> str:
    """Returns the names of the first pictures, for a message."""
    names = sorted(pictures)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def make_loader(job: Job, source: Any, pixels: Pixels, world: World, *, train: bool, classes: int = 0) -> Loader:
    """Creates a loader that puts samples on this process's device; `classes`: the number of classes if known."""
    return open_loader(
        source,
        pixels,
        train=train,
        seed=derive(job.train.seed, "augment"),
        device=world.device,
        workers=loader_workers(job, source, world),
        dtype=DTYPES.get(job.train.precision, torch.float32),
        channels_last=job.train.channels_last is True,
        classes=classes,
        replaces=job.data.skip_corrupt,
    )


def loader_workers(job: Job, source: Any, world: World) -> int:
    """Returns the number of decoding processes of this rank: from the job, else a share of the CPU cores."""
    if job.data.workers < 0 and isinstance(source, UserSamples) and world.device == "cpu":
        # Most data sets of users' own are light, and their objects need not survive another process.
        return 0
    if job.data.machine_workers:
        return math.ceil(job.data.machine_workers / world.local_size)
    return worker_count(job.data.workers, world.local_size)


def first_picture(loader: Loader) -> Tensor:
    """Returns one sample as the network receives it."""
    return next(iter(loader.batches(0, [torch.zeros(1, dtype=torch.int64)]))).images[0]

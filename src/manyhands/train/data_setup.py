"""Opens a run's data, checks that all processes have the same data, and sets up preprocessing, classes and loaders.

The check compares some samples of each split, because reading all of them takes as long as an epoch; a small split is
compared entirely.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.checkpoint.trained import INITIAL_WEIGHTS, TRAINABLE, TrainedNetwork, recorded_trained_on
from manyhands.config.job import Job
from manyhands.core.errors import ManyhandsError, UserError, first_names
from manyhands.core.seeds import derive_seed
from manyhands.core.world import World
from manyhands.data.loading import Loader, open_loader, workers_per_rank
from manyhands.data.open import open_data, open_unsplit_folder, resolve_pixels, wrap_data_sets, wrap_targets
from manyhands.data.order import large_batch_note
from manyhands.data.pictures import decode_jpeg
from manyhands.data.samples import read_user_sample, restored_generators, seed_generators
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source, Splits, UserSamples
from manyhands.data.transforms import Pixels, spread
from manyhands.models.build import picture_needs
from manyhands.parallel.group.plain import gather_plain
from manyhands.train.journal import Journal, RunContext
from manyhands.train.objects import Objects

DTYPES = {"fp64": torch.float64}
# Limits of the comparison between processes: bytes of each split, fewer if all processes read the same disk; and the
# samples of a custom data set whose labels, and whose inputs, are compared.
MOST_BYTES, MOST_HERE, LABELS, INPUTS = 32 << 20, 2 << 20, 16, 4
HELD_OUT = "held-out"


@dataclass(frozen=True)
class DataSetup:
    """A run's opened data, with its preprocessing, class names and loaders."""

    splits: Splits
    pixels: Pixels
    classes: tuple[str, ...]
    train: Loader
    test: Loader
    held_out: Loader | None = None  # evaluated once at the end

    def close(self) -> None:
        """Ends the worker processes of the loaders."""
        for loader in filter(None, (self.train, self.test, self.held_out)):
            loader.close()


def open_samples(run: RunContext, objects: Objects, outputs: int, splits: Splits | None) -> DataSetup:
    """Opens the data (`splits` if given), checks the labels and creates the loaders. `outputs`: see `class_names`."""
    job, world, journal = run.job, run.world, run.journal
    splits = splits or open_splits(job, world, objects)
    record_data_notes(splits, journal)
    if smaller := large_batch_note(job.train.batch, len(splits.train)):
        journal.event("warning", smaller)
    pixels = pixels_for(job, splits, objects)
    classes = class_names(job, splits, 0 if splits.classes else outputs)
    check_labels(splits, len(classes))
    for missing in missing_class_warnings(splits):
        journal.event("warning", missing)
    loaders = [
        make_loader(job, source, pixels, world, train=word == "training", classes=len(classes))
        for word, source in splits.named_sources()
    ]
    return DataSetup(splits, pixels, classes, *loaders)


def open_splits(job: Job, world: World, objects: Objects, *, whole: bool = False) -> Splits:
    """Opens the data, equal on all processes. A collective. With `whole`, each split has all pictures of the folder."""
    if objects.targets:
        splits = wrap_targets(objects.train_set, job.data)
    elif objects.train_set is not None:
        splits = wrap_data_sets(objects.train_set, objects.test_set, job.data, objects.held_out_set)
    else:
        splits = open_unsplit_folder(job.data) if whole else open_data(job.data)
    for word, split in splits.named_sources():
        if not len(split):
            hints = ("add samples", "or change the fraction held out for evaluation: --set data.validation=0.3")
            raise UserError(f"the {word} split is empty", "data.name", hints)
    require_equal_data(splits, world)
    return splits


def pixels_for(job: Job, splits: Splits, objects: Objects) -> Pixels:
    """Returns the preprocessing: each setting is the job's, else the network's requirement, else the data's default."""
    if objects.model is not None:
        return resolve_pixels(job.data, splits.pixels, model_channels=None, model_size=None)
    needs = picture_needs(job.model, job.data.image_size or splits.pixels.size)
    return resolve_pixels(job.data, splits.pixels, model_channels=needs.channels, model_size=needs.size)


def class_names(job: Job, splits: Splits, outputs: int = 0) -> tuple[str, ...]:
    """Returns a name for each network output. `outputs`: their number in another tool's checkpoint (0: unknown)."""
    labels = [source.labels for _, source in splits.named_sources() if source.labels is not None]
    names = splits.classes or name_outputs((), 1 + max((int(one.max()) for one in labels), default=-1))
    wanted = job.model.num_classes or outputs
    if not names and not wanted:
        hints = ("set the number of classes: --set model.num_classes=10", "or give the data set an attribute `classes`")
        raise UserError("the number of classes is unknown", "model.num_classes", hints)
    return name_outputs(names, wanted)


def name_outputs(names: tuple[str, ...], outputs: int) -> tuple[str, ...]:
    """Returns a name for each of `outputs` outputs: the class names, and indices as the names of further outputs."""
    return names + tuple(str(number) for number in range(len(names), outputs))


def check_labels(splits: Splits, classes: int) -> None:
    """Raises UserError if a label is not an index of a network output, from 0 to `classes` - 1."""
    for word, source in splits.named_sources():
        labels = torch.empty(0) if source.labels is None else source.labels
        bad = ((labels < 0) | (labels >= classes)).nonzero()
        if len(bad):
            what = f"{word} sample {int(bad[0])} has label {int(labels[bad[0]])}"
            hints = (f"add outputs: --set model.num_classes={int(labels.max()) + 1}", "or correct the labels")
            where = f"{word} data, {len(bad)} such sample(s)"
            raise UserError(f"{what}; the network has outputs 0 to {classes - 1}", where, hints)


def missing_class_warnings(splits: Splits) -> Iterator[str]:
    """Yields a warning for each split that lacks samples of a class. Evaluation needs only the training classes."""
    labels = {word: source.labels for word, source in splits.named_sources() if source.labels is not None}
    present = {word: set(each.bincount().nonzero().flatten().tolist()) for word, each in labels.items()}
    known = set(range(len(splits.classes))).union(*present.values())
    names = name_outputs(splits.classes, 1 + max(known, default=-1))
    for word, seen in present.items():
        expected = known if word == "training" else present.get("training", known)
        if missing := sorted(expected - seen):
            shown = first_names([names[number] for number in missing], 5)
            effect = "" if word == "training" else ", so no evaluation covers them"
            yield f"{len(missing):,} of {len(known):,} classes have no {word} sample{effect}: {shown}"


def record_data_notes(splits: Splits, journal: Journal) -> None:
    """Records events for unreadable pictures, the use of a packed copy, and notes on the data."""
    if splits.packed:
        journal.event("note", f"reading pictures from the packed copy {splits.packed}")
    if isinstance(splits.train, ImageFiles) and decode_jpeg is None:
        journal.event("note", "JPEGs are decoded with Pillow; simplejpeg is faster (do: pip install simplejpeg)")
    for note in splits.notes:
        journal.event("warning", note)
    if splits.skipped:
        check_bad_pictures(splits.skipped, len(splits.train) + len(splits.test), UserError)
        shown = first_names(sorted(splits.skipped), 3)
        journal.event("warning", f"{len(splits.skipped)} unreadable picture(s) are skipped: {shown}")


def check_bad_pictures(bad: Collection[str], samples: int, error_class: type[ManyhandsError]) -> None:
    """Raises `error_class` if more than ten pictures and more than 0.1 % of all `samples` can't be read."""
    most = max(10, samples // 1000)
    if len(bad) > most:  # more means a damaged disk or data set
        hints = (f"repair or remove pictures; at most {most} of {samples:,} may be bad", "check the disk: dmesg | tail")
        shown = first_names(sorted(bad), 3)
        raise error_class(f"{len(bad)} pictures can't be read, such as {shown}", "data.skip_corrupt", hints)


def make_loader(job: Job, source: Any, pixels: Pixels, world: World, *, train: bool, classes: int = 0) -> Loader:
    """Creates a loader that puts samples on this process's device. `classes`: number of classes (0: unknown)."""
    workers = workers_per_rank(job.data.workers, world.local_size)
    if job.data.workers < 0 and isinstance(source, UserSamples) and world.device == "cpu":
        workers = 0  # most custom data sets are fast, and some fail in other processes
    elif job.data.machine_workers:
        workers = math.ceil(job.data.machine_workers / world.local_size)
    return open_loader(
        source,
        pixels,
        train=train,
        seed=derive_seed(job.train.seed, "augment"),
        device=world.device,
        workers=workers,
        dtype=DTYPES.get(job.train.precision, torch.float32),
        channels_last=job.train.channels_last is True,
        classes=classes,
        replaces=job.data.skip_corrupt,
    )


def first_picture(loader: Loader) -> Tensor:
    """Returns the first sample, preprocessed for the network."""
    return next(iter(loader.batches(0, [torch.zeros(1, dtype=torch.int64)]))).images[0]


def require_equal_data(splits: Splits, world: World) -> None:
    """Raises UserError if a process has different data than rank 0. A collective."""
    if world.alone:
        return
    parts = dict(_compared_contents(splits, elsewhere=world.local_size < world.size))
    # The keys depend on the splits and their kinds, so the keys are compared before the contents.
    parts = {"classes": parts["classes"], "splits and kinds of data": [name.encode() for name in parts], **parts}
    everybody = gather_plain({name: _digest(content).hex() for name, content in parts.items()}, world)
    for name, digest in everybody[0].items():
        if ranks := [str(rank) for rank, one in enumerate(everybody) if one[name] != digest]:
            copied = "copy the same data to every machine; rsync -c compares file contents"
            own = "for a custom data set, return the same samples in every process and seed random numbers"
            raise UserError(f"rank {', '.join(ranks)} has different {name} than rank 0", "data.name", (copied, own))


def digest_data(splits: Splits) -> dict[str, str]:
    """Returns a dict of digests of the data: of lengths, shapes, labels, file names, and some of the samples."""
    found = {name: _digest(content).hex() for name, content in _compared_contents(splits, elsewhere=False)}
    return found if splits.held_out is not None else {**found, f"{HELD_OUT} data": ""}


def digest_trainable(model: nn.Module) -> dict[str, str]:
    """Returns a dict with one entry, the digest of the names of the trainable parameters."""
    return {TRAINABLE: _digest(name.encode() for name, one in model.named_parameters() if one.requires_grad).hex()}


def digest_weights(model: nn.Module) -> dict[str, str]:
    """Returns a dict with a digest of the initial weights, or {} if torch is unseeded or the network was trained."""
    if torch.initial_seed() >= 1 << 32 or recorded_trained_on(model) is not None:
        return {}
    try:
        state = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
        parts = [part for name, one in state.items() for part in (name.encode(), _tensor_bytes(one))]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return {}  # parameters that get their shapes later, or are not plain tensors
    return {INITIAL_WEIGHTS: _digest(parts).hex()}


def named_splits(splits: Splits) -> Iterator[tuple[str, Source]]:
    """Yields (name, source) for each split. The name of the held-out split is the same in all runs."""
    for word, source in splits.named_sources():
        yield HELD_OUT if source is splits.held_out else word, source


def refuse_other_classes(old: Sequence[str], new: Sequence[str], where: str) -> None:
    """Raises UserError if the class names or their order changed since the checkpoint was saved."""
    then, now = map(_without_numbered_names, (old, new))
    if not then or not now or then == now:
        return
    from manyhands.data.layout import lookalike_difference

    gone, added = [name for name in then if name not in now], [name for name in now if name not in then]
    found = [f"{_quoted(names)} {word}" for names, word in ((gone, "removed"), (added, "added")) if names]
    changes = f"the classes of the data changed: {', '.join(found)}"
    if not found:
        changes = f"the order of the classes changed from {_quoted(then)} to {_quoted(now)}"
    alike = [difference for name in new if name not in old and (difference := lookalike_difference(name, old))]
    hints = (*alike[:3], "undo the change of the class names", "or start a new run in another folder: --out NEW")
    raise UserError(f"{changes}; the network's outputs are for the previous classes", where, hints)


def _without_numbered_names(names: Sequence[str]) -> list[str]:
    """Returns the class names without those at the end that are only output indices, such as "10"."""
    count = len(names)
    while count and names[count - 1] == str(count - 1):
        count -= 1
    return list(names[:count])


def _quoted(names: Sequence[str]) -> str:
    return first_names([f'"{name}"' for name in names], 5)


def data_changes(then: TrainedNetwork, now: TrainedNetwork, names: Collection[str] = (), *, contents: bool) -> str:
    """Lists, as a text, the splits (of `names`, or all) whose labels, length or, if `contents`, samples changed."""
    found = list[str]()
    for name in then.changed_names(now.digests):
        word, _, kind = name.rpartition(" ")
        if word.startswith("metric ") or name not in then.digests or (names and word not in names):
            continue
        if kind in {"samples", "pictures"} and contents:
            found.append(name)
        elif kind == "data":
            before, after = (each.samples.get(word, 0 if word == HELD_OUT else -1) for each in (then, now))
            what = "labels" if before == after else f"{after:,} samples, was {before:,}"
            found.append(f"{name} ({'labels or number of samples' if -1 in (before, after) else what})")
    return ", ".join(found)


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[:8]


def _compared_contents(splits: Splits, *, elsewhere: bool) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yields (name, bytes) pairs that must be equal on all processes. `elsewhere`: some processes read other disks."""
    yield "classes", [name.encode(errors="surrogateescape") for name in splits.classes]
    for word, source in named_splits(splits):
        labels = [] if source.labels is None else [source.labels.numpy().tobytes()]
        yield f"{word} data", [str(len(source)).encode(), *labels]
        if isinstance(source, ImageFiles):
            yield f"names of {word} pictures", source.paths.blocks()  # relative to the folder of the data
        kind = "samples" if isinstance(source, UserSamples) else "pictures"
        yield f"{word} {kind}", _split_contents(source, elsewhere=elsewhere)


def _split_contents(source: Source, *, elsewhere: bool) -> Iterable[bytes]:
    if isinstance(source, ImageFiles):
        made = source.paths.packed.pack.resizing if source.paths.packed else ""
        return [made.encode(), *(_file_contents(source) if elsewhere else [])]
    if isinstance(source, ImagesInMemory):
        return _some_rows(source.images, MOST_BYTES if elsewhere else MOST_HERE)
    if type(source.dataset) is TensorDataset:
        return [part for tensor in source.dataset.tensors for part in _some_rows(tensor)]
    return _sample_contents(source)


def _file_contents(source: ImageFiles) -> Iterator[bytes]:
    """Yields the sizes of all files and the contents of some files, or of their copies in a packed copy."""
    paths = source.paths
    if paths.packed is None:
        sizes, _ = paths.file_states()
    else:
        sizes = paths.packed.pack.columns["length"][paths.packed.rows].astype(numpy.int64)
    yield sizes.tobytes()
    count = max(1, min(len(paths), MOST_BYTES * len(paths) // max(1, int(sizes.sum()))))
    for index in spread(count, len(paths)).tolist():
        # An unreadable file is reported when a batch needs it.
        if 0 < sizes[index] <= MOST_BYTES:
            yield paths.read(index)


def _some_rows(tensor: Tensor, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """Yields a tensor's type, shape, and some of its rows, as bytes."""
    yield f"{tensor.dtype} {list(tensor.shape)}".encode()
    row_bytes = max(1, tensor[0].numel() * tensor.element_size())
    count = max(1, min(len(tensor), most_bytes // row_bytes))
    rows = tensor if count == len(tensor) else tensor[spread(count, len(tensor))]
    yield _tensor_bytes(rows)


def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sample_contents(source: UserSamples) -> Iterator[bytes]:
    """Yields the labels of some samples, and a few inputs if these are equal when they are read twice."""
    inputs, again = list[bytes](), list[bytes]()
    with restored_generators():
        for place, index in enumerate(spread(min(LABELS, len(source)), len(source)).tolist()):
            seed_generators(index)
            content, label = read_user_sample(source, index)
            yield _object_bytes(label) or str(label).encode()
            if place % (LABELS // INPUTS) == 0:
                inputs.append(_object_bytes(content))
                seed_generators(index)
                again.append(_object_bytes(read_user_sample(source, index)[0]))
    # A data set with its own random generator may return different inputs on each process.
    yield from inputs if inputs == again else ()


def _object_bytes(content: Any) -> bytes:
    if isinstance(content, Tensor):
        return _tensor_bytes(content)
    return content.tobytes() if isinstance(content, numpy.ndarray | Image.Image) else b""

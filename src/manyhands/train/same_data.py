"""Checks that all processes see the same data: classes, labels, file names and contents.

Reading all contents would take as long as an epoch, so only a part is compared, spread evenly over the split; a small
split is compared entirely.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.checkpoint.trained import INITIAL_WEIGHTS, TRAINABLE, TrainedNetwork, noted_trained_on
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.random import spread
from manyhands.data.samples import read_own, restored_generators, seed_generators
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source, Splits, UserSamples
from manyhands.parallel.apply import compare_replicas

# Bytes of each split that are compared, fewer where all read the same disk; and of a user's own data set the samples
# whose labels are, and whose x is.
MOST_BYTES, MOST_HERE, LABELS, INPUTS = 32 << 20, 2 << 20, 16, 4
HELD_OUT = "held-out"


def refuse_other_data(splits: Splits, world: World) -> None:
    """Raises UserError if a process has different data than rank 0; a collective."""
    if world.alone:
        return
    parts = dict(_parts(splits, elsewhere=world.local_size < world.size))
    # First whether all have the same to compare: other splits, or other kinds of them, have other names.
    kinds = {"classes": parts["classes"], "splits and kinds of data": [name.encode() for name in parts]}
    drift = _compare(kinds, world) or _compare(parts, world)
    if drift:
        name, ranks = drift
        raise UserError(
            f"rank {', '.join(map(str, ranks))} has different {name} than rank 0",
            "data.name",
            (
                "copy the same data to every machine; rsync -c compares file contents",
                "for a custom data set, return the same samples in every process and seed random numbers",
            ),
        )


def digest_data(splits: Splits) -> dict[str, str]:
    """Returns digests of the data by name: lengths, shapes, labels, file names, and some of the samples."""
    found = {name: _digest(content).hex() for name, content in _parts(splits, elsewhere=False)}
    return found if splits.held_out is not None else {**found, f"{HELD_OUT} data": ""}


def digest_trainable(model: nn.Module) -> dict[str, str]:
    """Returns a digest of the names of the trainable parameters."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {TRAINABLE: _digest(name.encode() for name in names).hex()}


def digest_weights(model: nn.Module) -> dict[str, str]:
    """Returns a digest of a network's initial weights; empty if they can't be compared with those of another start.

    A program that doesn't seed torch (with a number below 2^32) has other random weights at each start. A network that
    this process has trained or loaded before has no initial weights.
    """
    if torch.initial_seed() >= 1 << 32 or noted_trained_on(model) is not None:
        return {}
    try:
        state = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
        parts = [part for name, one in state.items() for part in (name.encode(), _bytes_of(one))]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return {}  # parameters that get their shapes later, or are not plain tensors
    return {INITIAL_WEIGHTS: _digest(parts).hex()}


def split_names(splits: Splits) -> Iterator[tuple[str, Source]]:
    """Yields each split with its name in digests and messages; the held-out set has the same name in all runs."""
    for word, source in splits.named():
        yield HELD_OUT if source is splits.held_out else word, source


def refuse_other_classes(old: Sequence[str], new: Sequence[str], where: str) -> None:
    """Raises UserError if the checkpoint's class names or their order changed: outputs would change their meaning.

    A class named like its number has no known name, and nothing is compared where one side knows no names.
    """
    then, now = map(_known_names, (old, new))
    if not then or not now or then == now:
        return
    gone, added = [name for name in then if name not in now], [name for name in now if name not in then]
    found = [f"{_quoted(names)} {word}" for names, word in ((gone, "removed"), (added, "added")) if names]
    from manyhands.data.walk import lookalike_difference

    changes = f"the classes of the data changed: {', '.join(found)}"
    if not found:
        changes = f"the order of the classes changed from {_quoted(then)} to {_quoted(now)}"
    alike = [difference for name in new if name not in old and (difference := lookalike_difference(name, old))]
    hints = (*alike[:3], "undo the change of the class names", "or start a new run in another folder: --out NEW")
    raise UserError(f"{changes}, so the network's outputs would no longer match them", where, hints)


def _known_names(names: Sequence[str]) -> list[str]:
    """The names without those at the end that are only numbers of outputs."""
    count = len(names)
    while count and names[count - 1] == str(count - 1):
        count -= 1
    return list(names[:count])


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:5]) + (" …" if len(names) > 5 else "")


def data_changes(then: TrainedNetwork, now: TrainedNetwork, words: Collection[str] = (), *, contents: bool) -> str:
    """Names the data sets whose labels, number of samples or, with `contents`, samples changed; empty if none did.

    With `words`, only the splits of these names are compared.
    """
    found = list[str]()
    for name in then.changed(now.digests):
        word, _, kind = name.rpartition(" ")
        if word.startswith("metric ") or name not in then.digests or (words and word not in words):
            continue
        if kind in {"samples", "pictures"} and contents:
            found.append(name)
        elif kind == "data":
            before, after = (each.samples.get(word, 0 if word == HELD_OUT else -1) for each in (then, now))
            what = "labels" if before == after else f"{after:,} samples, was {before:,}"
            found.append(f"{name} ({'labels or number of samples' if -1 in (before, after) else what})")
    return ", ".join(found)


def _compare(parts: Mapping[str, Iterable[bytes]], world: World) -> tuple[str, list[int]] | None:
    """The first that differs, and the ranks where it does; a collective of processes with the same names."""
    prints = {
        name: torch.frombuffer(bytearray(_digest(content)), dtype=torch.int64).to(world.device)
        for name, content in parts.items()
    }
    return compare_replicas(prints, world)


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[:8]


def _parts(splits: Splits, *, elsewhere: bool) -> Iterator[tuple[str, Iterable[bytes]]]:
    """What is compared, by its name in an error; `elsewhere`: some processes read other disks."""
    yield "classes", [name.encode(errors="surrogateescape") for name in splits.classes]
    for word, source in split_names(splits):
        labels = [] if source.labels is None else [source.labels.numpy().tobytes()]
        yield f"{word} data", [str(len(source)).encode(), *labels]
        if isinstance(source, ImageFiles):
            # Below the folder that holds all, which may lie elsewhere on another machine.
            yield f"names of {word} pictures", source.paths.blocks()
        kind = "samples" if isinstance(source, UserSamples) else "pictures"
        yield f"{word} {kind}", _contents(source, elsewhere=elsewhere)


def _contents(source: Source, *, elsewhere: bool) -> Iterable[bytes]:
    if isinstance(source, ImageFiles):
        made = source.packed.pack.made if source.packed else ""
        return [made.encode(), *(_of_files(source) if elsewhere else [])]
    if isinstance(source, ImagesInMemory):
        return _rows(source.images, MOST_BYTES if elsewhere else MOST_HERE)
    if type(source.dataset) is TensorDataset:
        return [part for tensor in source.dataset.tensors for part in _rows(tensor)]
    return _of_samples(source)


def _of_files(source: ImageFiles) -> Iterator[bytes]:
    """All sizes, and the contents of some files; those of a packed copy count as the files that they are of."""
    paths, packed = source.paths, source.packed
    found = numpy.fromiter(map(_size, paths), numpy.int64) if packed is None else packed.sizes()
    sizes = found.astype(numpy.int64)
    yield sizes.tobytes()
    count = max(1, min(len(paths), MOST_BYTES * len(paths) // max(1, int(sizes.sum()))))
    for index in spread(count, len(paths)).tolist():
        # A file that can't be read is reported when it is needed.
        if 0 < sizes[index] <= MOST_BYTES:
            content = source.content(index)
            yield Path(paths[index]).read_bytes() if content is None else content


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - a million of these
    except OSError:
        return -1


def _rows(tensor: Tensor, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """A tensor's type and shape, and the bytes of some of its rows."""
    yield f"{tensor.dtype} {list(tensor.shape)}".encode()
    row_bytes = max(1, tensor[0].numel() * tensor.element_size())
    count = max(1, min(len(tensor), most_bytes // row_bytes))
    rows = tensor if count == len(tensor) else tensor[spread(count, len(tensor))]
    yield _bytes_of(rows)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _of_samples(source: UserSamples) -> Iterator[bytes]:
    """The labels of some samples; and the x of some, where all of these are equal when they are read twice."""
    inputs, again = list[bytes](), list[bytes]()
    with restored_generators():
        for place, index in enumerate(spread(min(LABELS, len(source)), len(source)).tolist()):
            seed_generators(index)
            content, label = read_own(source, index)
            yield _bytes_of_any(label) or str(label).encode()
            if place % (LABELS // INPUTS) == 0:
                inputs.append(_bytes_of_any(content))
                seed_generators(index)
                again.append(_bytes_of_any(read_own(source, index)[0]))
    # A generator of the data set's own may well differ from process to process.
    yield from inputs if inputs == again else ()


def _bytes_of_any(content: Any) -> bytes:
    if isinstance(content, Tensor):
        return _bytes_of(content)
    return content.tobytes() if isinstance(content, numpy.ndarray | Image.Image) else b""

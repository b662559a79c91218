"""CIFAR's published files: the binary records and the python batches, in a folder or in their archive.

Binary record: one label byte (CIFAR-100: coarse, then fine), then 3,072 bytes: red, green, blue, row by row.
Python batch: a pickle of {"data": uint8 [n, 3072], "labels" or "fine_labels": list}.

Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

import io
import os
import pickle
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.outside import open_file
from manyhands.data.known import Layout
from manyhands.data.splits import ImagesInMemory, check_labels

_PIXELS = 3 * 32 * 32
_MOST_BYTES = 1 << 29  # of one file; the largest published one has 150 MB
_MOST_PACKED_BYTES = 1 << 31  # of all that an archive unpacks to
_MEND = ("fetch it again, or copy it anew",)

_ERRORS = (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError)
_MORE_ERRORS = (UnicodeError, OverflowError, AssertionError)


def read_files(place: Path, layout: Layout) -> dict[str, bytes]:
    """A layout's files by name, of a folder or an archive, read front to back. Raises UserError: one is missing."""
    needed = (*layout.train, layout.test)
    names = (*needed, layout.names)
    found: dict[str, bytes] = {}
    try:
        if place.is_dir():
            for name in names:
                if name and (place / name).exists():
                    with open_file(place / name) as file:
                        _check_size(name, os.fstat(file.fileno()).st_size, place)
                        found[name] = file.read()
        else:
            with open_file(place) as there, tarfile.open(fileobj=there) as archive:
                for member in archive:
                    _check_size(place.name, member.offset_data + member.size, place, _MOST_PACKED_BYTES)
                    word = PurePosixPath(member.name).name
                    content = archive.extractfile(member) if member.isfile() and word in names else None
                    if content is not None:
                        _check_size(word, member.size, place)
                        found[word] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        raise UserError(f"{place.name} can't be read: {error}", str(place), _MEND) from error
    missing = [name for name in needed if name not in found]
    if missing:
        raise UserError(f"{place.name} has no {', '.join(missing)}", str(place), _MEND)
    return found


def _check_size(name: str, size: int, place: Path, most: int = _MOST_BYTES) -> None:
    """Raises UserError before memory or time is taken for what is none of CIFAR's, whatever its name."""
    if size > most:
        raise UserError(f"{name} has {size:,} bytes; CIFAR's has {most:,} at most", str(place), _MEND)


def read_split(files: dict[str, bytes], names: tuple[str, ...], layout: Layout, classes: int) -> ImagesInMemory:
    """Joins the files of one split: uint8 [N, 3, 32, 32], int64 [N]. Raises UserError: a file or a label is wrong."""
    read = _read_records if layout.label_bytes else _read_batch
    parts = [read(files[name], name, layout) for name in names]
    labels = [check_labels(labels, classes, name) for name, (_, labels) in zip(names, parts, strict=True)]
    return ImagesInMemory(torch.cat([images for images, _ in parts]).view(-1, 3, 32, 32), torch.cat(labels))


def read_class_names(content: bytes, layout: Layout, place: str) -> tuple[str, ...]:
    """The class names: one on each line, or in the pickle's "label_names" or "fine_label_names"."""
    if layout.label_bytes:
        return tuple(content.decode("utf-8", "replace").split())
    names = _field(read_plain(content, place), layout.key.removesuffix("s") + "_names", place)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise UserError(f"{place}: expected a list of class names, found {type(names).__name__}", place, _MEND)
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)


def _read_records(content: bytes, place: str, layout: Layout) -> tuple[Tensor, Tensor]:
    length = layout.label_bytes + _PIXELS
    if not content or len(content) % length:
        what = f"{place}: expected whole records of {length:,} bytes, found {len(content):,} bytes"
        raise UserError(what + f" ({len(content) / length:,.3f} records)", place, _MEND)
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, length)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]


def _read_batch(content: bytes, place: str, layout: Layout) -> tuple[Tensor, Tensor]:
    batch = read_plain(content, place)
    images, labels = as_tensor(_field(batch, "data", place)), _field(batch, layout.key, place)
    if images is None or images.ndim != 2 or images.shape[1] != _PIXELS or not len(images):
        raise UserError(f'{place}: expected "data" to be bytes [n, {_PIXELS:,}]', place, _MEND)
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 1 << 31 for label in labels):
        raise UserError(f'{place}: expected "{layout.key}" to be a list of whole numbers', place, _MEND)
    if len(labels) != len(images):
        raise UserError(f"{place}: {len(images):,} pictures, but {len(labels):,} labels", place, _MEND)
    return images, torch.tensor(labels)


def _field(content: Any, key: str, place: str) -> Any:
    """A value of the pickle's dict, whose keys are text or bytes."""
    if isinstance(content, dict):
        for word in (key, key.encode()):
            if word in content:
                return content[word]
    raise UserError(f'{place} has no "{key}"', place, _MEND)


class ByteArray:
    """A numpy array as the pickle describes it."""

    def __init__(self, *_: object) -> None:
        self.values = torch.empty(0, dtype=torch.uint8)  # uint8, of the array's shape, once its state was read

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Takes numpy's own state: version, shape, type, column order, bytes."""
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _Kind) or kind.name != "u1" or by_columns or not isinstance(content, bytes):
            raise pickle.UnpicklingError("only arrays of bytes, row by row, are allowed")
        self.values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(*shape)


class _Kind:
    """A numpy type: its name is all that counts."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, _: object) -> None:
        """Byte order and flags; bytes have none."""


def _encode(text: str, encoding: str) -> bytes:
    """What newer writers of old pickles use for bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown encoding {encoding!r}")
    return text.encode("latin1")


# A pickle names functions to call; none is looked up, and these few names stand for inert classes.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): ByteArray,
    ("numpy._core.multiarray", "_reconstruct"): ByteArray,
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


def read_plain(content: bytes, place: str) -> Any:
    """Reads a pickle of plain data, byte arrays; text of Python 2 comes as bytes. Raises UserError: it holds more."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except (*_ERRORS, *_MORE_ERRORS, MemoryError, RecursionError, ImportError, RuntimeError) as error:
        mend = ("fetch the file again from its publisher",)
        raise UserError(f"{place} is no pickle of plain data: {error}", place, mend) from error


def as_tensor(value: Any) -> Tensor | None:
    return value.values if isinstance(value, ByteArray) else None

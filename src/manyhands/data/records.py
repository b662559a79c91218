"""Strict readers of MNIST's and CIFAR's files; a deviation from the published format raises UserError.

IDX (MNIST): two zero bytes, a type (8: bytes), the number of dimensions, each size in four bytes (big-endian), then the
values; a file that ends in .gz is the same, compressed.
CIFAR's binary record: one label byte (CIFAR-100: coarse, then fine), then 3,072 bytes: red, green, blue, row by row.
CIFAR's Python batch: a pickle of {"data": uint8 [n, 3072], "labels" or "fine_labels": list}.

Sources: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits"; A. Krizhevsky, "Learning
multiple layers of features from tiny images", 2009.
"""

import gzip
import io
import lzma
import math
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.files import open_file
from manyhands.data.known import CifarForm
from manyhands.data.splits import ImagesInMemory, check_labels

_HINTS = ("delete the file, then download or copy the file again",)

_IDX_BYTES = 0x08
_MOST_IDX_BYTES = 1 << 32
_BLOCK = 1 << 20
# Pictures, unlike labels, don't compress to a hundredth.
_LIKELY_BYTES = 64 << 20
_MOST_COMPRESSION = 100

_CIFAR_PIXELS = 3 * 32 * 32
_MOST_CIFAR_BYTES = 1 << 29  # of one file; the largest published one has 150 MB
_MOST_ARCHIVE_BYTES = 1 << 31  # of all files in an archive


def _refuse(what: str, place: Path | str) -> NoReturn:
    raise UserError(what, str(place), _HINTS)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads an IDX file of bytes, plain or .gz, as uint8 [N, H, W] (3 dimensions) or [N] (1)."""
    try:
        with open_file(path) as stored, gzip.open(stored) if path.suffix == ".gz" else stored as file:
            shape = _read_idx_shape(file, path, dimensions)
            expected, content = math.prod(shape), bytearray()
            # In blocks: needs memory for the file's actual content, whatever its header claims.
            while len(content) <= expected and (block := file.read(min(_BLOCK, expected + 1 - len(content)))):
                content += block
    except (EOFError, OSError, ValueError, zlib.error) as error:
        what = f"{path.name} can't be read: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, str(path), _HINTS) from error
    if len(content) != expected:
        found = "more" if len(content) > expected else f"{len(content):,}"
        _refuse(f"{path.name}: expected {expected:,} values ({_times(shape)}), found {found}", path)
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _read_idx_shape(file: IO[bytes] | gzip.GzipFile, path: Path, dimensions: int) -> tuple[int, ...]:
    length = 4 + 4 * dimensions
    header = file.read(length)
    expected = struct.pack(">HBB", 0, _IDX_BYTES, dimensions)
    if header[:4] != expected:
        found = header[:4].hex(" ")
        _refuse(f"{path.name}: expected an IDX file (first bytes {expected.hex(' ')}), found {found}", path)
    if len(header) < length:
        _refuse(f"{path.name}: expected a header of {length} bytes, found {len(header)}", path)
    shape = struct.unpack(f">{dimensions}I", header[4:])
    values, stored = math.prod(shape), path.stat().st_size
    if not 0 < values <= _MOST_IDX_BYTES:
        what = f"{path.name}: expected 1 to {_MOST_IDX_BYTES:,} values, found {_times(shape)} in the header"
        raise UserError(what, str(path))
    if path.suffix == ".gz" and values > max(_LIKELY_BYTES, stored * _MOST_COMPRESSION):
        _refuse(f"{path.name}: the header says {values:,} values, too many for {stored:,} compressed bytes", path)
    return shape


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def read_mnist_split(images: Path, labels: Path, classes: int) -> ImagesInMemory:
    pictures, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(numbers):
        counts = f"{len(pictures):,} pictures and {labels.name} {len(numbers):,} labels"
        _refuse(f"{images.name} holds {counts}", images.parent)
    return ImagesInMemory(pictures.unsqueeze(1), check_labels(numbers, classes, str(labels)))


def read_cifar_files(place: Path, form: CifarForm) -> dict[str, bytes]:
    """Reads the files of a CIFAR format from a folder or an archive; returns their contents by name."""
    needed = (*form.train, form.test)
    names = (*needed, form.names)
    found: dict[str, bytes] = {}
    try:
        if place.is_dir():
            for name in names:
                if name and (place / name).exists():
                    with open_file(place / name) as file:
                        _check_size(name, os.fstat(file.fileno()).st_size, place)
                        found[name] = file.read()
        else:
            with open_file(place) as stored, tarfile.open(fileobj=stored) as archive:
                for member in archive:
                    _check_size(place.name, member.offset_data + member.size, place, _MOST_ARCHIVE_BYTES)
                    name = PurePosixPath(member.name).name
                    content = archive.extractfile(member) if member.isfile() and name in names else None
                    if content is not None:
                        _check_size(name, member.size, place)
                        found[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{place.name} can't be read: {error}", str(place), _HINTS) from error
    if missing := [name for name in needed if name not in found]:
        _refuse(f"{place.name} has no {', '.join(missing)}", place)
    return found


def _check_size(name: str, size: int, place: Path, most: int = _MOST_CIFAR_BYTES) -> None:
    if size > most:
        _refuse(f"{name} has {size:,} bytes, expected at most {most:,}", place)


def read_cifar_split(files: dict[str, bytes], names: tuple[str, ...], form: CifarForm, classes: int) -> ImagesInMemory:
    read = _read_records if form.label_bytes else _read_batch
    parts = [read(files[name], name, form) for name in names]
    labels = [check_labels(labels, classes, name) for name, (_, labels) in zip(names, parts, strict=True)]
    return ImagesInMemory(torch.cat([images for images, _ in parts]).view(-1, 3, 32, 32), torch.cat(labels))


def read_cifar_names(content: bytes, form: CifarForm) -> tuple[str, ...]:
    """Returns the class names: one per line, or the pickle's "label_names" or "fine_label_names"."""
    if form.label_bytes:
        return tuple(content.decode("utf-8", "replace").split())
    names = _field(_read_pickle(content, form.names), form.key.removesuffix("s") + "_names", form.names)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        _refuse(f"{form.names}: expected a list of class names, found {type(names).__name__}", form.names)
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)


def _read_records(content: bytes, file: str, form: CifarForm) -> tuple[Tensor, Tensor]:
    length = form.label_bytes + _CIFAR_PIXELS
    if not content or len(content) % length:
        found = f"{len(content):,} bytes ({len(content) / length:,.3f} records)"
        _refuse(f"{file}: expected whole records of {length:,} bytes, found {found}", file)
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, length)
    return records[:, form.label_bytes :], records[:, form.label_bytes - 1]


def _read_batch(content: bytes, file: str, form: CifarForm) -> tuple[Tensor, Tensor]:
    batch = _read_pickle(content, file)
    data, labels = _field(batch, "data", file), _field(batch, form.key, file)
    try:
        _, shape, kind, by_columns, stored = data.state
        if kind.arguments[0] not in ("u1", b"u1") or by_columns or not isinstance(stored, bytes):
            raise ValueError("the array is not uint8 in C order")
        images = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(*shape)
        if images.ndim != 2 or images.shape[1] != _CIFAR_PIXELS:
            raise ValueError(f"the array is not [n, {_CIFAR_PIXELS:,}]")
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        what = f'{file}: expected "data" to be bytes [n, {_CIFAR_PIXELS:,}], row by row'
        raise UserError(what, file, _HINTS) from error
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 1 << 31 for label in labels):
        _refuse(f'{file}: expected "{form.key}" to be a list of whole numbers', file)
    if len(labels) != len(images):
        _refuse(f"{file}: {len(images):,} pictures, but {len(labels):,} labels", file)
    return images, torch.tensor(labels)


def _field(content: Any, key: str, file: str) -> Any:
    for word in (key, key.encode()):
        if isinstance(content, dict) and word in content:
            return content[word]
    _refuse(f'{file} has no "{key}"', file)


class _Inert:
    """Replaces numpy's arrays and types, which crash on some damaged pickles; keeps arguments and state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: str, encoding: str) -> bytes:
    """Replaces _codecs.encode, which recent writers of old pickle protocols use for bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Inert,
    ("numpy._core.multiarray", "_reconstruct"): _Inert,
    ("numpy", "ndarray"): _Inert,
    ("numpy", "dtype"): _Inert,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that imports nothing: it maps the few allowed names to inert classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]


def _read_pickle(content: bytes, file: str) -> Any:
    """Reads a pickle of plain data and byte arrays; returns strings of Python 2 as bytes."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        raise UserError(f"{file} is not a pickle of plain data: {error}", file, _HINTS) from error

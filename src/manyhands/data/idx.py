"""MNIST's own IDX format, read strictly: magic, type, sizes, and exactly as many bytes as they call for.

A file is: two zero bytes, a type (8: bytes), the number of dimensions, each size as four bytes (big end first),
then the values. A file that ends in .gz is the same, compressed.

Source: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits".
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.outside import UnreadableError, open_file
from manyhands.data.splits import ImagesInMemory, check_labels

_BYTES = 0x08
_MOST_BYTES = 1 << 32
_BLOCK = 1 << 20
# No packed pictures are a hundredth of themselves; a file that says so would take memory for nothing. Labels may be.
_LIKELY_BYTES = 64 << 20
_MOST_TIMES_PACKED = 100
_MEND = ("delete the file and fetch it again, or copy it anew",)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads an IDX file of bytes, plain or .gz: uint8 [N, H, W] for 3 dimensions, [N] for 1. Raises UserError: none."""
    try:
        with open_file(path) as there, gzip.open(there) if path.suffix == ".gz" else there as file:
            shape = _read_shape(file, path, dimensions)
            wanted = math.prod(shape)
            if path.suffix == ".gz":
                _check_likely(path, wanted)
            content = _read_at_most(file, wanted + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path.name} is not a whole gzip file: {error}", str(path), _MEND) from error
    except OSError as error:
        raise UserError(f"{path.name} can't be read: {error.strerror or error}", str(path)) from error
    except UnreadableError as error:
        raise UserError(f"{path.name} can't be read: {error}", str(path), _MEND) from error
    if len(content) != wanted:
        found = "more" if len(content) > wanted else f"{len(content):,}"
        raise UserError(f"{path.name}: expected {wanted:,} values ({_times(shape)}), found {found}", str(path), _MEND)
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def write_idx(path: Path, values: Tensor) -> None:
    """Writes uint8 values of any shape as an IDX file; compressed, without a date, where it ends in .gz."""
    header = struct.pack(f">HBB{values.ndim}I", 0, _BYTES, values.ndim, *values.shape)
    content = header + values.contiguous().numpy().tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_pair(images: Path, labels: Path, classes: int) -> ImagesInMemory:
    """Reads pictures [N, H, W] and their labels [N]. Raises UserError: one is wrong, or they don't belong together."""
    pictures, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(numbers):
        what = f"{images.name} holds {len(pictures):,} pictures and {labels.name} {len(numbers):,} labels"
        raise UserError(what, str(images.parent), _MEND)
    return ImagesInMemory(pictures.unsqueeze(1), check_labels(numbers, classes, str(labels)))


def _check_likely(path: Path, wanted: int) -> None:
    """Raises UserError where a packed file is far smaller than what its header says, before memory is taken."""
    there = path.stat().st_size
    if wanted > max(_LIKELY_BYTES, there * _MOST_TIMES_PACKED):
        what = f"{path.name}: its header says {wanted:,} values, and the packed file has {there:,} bytes"
        raise UserError(what, str(path), _MEND)


def _read_at_most(file: "IO[bytes] | gzip.GzipFile", count: int) -> bytearray:
    """Up to `count` bytes; takes memory for what is there, whatever the header says, and for that only once."""
    content = bytearray()
    while len(content) < count and (block := file.read(min(_BLOCK, count - len(content)))):
        content += block
    return content


def _read_shape(file: "IO[bytes] | gzip.GzipFile", path: Path, dimensions: int) -> tuple[int, ...]:
    header = file.read(4 + 4 * dimensions)
    expected = struct.pack(">HBB", 0, _BYTES, dimensions)
    if header[:4] != expected:
        what = f"{path.name}: expected an IDX file (first bytes {expected.hex(' ')}), found {header[:4].hex(' ')}"
        raise UserError(what, str(path), _MEND)
    if len(header) < 4 + 4 * dimensions:
        what = f"{path.name}: expected a header of {4 + 4 * dimensions} bytes, found {len(header)}"
        raise UserError(what, str(path), _MEND)
    shape = struct.unpack(f">{dimensions}I", header[4:])
    if not 0 < math.prod(shape) <= _MOST_BYTES:
        what = f"{path.name}: expected 1 to {_MOST_BYTES:,} values, its header says {_times(shape)}"
        raise UserError(what, str(path))
    return shape


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)

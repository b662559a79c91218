"""A folder of small pictures, decoded once for each host, kept in the user's cache and mapped into memory.

All processes of a host share the mapped pages. A cache entry is named by what lies in the folder (names, sizes,
times), so changed pictures are decoded anew. `<key>.npy` has the pixels; `<key>.json`, written last, says that they
are whole, and which pictures couldn't be read.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from manyhands.core.files import committed, one_at_a_time, read_object
from manyhands.data.decode import CorruptImageError, decode, probe
from manyhands.data.folder import Listing
from manyhands.data.pictures import to_tensor
from manyhands.data.places import cache_folder

_FORMAT = 2  # changes with what decoding makes of a picture, too
_BLOCK = 1024
_MOST_THREADS = 8


@dataclass(frozen=True)
class Decoded:
    """A listing's pixels."""

    images: Tensor  # uint8 [N, C, S, S]; black where a picture can't be read
    corrupt: tuple[int, ...]  # the indices of those


class _DiffersError(Exception):
    """A picture has another size, or colours where the set is grey."""


def decode_once(listing: Listing, channels: int, size: int, *, grey_only: bool) -> Decoded | None:
    """Decodes every picture, or takes the result that this host has already; each should be size x size.

    None where a picture differs in size, or has colours and `grey_only` is set. Raises UserError: the cache folder
    can't be written.
    """
    pixels = cache_folder() / "decoded" / f"{_key(listing, 'pixels', channels, size, grey_only)}.npy"
    report_file = pixels.with_suffix(".json")
    with one_at_a_time(pixels):
        report = _read_json(report_file)
        if report is None or not (report["differs"] or pixels.is_file()):
            report = _decode_all(listing, pixels, channels, size, grey_only)
            _write_json(report_file, report)
    if report["differs"]:
        return None
    # Copy on write, never written: torch takes no read-only arrays, and the pages stay shared.
    return Decoded(torch.from_numpy(numpy.load(pixels, mmap_mode="c")), tuple(report["corrupt"]))


def find_corrupt_once(listing: Listing) -> tuple[int, ...]:
    """Decodes every picture to see which can't be read, or takes what this host knows already; their indices."""
    report_file = cache_folder() / "decoded" / f"{_key(listing, 'corrupt')}.json"
    with one_at_a_time(report_file):
        report = _read_json(report_file)
        if report is None:
            readable = _in_threads(lambda index: _readable(listing, index), len(listing))
            report = {"corrupt": [index for index, good in enumerate(readable) if not good]}
            _write_json(report_file, report)
    return tuple(report["corrupt"])


def _decode_all(listing: Listing, target: Path, channels: int, size: int, grey_only: bool) -> dict[str, Any]:
    """Writes the pixels in order, block by block (a mapped file would kill the process when the disk is full)."""
    corrupt: list[int] = []

    def one(index: int) -> bytes | None:
        return _pixels(listing, index, channels, size, grey_only)

    try:
        with committed(target) as part, part.open("wb") as file:
            shape = (len(listing), channels, size, size)
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            numpy.lib.format.write_array_header_1_0(file, header)
            for index, content in enumerate(_in_threads(one, len(listing))):
                if content is None:
                    corrupt.append(index)
                file.write(content if content is not None else bytes(channels * size * size))
    except _DiffersError:
        return {"differs": True, "corrupt": []}
    return {"differs": False, "corrupt": corrupt}


def _pixels(listing: Listing, index: int, channels: int, size: int, grey_only: bool) -> bytes | None:
    """A picture's bytes, channel by channel; None where it can't be read."""
    path, content = listing.path(index), listing.content(index)
    try:
        if grey_only and not probe(path, content).grey:
            raise _DiffersError
        image = decode(path, channels, content)
    except CorruptImageError:
        return None
    if image.size != (size, size):
        raise _DiffersError
    return to_tensor(image).numpy().tobytes()


def _readable(listing: Listing, index: int) -> bool:
    try:
        decode(listing.path(index), 3, listing.content(index))
    except CorruptImageError:
        return False
    return True


def _in_threads(function: Callable[[int], Any], count: int) -> Iterator[Any]:
    """Applies a function to 0 … count - 1, in order; Pillow decodes outside Python's lock."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, count, _BLOCK):
            yield from pool.map(function, range(start, min(start + _BLOCK, count)))


def _key(listing: Listing, *purpose: object) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {purpose} {listing.root.resolve()}".encode(errors="surrogateescape"))
    if listing.packed:
        digest.update(listing.packed.pack.digest.encode() + listing.packed.rows.tobytes())
        return digest.hexdigest()[:32]
    for index, name in enumerate(listing.names):
        state = os.stat(listing.path(index))  # noqa: PTH116 - tens of thousands of these
        digest.update(f"{name}\0{state.st_size} {state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _read_json(path: Path) -> dict[str, Any] | None:
    report = read_object(path)
    return report if report and isinstance(report.get("corrupt"), list) else None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with committed(path) as part:
        part.write_text(json.dumps(content), encoding="utf-8")

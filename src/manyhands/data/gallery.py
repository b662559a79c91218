"""Opens a folder of pictures. Small pictures of one size are decoded once per host; others are decoded when read.

The key of a cache entry is a digest of the names, sizes and times of the folder's files. <key>.npy has the pixels;
<key>.json, written last, marks the pixels as complete and lists the unreadable pictures.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.files import locked, read_object, replaced_on_success, write_atomic
from manyhands.data.decode import CorruptImageError, decode, read_header
from manyhands.data.folder import Listing, list_once_per_machine
from manyhands.data.options import DataOptions, cache_folder
from manyhands.data.pictures import to_tensor
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source, Splits, describe
from manyhands.data.transforms import Pixels, imagenet_pixels, measure_pixels, spread

_FORMAT = 2  # changes with the result of decoding, too
_BLOCK = 1024
_MOST_THREADS = 8
Decoded = tuple[Tensor, tuple[int, ...]]  # uint8 [N, C, S, S], and the indices of unreadable pictures, which are black
_PROBES = 32
_SMALL = 64
_USUAL_SIZE = 224


class _DiffersError(Exception):
    """Raised for a picture that doesn't have the expected size, or has color although grey is expected."""


def decode_once_per_host(listing: Listing, channels: int, size: int = 0, *, grey_only: bool = False) -> Decoded | None:
    """Decodes all pictures, once per host, and caches the pixels. With `size` 0, only finds unreadable pictures.

    Returns None if a picture isn't `size` x `size` or, with `grey_only`, isn't grey.
    """
    pixels = cache_folder() / "decoded" / f"{_cache_key(listing, 'pixels', channels, size, grey_only)}.npy"
    file = pixels.with_suffix(".json")
    with locked(file):
        report = read_object(file)
        complete = report and isinstance(report.get("corrupt"), list) and (report.get("differs") or pixels.is_file())
        if not report or not complete:
            try:
                report = _decode_all(listing, pixels, channels, size, grey_only)
                write_atomic(file, json.dumps(report))
            except OSError as error:
                what = f"{pixels.name} can't be written: {error.strerror or error}"
                hint = "free disk space or choose another folder: --data-dir for data, MANYHANDS_CACHE for the cache"
                raise UserError(what, str(pixels), (hint,)) from error
    if report["differs"]:
        return None
    # Copy-on-write, but never written: torch accepts no read-only arrays, and the pages stay shared.
    images = torch.from_numpy(numpy.load(pixels, mmap_mode="c")) if size else torch.empty(0)
    return images, tuple(report["corrupt"])


def _decode_all(listing: Listing, target: Path, channels: int, size: int, grey_only: bool) -> dict[str, Any]:
    """Writes all pixels to `target`, without mmap, which crashes on a full disk. Returns the content of <key>.json."""
    corrupt: list[int] = []

    def pixels(index: int) -> bytes | None:
        path = listing.names[index]
        try:
            content = listing.names.read(index)
            if grey_only and not read_header(path, content).grey:
                raise _DiffersError
            image = decode(path, channels, content)
        except CorruptImageError:
            return None
        if size and image.size != (size, size):
            raise _DiffersError
        return to_tensor(image).numpy().tobytes() if size else b""

    try:
        with replaced_on_success(target) as part, part.open("wb") as file:
            shape = (len(listing), channels, size, size)
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            numpy.lib.format.write_array_header_1_0(file, header)
            for index, content in enumerate(_in_threads(pixels, len(listing))):
                if content is None:
                    corrupt.append(index)
                file.write(content if content is not None else bytes(channels * size * size))
    except _DiffersError:
        return {"differs": True, "corrupt": []}
    return {"differs": False, "corrupt": corrupt}


def _in_threads(function: Callable[[int], Any], count: int) -> Iterator[Any]:
    """Yields function(0) … function(count - 1), computed in threads, because Pillow decodes without the GIL."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, count, _BLOCK):
            yield from pool.map(function, range(start, min(start + _BLOCK, count)))


def _cache_key(listing: Listing, *purpose: object) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {purpose} {listing.root.resolve()}".encode(errors="surrogateescape"))
    if packed := listing.names.packed:
        digest.update(packed.pack.digest.encode() + packed.rows.tobytes())
        return digest.hexdigest()[:32]
    for name, size_bytes, time_ns in zip(listing.names.names.tolist(), *listing.names.file_states(), strict=True):
        digest.update(name + f"\0{size_bytes} {time_ns}\n".encode())
    return digest.hexdigest()[:32]


def open_folder(
    root: Path, options: DataOptions, title: str = "", usual: Pixels | None = None, *, whole: bool = False
) -> Splits:
    """Opens a folder of class folders, or of train/ and val/ with class folders.

    Square pictures of one size, up to 64 pixels, stay in memory if they fit `options.memory_limit_mib`. `usual`:
    preprocessing to use instead of measured values. With `whole`, both splits have all pictures of the folder.
    Raises UserError if the folder can't be used.
    """
    listings, notes = list_once_per_machine(root, options, whole=whole)
    size, channels, equal = _probe_headers(listings[0], options.channels)
    in_memory = _try_decode(listings, size, channels, options) if equal else None
    if in_memory:
        pixels = measure_pixels(in_memory[0][0], "crop-flip")
    elif size <= _SMALL:
        pixels = imagenet_pixels(size, channels, "crop-flip")
    else:
        pixels = imagenet_pixels(_USUAL_SIZE, channels, "resized-crop-flip")
    opened = [_make_source(listing, in_memory[n] if in_memory else None, options) for n, listing in enumerate(listings)]
    sources, unreadable = [source for source, _ in opened], tuple(path for _, paths in opened for path in paths)
    train, test = sources[0], sources[0 if whole else 1]
    held_out = sources[2] if len(sources) > 2 else None
    if whole:
        text = f"{root.resolve().name}: {len(train):,} pictures, all of {root}"
    else:
        text = describe(title or root.resolve().name, train, test, str(root))
        text += f"; {len(unreadable):,} unreadable pictures skipped" if unreadable else ""
        text += f"; {len(held_out):,} more in {listings[2].folder}/ for the final test" if held_out is not None else ""
    notes = (*(note for listing in listings for note in listing.notes), *notes)
    packed = listings[0].names.packed
    pack = packed.pack.folder.name if packed else ""
    return Splits(train, test, listings[0].classes, text, usual or pixels, unreadable, notes, pack, held_out)


def _make_source(listing: Listing, decoded: Decoded | None, options: DataOptions) -> tuple[Source, list[str]]:
    """Returns the source of the readable pictures (in memory if `decoded`), and the paths of unreadable ones."""
    images, corrupt = decoded or (None, ())
    if decoded is None and options.skip_corrupt:
        _, corrupt = decode_once_per_host(listing, 3) or (None, ())
    good = numpy.delete(numpy.arange(len(listing)), corrupt)
    read = listing.take(good) if corrupt else listing
    labels, paths = torch.from_numpy(read.labels), list(map(listing.names.__getitem__, corrupt))
    if images is None:
        return ImageFiles(read.names, labels), paths
    return ImagesInMemory(images[good] if corrupt else images, labels), paths


def _probe_headers(listing: Listing, channels: int) -> tuple[int, int, bool]:
    """Returns (largest side, channels, True if all are squares of one size up to 64 pixels) from some headers."""
    seen = []
    for index in spread(_PROBES, len(listing)).tolist():
        with contextlib.suppress(CorruptImageError):
            seen.append(read_header(listing.names[index], listing.names.read(index)))
    if not seen:
        return _USUAL_SIZE, channels or 3, False
    sizes = {side for header in seen for side in (header.width, header.height)}
    equal = len(sizes) == 1 and max(sizes) <= _SMALL
    return max(sizes), channels or (1 if all(header.grey for header in seen) else 3), equal


def _try_decode(listings: tuple[Listing, ...], size: int, channels: int, options: DataOptions) -> list[Decoded] | None:
    """Decodes all splits, in RGB if any picture has color. Returns None if memory is too small or sizes differ."""
    total = sum(map(len, listings)) * channels * size * size
    if total > options.memory_limit_mib << 20:
        return None
    grey_only = channels == 1 and not options.channels
    opened: list[Decoded] = []
    for listing in listings:
        decoded = decode_once_per_host(listing, channels, size, grey_only=grey_only)
        if decoded is None:
            return _try_decode(listings, size, 3, options) if grey_only else None
        if decoded[1] and not options.skip_corrupt:
            bad = decoded[1][0]
            decode(listing.names[bad], channels, listing.names.read(bad))  # raises the error that made it unreadable
        opened.append(decoded)
    return opened

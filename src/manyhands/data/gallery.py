"""Opens a folder of pictures: small equal ones into memory, all others as files."""

from dataclasses import replace
from pathlib import Path

import numpy
import torch

from manyhands.data.decode import CorruptImageError, decode, probe
from manyhands.data.folder import Listing, divided, list_parts, list_whole
from manyhands.data.listed import Listed, listed_once
from manyhands.data.memory import Decoded, decode_once, find_corrupt_once
from manyhands.data.options import DataOptions
from manyhands.data.pack_choice import of_pack, with_pack
from manyhands.data.packed import is_pack
from manyhands.data.random import spread
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source, Splits, describe
from manyhands.data.statistics import measured_pixels, photograph_pixels
from manyhands.data.transforms import Pixels

_PROBES = 32
_SMALL = 64
_USUAL_SIZE = 224


def open_folder(root: Path, options: DataOptions, title: str = "", usual: Pixels | None = None) -> Splits:
    """Opens class folders, or train/ and val/ with class folders in them.

    Square pictures of one size up to 64 stay in memory, decoded, while they fit `options.memory_limit_mib`. With
    `options.skip_corrupt` every picture is decoded once to find those that can't be read; otherwise the first such
    picture is an error when it is reached. `usual`: mean, deviation and augmentation that are known for this data.
    Raises UserError: the folder can't be used.
    """
    if is_pack(root):
        parts, notes = of_pack(root)
        listings = divided(parts, options.validation)
    else:
        listings, notes = listed_once(root, options.model_dump_json(), lambda: _listed(root, options))
    opened = _open(listings, root, options, title, usual)
    return replace(opened, notes=(*opened.notes, *notes))


def _listed(root: Path, options: DataOptions) -> Listed:
    """The pictures for training, for evaluation and, where there are some, for the end."""
    parts, notes = with_pack(root, list_parts(root), options)
    return divided(parts, options.validation), notes


def open_whole_folder(root: Path, options: DataOptions) -> Splits:
    """Opens a folder of class folders undivided: both splits are all of it. Raises UserError: it can't be used."""
    if is_pack(root):
        (listing, *_), notes = of_pack(root)
    else:
        purpose = f"whole {options.model_dump_json()}"
        (listing,), notes = listed_once(root, purpose, lambda: with_pack(root, (list_whole(root),), options))
    opened = _open((listing, replace(listing, notes=())), root, options, "", None)
    text = f"{root.resolve().name}: {len(opened.test):,} pictures, all of {root}"
    notes = (*opened.notes, *notes)
    return replace(opened, description=text, skipped=tuple(dict.fromkeys(opened.skipped)), notes=notes)


def _open(listings: tuple[Listing, ...], root: Path, options: DataOptions, title: str, usual: Pixels | None) -> Splits:
    size, channels, equal = _look(listings[0], options.channels)
    opened = _in_memory(listings, size, channels, options) if equal else None
    if opened is None:
        skipped = [find_corrupt_once(listing) if options.skip_corrupt else () for listing in listings]
        sources: list[Source] = [_files(listing, bad) for listing, bad in zip(listings, skipped, strict=True)]
        small = size <= _SMALL
        augment = "crop-flip" if small else "resized-crop-flip"
        pixels = photograph_pixels(size if small else _USUAL_SIZE, channels, augment)
    else:
        skipped = [decoded.corrupt for decoded in opened]
        sources = [_memory(listing, decoded) for listing, decoded in zip(listings, opened, strict=True)]
        pixels = measured_pixels(opened[0].images, "crop-flip")
    names = tuple(listing.path(i) for listing, bad in zip(listings, skipped, strict=True) for i in bad)
    text = describe(title or root.resolve().name, sources[0], sources[1], str(root))
    text += f"; {len(names):,} unreadable pictures left out" if names else ""
    notes = tuple(note for listing in listings for note in listing.notes)
    held_out = sources[2] if len(sources) > 2 else None
    text += f"; {len(held_out):,} more in {listings[2].folder}/ are held out" if held_out is not None else ""
    packed = listings[0].packed.pack.folder.name if listings[0].packed else ""
    return Splits(
        sources[0],
        sources[1],
        listings[0].classes,
        text,
        usual or pixels,
        names,
        notes,
        held_out=held_out,
        packed=packed,
    )


def _look(listing: Listing, channels: int) -> tuple[int, int, bool]:
    """Reads some headers: the larger side, the channels, and whether they are equal squares of at most 64."""
    seen = []
    for index in spread(_PROBES, len(listing)).tolist():
        try:
            seen.append(probe(listing.path(index), listing.content(index)))
        except CorruptImageError:
            continue
    if not seen:
        return _USUAL_SIZE, channels or 3, False
    sizes = {side for header in seen for side in (header.width, header.height)}
    equal = len(sizes) == 1 and max(sizes) <= _SMALL
    return max(sizes), channels or (1 if all(header.grey for header in seen) else 3), equal


def _in_memory(listings: tuple[Listing, ...], size: int, channels: int, options: DataOptions) -> list[Decoded] | None:
    """All splits' pixels, or None where they don't fit or aren't equal; the colours of one make all RGB."""
    total = sum(map(len, listings)) * channels * size * size
    if total > options.memory_limit_mib << 20:
        return None
    grey_only = channels == 1 and not options.channels
    opened: list[Decoded] = []
    for listing in listings:
        decoded = decode_once(listing, channels, size, grey_only=grey_only)
        if decoded is None:
            return _in_memory(listings, size, 3, options) if grey_only else None
        if decoded.corrupt and not options.skip_corrupt:
            bad = decoded.corrupt[0]
            decode(listing.path(bad), channels, listing.content(bad))  # raises: it couldn't be read before
        opened.append(decoded)
    return opened


def _memory(listing: Listing, decoded: Decoded) -> ImagesInMemory:
    labels = torch.from_numpy(listing.labels)
    if not decoded.corrupt:
        return ImagesInMemory(decoded.images, labels)
    good = _good(listing, decoded.corrupt)
    return ImagesInMemory(decoded.images[good], labels[good])


def _files(listing: Listing, corrupt: tuple[int, ...]) -> ImageFiles:
    read = listing.part(_good(listing, corrupt)) if corrupt else listing
    return ImageFiles(read.names.below(str(read.root)), torch.from_numpy(read.labels), read.packed)


def _good(listing: Listing, corrupt: tuple[int, ...]) -> numpy.ndarray:
    return numpy.delete(numpy.arange(len(listing)), corrupt)

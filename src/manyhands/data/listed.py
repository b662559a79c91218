"""Lists a folder and its packed copy in one process per machine; the others map the listing. Imports no torch.

The shared listing lies in a folder of one start of a run, and is therefore never older than the run.
"""

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy

from manyhands.core.files import one_at_a_time, parse_json, write_atomic
from manyhands.core.scratch import of_this_start
from manyhands.data.folder import Listing
from manyhands.data.options import DataOptions
from manyhands.data.packed import PackedRows, PackedSet, is_pack, open_pack
from manyhands.data.walk import PictureNames

Parts = tuple[Listing, ...]
Listed = tuple[Parts, tuple[str, ...]]  # listings, and messages for the user
_INDEX = "listings.json"
_requests: Counter[str] = Counter()


def place_of_pack(root: Path) -> Path:
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.pack")


def of_pack(folder: Path) -> tuple[Parts, tuple[str, ...]]:
    pack = open_pack(folder)
    listings: list[Listing] = []
    for word, start, stop in pack.groups:
        labels, rows = pack.columns["label"][start:stop].astype(numpy.int64), numpy.arange(start, stop)
        names, packed = pack.names.part(slice(start, stop)), PackedRows(pack, rows)
        listings.append(Listing(pack.folder / word, pack.classes, names, labels, word, packed=packed))
    return tuple(listings), _notes(pack)


def folder_state(listing: Listing) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns sizes and modification times (ns) of a folder's files, int64 [n] each; -1 for unreadable files."""

    def state(index: int) -> tuple[int, int]:
        try:
            found = os.stat(listing.path(index))  # noqa: PTH116 - a million of these
        except OSError:
            return -1, -1
        return found.st_size, found.st_mtime_ns

    found = numpy.fromiter(map(state, range(len(listing))), numpy.dtype((numpy.int64, 2)))
    return found[:, 0], found[:, 1]


def difference(pack: PackedSet, listings: Sequence[Listing]) -> str:
    """Describes the differences between a folder and its pack; empty if there are none."""
    groups = {group.word: group for group in pack.groups}
    words = [listing.word for listing in listings]
    if any(listing.classes != pack.classes for listing in listings) or not {*words} <= {*groups}:
        return "other class folders"
    added = removed = changed = 0
    for word, listing in zip(words, listings, strict=True):
        rows = slice(groups[word].start, groups[word].stop)
        packed = pack.names.part(rows)
        if listing.names != packed:
            here, there = {*listing.names}, {*packed}
            added, removed = added + len(here - there), removed + len(there - here)
        else:
            sizes, times = folder_state(listing)
            other = (sizes != pack.columns["bytes"][rows]) | (times != pack.columns["time"][rows])
            changed += int(numpy.count_nonzero(other))
    counts = ((added, "added"), (removed, "removed"), (changed, "changed"))
    return ", ".join(f"{count:,} {word}" for count, word in counts if count)


def with_pack(root: Path, listings: Parts, options: DataOptions) -> tuple[Parts, tuple[str, ...]]:
    place = place_of_pack(root)
    if not options.packed or not is_pack(place):
        return listings, ()
    pack = open_pack(place)
    changed = difference(pack, listings)
    if changed or pack.outdated:
        reason = f"the folder has changed ({changed})" if changed else pack.outdated
        how = f" --size {pack.size} --quality {pack.quality}" if pack.size else ""
        again = f"update the copy with manyhands pack {shlex.quote(str(root))}{how} --replace"
        return listings, (f"the packed copy {place.name} is ignored because {reason}; {again}",)
    if 0 < pack.size < options.image_size:
        return listings, (f"the packed copy {place.name} is ignored because its pictures are too small ({pack.made})",)
    rows = {word: numpy.arange(start, stop) for word, start, stop in pack.groups}
    found = (replace(listing, packed=PackedRows(pack, rows[listing.word])) for listing in listings)
    return tuple(found), _notes(pack)


def _notes(pack: PackedSet) -> tuple[str, ...]:
    if not pack.size:
        return ()
    notes = [f"{pack.folder.name} holds resized pictures ({pack.made}), which may change the results"]
    if pack.outdated:
        again = f"update the copy with manyhands pack FOLDER --size {pack.size} --quality {pack.quality} --replace"
        notes.append(f"{pack.folder.name} was packed by an older version: {pack.outdated}; {again}")
    return tuple(notes)


def listed_once(root: Path, purpose: str, make: Callable[[], Listed]) -> Listed:
    """Calls `make` once per machine and start of a run, and again for a repeated request; returns the result."""
    shared = of_this_start()
    if shared is None:
        return make()
    key = f"{os.getppid()} {root.resolve()} {purpose}"
    _requests[key] += 1
    name = hashlib.sha256(f"{_requests[key]} {key}".encode(errors="surrogateescape")).hexdigest()[:32]
    folder = shared / "listed" / name
    with one_at_a_time(folder):
        if not (folder / _INDEX).is_file():
            made = make()
            try:
                _write(folder, root, made)
            except OSError as error:
                note = f"{shared.parent} has no room for a shared list of pictures; each process keeps a copy: {error}"
                return made[0], (*made[1], note)
    return _read(folder, root)


def _write(folder: Path, root: Path, made: Listed) -> None:
    listings: list[dict[str, object]] = []
    folder.mkdir(exist_ok=True)
    for number, listing in enumerate(made[0]):
        columns = [listing.names.names, listing.labels, *([listing.packed.rows] if listing.packed else [])]
        for column, array in enumerate(columns):
            numpy.save(folder / f"{number}-{column}.npy", array)
        own = {"root": str(listing.root.relative_to(root)), "classes": listing.classes, "word": listing.word}
        listings.append({**own, "notes": listing.notes, "columns": len(columns)})
    write_atomic(folder / _INDEX, json.dumps({"listings": listings, "notes": made[1]}))


def _read(folder: Path, root: Path) -> Listed:
    """Maps the arrays copy-on-write: nothing writes to them, but torch accepts no read-only arrays."""
    index = parse_json((folder / _INDEX).read_bytes())
    pack = open_pack(place_of_pack(root)) if any(each["columns"] > 2 for each in index["listings"]) else None
    listings: list[Listing] = []
    for number, each in enumerate(index["listings"]):
        files = [folder / f"{number}-{column}.npy" for column in range(each["columns"])]
        names, labels, *rows = (numpy.asarray(numpy.load(file, mmap_mode="c")) for file in files)
        packed = PackedRows(pack, rows[0]) if pack and rows else None
        own = root / each["root"], tuple(each["classes"]), PictureNames(names), labels, each["word"]
        listings.append(Listing(*own, tuple(each["notes"]), packed))
    return tuple(listings), tuple(index["notes"])

"""A folder's listing, made by one process of a machine and mapped by the others: it is in memory once. No torch.

It lies in a folder that belongs to one start of a run, so that it is never older than the run.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from manyhands.core.files import one_at_a_time, parse_json, replacing
from manyhands.core.scratch import of_this_start
from manyhands.data.folder import Listing
from manyhands.data.names import PictureNames
from manyhands.data.pack_choice import Parts, place_of_pack
from manyhands.data.packed import PackedRows, open_pack

Listed = tuple[Parts, tuple[str, ...]]  # and sentences for the user

_INDEX = "listings.json"
_requests: Counter[str] = Counter()


def listed_once(root: Path, purpose: str, make: Callable[[], Listed]) -> Listed:
    """Returns what `make` returns, called by one of the processes that a run has started on this machine; else by each.

    All processes request listings in the same order: a second one for the same purpose is made anew, since the folder
    may have changed. Raises what `make` does.
    """
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
    arrays: dict[int, numpy.ndarray] = {}  # by identity: the parts of one folder share their names
    listings: list[dict[str, object]] = []
    for listing in made[0]:
        names, packed = listing.names, listing.packed
        columns = names.text, names.ends, names.rows, listing.labels, packed.rows if packed else None
        arrays.update({id(column): column for column in columns if column is not None})
        numbers = [None if column is None else id(column) for column in columns]
        own = {"root": str(listing.root.relative_to(root)), "classes": listing.classes, "word": listing.word}
        listings.append({**own, "notes": listing.notes, "arrays": numbers})
    folder.mkdir(exist_ok=True)
    for number, array in arrays.items():
        numpy.save(folder / f"{number}.npy", array)
    with replacing(folder / _INDEX) as part:
        part.write_text(json.dumps({"listings": listings, "notes": made[1]}), encoding="utf-8")


def _read(folder: Path, root: Path) -> Listed:
    index = parse_json((folder / _INDEX).read_bytes())
    is_packed = any(each["arrays"][-1] is not None for each in index["listings"])
    pack = open_pack(place_of_pack(root)) if is_packed else None
    listings: list[Listing] = []
    for each in index["listings"]:
        text, ends, rows, labels, packed = (_array(folder, number) for number in each["arrays"])
        names = PictureNames(text, ends, rows)
        own = root / each["root"], tuple(each["classes"]), names, labels, each["word"], tuple(each["notes"])
        listings.append(Listing(*own, PackedRows(pack, packed) if pack and packed is not None else None))
    return tuple(listings), tuple(index["notes"])


def _array(folder: Path, number: int | None) -> Any:
    """A mapped array. It is copied where it is written to, which never happens: torch takes no read-only arrays."""
    return None if number is None else numpy.asarray(numpy.load(folder / f"{number}.npy", mmap_mode="c"))

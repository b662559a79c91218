"""A folder's listing, made by one process of a machine and mapped by all of them: it is there once. No torch.

It lies in a folder that one start of a run has for itself, so none is ever older than the run.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from manyhands.core.once import one_at_a_time, replacing
from manyhands.core.outside import parse_json
from manyhands.core.scratch import of_this_start
from manyhands.data.folder import Listing
from manyhands.data.names import PictureNames
from manyhands.data.pack_choice import Parts, place_of_pack
from manyhands.data.packed import PackedRows, open_pack

Listed = tuple[Parts, tuple[str, ...]]  # and sentences for the user

_TOLD = "listings.json"
_asked: Counter[str] = Counter()


def listed_once(root: Path, purpose: str, make: Callable[[], Listed]) -> Listed:
    """What `make` gives, made by one of the processes that a run has started on this machine; else by each.

    All ask in the same order: a second listing for the same purpose is a new one, since the folder may have changed.
    Raises what `make` does.
    """
    shared = of_this_start()
    if shared is None:
        return make()
    key = f"{os.getppid()} {root.resolve()} {purpose}"
    _asked[key] += 1
    name = hashlib.sha256(f"{_asked[key]} {key}".encode(errors="surrogateescape")).hexdigest()[:32]
    folder = shared / "listed" / name
    with one_at_a_time(folder):
        if not (folder / _TOLD).is_file():
            made = make()
            try:
                _write(folder, root, made)
            except OSError as error:
                note = f"{shared.parent} has no room for the list of pictures, so each process has its own: {error}"
                return made[0], (*made[1], note)
    return _read(folder, root)


def _write(folder: Path, root: Path, made: Listed) -> None:
    arrays: dict[int, numpy.ndarray] = {}  # by identity: the parts of one folder share their names
    told = [_told(listing, root, arrays) for listing in made[0]]
    folder.mkdir(exist_ok=True)
    for number, array in arrays.items():
        numpy.save(folder / f"{number}.npy", array)
    with replacing(folder / _TOLD) as part:
        part.write_text(json.dumps({"listings": told, "notes": made[1]}), encoding="utf-8")


def _told(listing: Listing, root: Path, arrays: dict[int, numpy.ndarray]) -> dict[str, Any]:
    names, packed = listing.names, listing.packed
    columns = {"text": names.text, "ends": names.ends, "rows": names.rows, "labels": listing.labels}
    columns["packed"] = packed.rows if packed else None
    arrays.update({id(array): array for array in columns.values() if array is not None})
    files = {name: None if array is None else id(array) for name, array in columns.items()}
    own = {"root": str(listing.root.relative_to(root)), "classes": listing.classes, "word": listing.word}
    return {**own, "notes": listing.notes, "files": files}


def _read(folder: Path, root: Path) -> Listed:
    told = parse_json((folder / _TOLD).read_bytes())
    found = [(each, _arrays(folder, each["files"])) for each in told["listings"]]
    pack = open_pack(place_of_pack(root)) if any("packed" in arrays for _, arrays in found) else None
    listings = tuple(
        Listing(
            root / each["root"],
            tuple(each["classes"]),
            PictureNames(arrays["text"], arrays["ends"], arrays.get("rows")),
            arrays["labels"],
            each["word"],
            tuple(each["notes"]),
            PackedRows(pack, arrays["packed"]) if pack and "packed" in arrays else None,
        )
        for each, arrays in found
    )
    return listings, tuple(told["notes"])


def _arrays(folder: Path, files: dict[str, int | None]) -> dict[str, numpy.ndarray]:
    """Mapped; copied where they are written to, which nobody does: torch takes no array that it mustn't write to."""
    return {
        name: numpy.asarray(numpy.load(folder / f"{number}.npy", mmap_mode="c"))
        for name, number in files.items()
        if number is not None
    }

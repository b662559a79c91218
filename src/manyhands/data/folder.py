"""Lists the pictures in class folders, or in a packed copy of them, by split. Imports no torch.

One process per machine lists a folder and saves the listing; the machine's other processes memory-map the saved files.
The files are in a temporary folder that belongs to one start of a run, so a listing is never older than that start.
"""

import hashlib
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy

from manyhands.core.errors import UserError, first_names
from manyhands.core.files import locked, parse_json, write_atomic
from manyhands.core.scratch import workers_folder
from manyhands.data import layout as folders
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.layout import FolderLayout, Identity, UnusedFiles, folders_in, parse_split, read_layout, split_kind
from manyhands.data.options import DataOptions
from manyhands.data.packed import PackedRows, PackedSet, PictureNames, is_pack, open_pack

_FORMATS = f"supported formats: {', '.join(sorted(PICTURE_SUFFIXES))}"
_NOT_TEXT = re.compile("[\udc80-\udcff]")  # bytes of a name that can't be decoded
_INDEX = "listings.json"
_requests: Counter[str] = Counter()


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of one split."""

    root: Path  # holds the class folders
    classes: tuple[str, ...]  # sorted
    names: PictureNames  # below root, sorted by class, then by name
    labels: numpy.ndarray  # int64 [n]
    word: str = ""  # the split, such as "train"; empty: the folder has no splits
    notes: tuple[str, ...] = ()  # messages for the user

    def __len__(self) -> int:
        return len(self.names)

    @property
    def folder(self) -> str:
        return self.root.name if split_kind(self.root.name) == self.word else self.word

    def take(self, chosen: Sequence[int] | numpy.ndarray) -> "Listing":
        return Listing(self.root, self.classes, self.names.take(chosen), self.labels[chosen], self.word)


Parts = tuple[Listing, ...]
Listed = tuple[Parts, tuple[str, ...]]  # listings, and messages for the user


def list_splits(root: Path, *, whole: bool = False) -> Parts:
    """Returns a listing for each split (training, evaluation and perhaps final test), or one for an unsplit folder.

    All listings have the same classes. An empty class folder counts only if another split has pictures of that class.
    With `whole`, all folders are classes, even if they are named like splits, and one class is enough. Raises UserError
    if there are no class folders, fewer than two have pictures, or the training split lacks a class.
    """
    layout, unused = FolderLayout() if whole else read_layout(root), UnusedFiles()
    unused.add_files(root)
    for name in layout.unused:
        unused.add(name, "folder")
    places = [root] if layout.inside else [root / path for path in layout.splits] or [root]
    homes = [folders.class_identities(place, folders_in(place)) for place in places]
    notes, parts, entered = list(layout.notes), list[Listing](), list[set[Identity]]()
    for number, place in enumerate(places):
        others = [index for index in range(len(places)) if index != number]
        taken = {os.path.realpath(places[index]) for index in others}.union(*(homes[index] for index in others))
        taken.update(*(entered[index] for index in range(number) if not homes[index] & homes[number]))
        if shared := len(homes[number].intersection(set[Identity]().union(*homes[:number]))):
            # Such class folders are linked on purpose, and therefore used.
            why = ("training pictures are used for evaluation", "the final test uses pictures of other splits")
            of = f"{layout.splits[0]}/" if number == 1 else "other splits"
            notes.append(f"{layout.splits[number]}/ and {of} share {shared} class folder(s): {why[number - 1]}")
        part, below = _list_split(place, root, unused, taken | homes[number])
        parts.append(replace(part, word=split_kind(place.name) if place != root else ""))
        entered.append(below)
    if layout.inside:
        parts = _divide_by_inner_folders(parts[0], layout.splits)
    parts, more = _unify_classes(parts, least=1 if whole else 2)
    return (replace(parts[0], notes=(*notes, *more, *unused.notes())), *parts[1:])


def _divide_by_inner_folders(listing: Listing, splits: Sequence[str]) -> list[Listing]:
    """Divides a listing by the split folders inside its class folders, such as "train" in cat/train/0.jpg."""
    inside = [name.split(b"/", 2)[1] for name in listing.names.names.tolist()]
    kinds = {name: parse_split(name.decode(errors="surrogateescape"))[0] for name in set(inside)}
    if others := [name for name, kind in kinds.items() if kind not in splits]:
        what = f'class folders hold splits, but "{others[0].decode(errors="surrogateescape")}" also holds pictures'
        hints = ("move or remove folders that are not splits, including links to folders",)
        raise UserError(what, str(listing.root), hints)
    found = numpy.array([splits.index(kinds[name]) for name in inside], numpy.int64)
    return [replace(listing.take(numpy.flatnonzero(found == number)), word=word) for number, word in enumerate(splits)]


def _unify_classes(listings: list[Listing], least: int) -> tuple[list[Listing], list[str]]:
    """Gives all listings the same classes, at least `least`. Also returns messages about folders without pictures."""
    full = [{part.classes[label] for label in numpy.unique(part.labels)} for part in listings]
    trained = [name for name in listings[0].classes if name in full[0]]
    empty = [name for name in listings[0].classes if name not in full[0]]
    if len(trained) < least:
        _refuse_few_classes(listings[0].root, trained, empty)
    for part, there in zip(listings[1:], full[1:], strict=True):
        if unknown := sorted(there - {*listings[0].classes}):
            what = f"{part.folder}/ has class folders that {listings[0].folder}/ lacks ({len(unknown)}): "
            alike = tuple(filter(None, (folders.lookalike_difference(name, listings[0].classes) for name in unknown)))
            hints = (*alike, f"add training pictures of the classes to {listings[0].folder}/, or remove the folders")
            raise UserError(what + first_names(unknown), str(part.root), hints)
        if not there:
            hints = (f"put pictures into the class folders of {part.folder}/, or remove {part.folder}/",)
            raise UserError(f"{part.folder}/ has no pictures", str(part.root), hints)
    seen = set[str]().union(*full)
    classes = tuple(name for name in listings[0].classes if name in seen)
    unseen = [name for name in empty if name not in seen]
    for name in unseen:
        if folders.holds_pictures(listings[0].root / name, suffixes=folders.UNREAD_SUFFIXES):
            hints = ("convert the pictures, for example to JPEG", _FORMATS)
            what = f'the class folder "{name}" has only pictures in formats that can\'t be read'
            raise UserError(what, str(listings[0].root / name), hints)
    notes = [f"ignored folders without pictures: {first_names(unseen)}"] if unseen else []
    extras = [(part.folder, sorted({*part.classes} - {*listings[0].classes})) for part in listings[1:]]
    notes += [f"{folder}/ has folders without pictures: {first_names(extra)}" for folder, extra in extras if extra]
    numbers = {name: number for number, name in enumerate(classes)}
    found = [(part, numpy.array([numbers.get(name, -1) for name in part.classes], numpy.int64)) for part in listings]
    return [replace(part, classes=classes, labels=places[part.labels]) for part, places in found], notes


def _list_split(root: Path, top: Path, unused: UnusedFiles, before: set[Identity]) -> tuple[Listing, set[Identity]]:
    """Lists the pictures in the split folder `root` of `top`. Also returns all folders entered before or now."""
    for above in [place for place in (root, *root.parents) if top in place.parents]:
        unused.add_files(above, f"{above.relative_to(top).as_posix()}/")
    classes = folders_in(root)
    if not classes:
        loose = sum(entry.suffix.lower() in PICTURE_SUFFIXES for entry in root.iterdir())
        more = f"; pictures directly in the folder: {loose:,}" if loose else ""
        make = "make a folder for each class and put its pictures there"
        hints = (make, "sort ImageNet's validation pictures into class folders, too")
        raise UserError(f"{root} has no class folders{more}", str(root), hints)
    _check_names(root, classes)
    prefix = "" if root == top else f"{root.relative_to(top).as_posix()}/"
    entered = before | {os.path.realpath(place) for place in (top, root.resolve(), *root.resolve().parents)}
    names = folders.list_classes(root, classes, entered, unused, prefix)
    labels = numpy.repeat(numpy.arange(len(classes), dtype=numpy.int64), list(map(len, names)))
    return Listing(root, classes, PictureNames(numpy.concatenate(names), str(root)), labels), entered


def _check_names(root: Path, classes: tuple[str, ...]) -> None:
    """Raises UserError if a class name isn't valid text, or if two class names look the same."""
    encoding = sys.getfilesystemencoding().lower()
    for name in classes:
        raw = os.fsencode(name)
        text, shown = raw.decode(errors="surrogateescape"), f'the name of the class folder "{repr(raw)[2:-1]}"'
        if _NOT_TEXT.search(text) and _NOT_TEXT.search(name):  # the locale can't decode it either
            hint = f"rename the folder, or convert many: convmv -f gbk -t utf-8 -r --notest {root} (from GBK)"
            raise UserError(f"{shown} isn't UTF-8", str(root), (hint,))
        if text != name and not _NOT_TEXT.search(text):
            hints = ("export PYTHONUTF8=1", "or choose a UTF-8 locale: export LC_ALL=C.UTF-8")
            raise UserError(f"{shown} is UTF-8, but the locale's encoding is {encoding}", str(root), hints)
    if len({folders.normalize_name(name) for name in classes}) < len(classes):
        alike = next(filter(None, (folders.lookalike_difference(name, classes) for name in classes)))
        hints = ("move the pictures of both folders into one folder",)
        raise UserError(f"two class folders look the same: {alike}", str(root), hints)


def split_listing(listing: Listing, evaluation_fraction: float) -> tuple[Listing, Listing]:
    """Splits a listing into (training, evaluation), class by class. The result depends only on the file names.

    Evaluation gets `evaluation_fraction` of all pictures, and of each class (rounded to whole pictures). A class of two
    or more pictures keeps at least one for training.
    """
    names = listing.names.names
    digests = numpy.fromiter((int.from_bytes(hashlib.sha256(name).digest()[:8]) for name in names), numpy.uint64)
    by_class = numpy.lexsort((digests, listing.labels))
    kept = numpy.zeros(len(listing), bool)
    seen = 0
    for indices in numpy.split(by_class, numpy.flatnonzero(numpy.diff(listing.labels[by_class])) + 1):
        wanted = int((seen + len(indices)) * evaluation_fraction + 0.5) - int(seen * evaluation_fraction + 0.5)
        seen += len(indices)
        kept[indices[: min(wanted, max(1, len(indices) - 1))]] = True
    if not kept.any():
        kept[digests.argmin()] = True
    train = listing.take(numpy.flatnonzero(~kept))
    return replace(train, notes=listing.notes), listing.take(numpy.flatnonzero(kept))


def _refuse_few_classes(root: Path, full: list[str], empty: list[str]) -> NoReturn:
    if not empty:
        hints = ("add a folder for each further class beside the first; a classifier needs two classes or more",)
        raise UserError(f'{root} has only one class folder, "{full[0]}"', str(root), hints)
    only = f'only one class folder of {root} has pictures, "{full[0]}"; ' if full else ""
    hints = (f"put pictures into {root / empty[0]}", _FORMATS)
    raise UserError(f'{only}the class folder "{empty[0]}" has no pictures', str(root / empty[0]), hints)


def pack_path(root: Path) -> Path:
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.pack")


def list_pack(folder: Path) -> Listed:
    """Returns (a listing for each split of a packed copy, messages). Raises UserError if the copy was altered."""
    pack = open_pack(folder)
    listings: list[Listing] = []
    for word, start, stop in pack.groups:
        labels = pack.columns["label"][start:stop].astype(numpy.int64)
        packed = PackedRows(pack, numpy.arange(start, stop))
        names = PictureNames(pack.names.names[start:stop], str(pack.folder / word), packed)
        listings.append(Listing(pack.folder / word, pack.classes, names, labels, word))
    return tuple(listings), _pack_notes(pack)


def describe_pack_difference(pack: PackedSet, listings: Sequence[Listing]) -> str:
    """Describes how the listings of a folder differ from its packed copy. Returns "" if they are equal."""
    groups = {group.word: group for group in pack.groups}
    words = [listing.word for listing in listings]
    if any(listing.classes != pack.classes for listing in listings) or not {*words} <= {*groups}:
        return "other class folders"
    added = removed = changed = 0
    for word, listing in zip(words, listings, strict=True):
        rows = slice(groups[word].start, groups[word].stop)
        packed = pack.names.take(rows)
        if listing.names != packed:
            here, there = ({*names.names.tolist()} for names in (listing.names, packed))
            added, removed = added + len(here - there), removed + len(there - here)
        else:
            sizes, times = listing.names.file_states()
            other = (sizes != pack.columns["bytes"][rows]) | (times != pack.columns["time"][rows])
            changed += int(numpy.count_nonzero(other))
    counts = ((added, "added"), (removed, "removed"), (changed, "changed"))
    return ", ".join(f"{count:,} {word}" for count, word in counts if count)


def read_from_pack(root: Path, listings: Parts, options: DataOptions) -> Listed:
    """Makes listings read from the folder's packed copy if that is up to date. Returns (listings, messages)."""
    place = pack_path(root)
    if not options.packed or not is_pack(place):
        return listings, ()
    pack = open_pack(place)
    changed = describe_pack_difference(pack, listings)
    if changed or pack.outdated_reason:
        reason = f"the folder has changed ({changed})" if changed else pack.outdated_reason
        how = f" --size {pack.size} --quality {pack.quality}" if pack.size else ""
        again = f"update the copy with manyhands pack {shlex.quote(str(root))}{how} --replace"
        return listings, (f"the packed copy {place.name} is ignored because {reason}; {again}",)
    if 0 < pack.size < options.image_size:
        return listings, (f"the packed copy {place.name} is ignored: its pictures are too small ({pack.resizing})",)
    rows = {word: PackedRows(pack, numpy.arange(start, stop)) for word, start, stop in pack.groups}
    found = (replace(listing, names=replace(listing.names, packed=rows[listing.word])) for listing in listings)
    return tuple(found), _pack_notes(pack)


def _pack_notes(pack: PackedSet) -> tuple[str, ...]:
    if not pack.size:
        return ()
    notes = [f"{pack.folder.name} holds resized pictures ({pack.resizing}), which may change the results"]
    if pack.outdated_reason:
        again = f"update the copy with manyhands pack FOLDER --size {pack.size} --quality {pack.quality} --replace"
        notes.append(f"{pack.folder.name} was packed by an older version: {pack.outdated_reason}; {again}")
    return tuple(notes)


def list_folder(root: Path, options: DataOptions, *, whole: bool = False) -> Listed:
    """Returns (a listing for each split, messages) of a folder. With `whole`, returns a single listing."""
    parts, notes = list_pack(root) if is_pack(root) else read_from_pack(root, list_splits(root, whole=whole), options)
    if whole:
        return parts[:1], notes
    return split_listing(parts[0], options.validation) if len(parts) == 1 else parts, notes


def list_once_per_machine(root: Path, options: DataOptions, *, whole: bool = False) -> Listed:
    """Calls `list_folder` in one process of each machine, which shares the result. A second call lists anew."""
    shared = workers_folder()
    if shared is None or is_pack(root):
        return list_folder(root, options, whole=whole)
    key = f"{os.getppid()} {root.resolve()} {whole} {options.model_dump_json()}"
    _requests[key] += 1
    name = hashlib.sha256(f"{_requests[key]} {key}".encode(errors="surrogateescape")).hexdigest()[:32]
    folder = shared / "listed" / name
    with locked(folder):
        if not (folder / _INDEX).is_file():
            made = list_folder(root, options, whole=whole)
            try:
                _write_listings(folder, root, made)
            except OSError as error:
                note = f"{shared.parent} has no room for a shared list of pictures; each process keeps a copy: {error}"
                return made[0], (*made[1], note)
    return _map_saved_listings(folder, root)


def _write_listings(folder: Path, root: Path, made: Listed) -> None:
    listings: list[dict[str, object]] = []
    folder.mkdir(exist_ok=True)
    for number, listing in enumerate(made[0]):
        columns = [listing.names.names, listing.labels, *([listing.names.packed.rows] if listing.names.packed else [])]
        for column, array in enumerate(columns):
            numpy.save(folder / f"{number}-{column}.npy", array)
        own = {"root": str(listing.root.relative_to(root)), "classes": listing.classes, "word": listing.word}
        listings.append({**own, "notes": listing.notes, "columns": len(columns)})
    write_atomic(folder / _INDEX, json.dumps({"listings": listings, "notes": made[1]}))


def _map_saved_listings(folder: Path, root: Path) -> Listed:
    """Memory-maps saved listings. The maps are copy-on-write, because torch doesn't accept read-only arrays."""
    index = parse_json((folder / _INDEX).read_bytes())
    pack = open_pack(pack_path(root)) if any(each["columns"] > 2 for each in index["listings"]) else None
    listings: list[Listing] = []
    for number, each in enumerate(index["listings"]):
        files = [folder / f"{number}-{column}.npy" for column in range(each["columns"])]
        names, labels, *rows = (numpy.asarray(numpy.load(file, mmap_mode="c")) for file in files)
        packed = PackedRows(pack, rows[0]) if pack and rows else None
        place = root / each["root"]
        own = tuple(each["classes"]), PictureNames(names, str(place), packed), labels, each["word"]
        listings.append(Listing(place, *own, tuple(each["notes"])))
    return tuple(listings), tuple(index["notes"])

"""Lists class folders, and divides pictures into training and evaluation."""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy

from manyhands.core.errors import UserError
from manyhands.data import walk
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.layout import read_layout, split_kind, split_word
from manyhands.data.packed import PackedRows
from manyhands.data.walk import Identity, PictureNames, Unused, class_identities, folders_in

_MOST_NAMES = 8
_FORMATS = f"supported formats: {', '.join(sorted(PICTURE_SUFFIXES))}"


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of one split."""

    root: Path  # holds the class folders
    classes: tuple[str, ...]  # sorted
    names: PictureNames  # paths below root, sorted by class, then by name
    labels: numpy.ndarray  # int64 [n]
    word: str = ""  # the split, such as "train"; empty: the folder has no splits
    notes: tuple[str, ...] = ()  # messages for the user
    packed: PackedRows | None = None  # packed copies to read instead of the files

    def __len__(self) -> int:
        return len(self.names)

    @property
    def folder(self) -> str:
        return self.root.name if split_word(self.root.name) == self.word else self.word

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])  # noqa: PTH118 - a million of these

    def content(self, index: int) -> bytes | None:
        """Returns a picture's packed file, if any. Raises UserError: the packed copy was altered."""
        return self.packed.content(index) if self.packed else None

    def part(self, chosen: Sequence[int] | numpy.ndarray) -> "Listing":
        packed = self.packed.part(chosen) if self.packed else None
        return Listing(self.root, self.classes, self.names.part(chosen), self.labels[chosen], self.word, packed=packed)


def list_parts(root: Path) -> tuple[Listing, ...]:
    """Lists a folder's splits (training, evaluation and, if present, the final test), or the undivided folder.

    All listings have the same classes: a folder without pictures is a class only if another split has pictures of it.
    Raises UserError: there are no class folders, fewer than two have pictures, or the training split lacks a class.
    """
    layout, unused = read_layout(root), Unused()
    unused.add_files(root)
    for name in layout.unused:
        unused.add(name, "folder")
    places = [root] if layout.inside else [root / path for path in layout.splits] or [root]
    homes = [class_identities(place, folders_in(place)) for place in places]
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
        part, below = _list_classes(place, root, unused, taken | homes[number])
        parts.append(replace(part, word=split_word(place.name) if place != root else ""))
        entered.append(below)
    if layout.inside:
        parts = _by_folder_inside(parts[0], layout.splits)
    parts, more = _with_same_classes(parts)
    return (replace(parts[0], notes=(*notes, *more, *unused.notes())), *parts[1:])


def list_whole(root: Path) -> Listing:
    """Lists the pictures in root's class folders, at any depth. Raises UserError: there are none."""
    unused = Unused()
    unused.add_files(root)
    part, _ = _list_classes(root, root, unused, class_identities(root, folders_in(root)))
    (listing,), notes = _with_same_classes([part], least=1)
    return replace(listing, notes=(*notes, *unused.notes()))


def _by_folder_inside(listing: Listing, splits: Sequence[str]) -> list[Listing]:
    """Lists the pictures of each split if class folders hold the splits, such as cat/train/0.jpg."""
    inside = [name.split("/", 2)[1] for name in listing.names]
    kinds = {name: split_kind(name) for name in set(inside)}
    if others := [name for name, kind in kinds.items() if kind not in splits]:
        what = f'class folders hold splits, but "{others[0]}" also holds pictures'
        hints = ("move or remove folders that are not splits, including links to folders",)
        raise UserError(what, str(listing.root), hints)
    found = numpy.array([splits.index(kinds[name]) for name in inside], numpy.int64)
    return [replace(listing.part(numpy.flatnonzero(found == number)), word=word) for number, word in enumerate(splits)]


def _with_same_classes(parts: list[Listing], least: int = 2) -> tuple[list[Listing], list[str]]:
    """Returns the listings with equal classes (at least `least`), and messages about classes without pictures."""
    full = [{part.classes[label] for label in numpy.unique(part.labels)} for part in parts]
    trained = [name for name in parts[0].classes if name in full[0]]
    empty = [name for name in parts[0].classes if name not in full[0]]
    if len(trained) < least:
        _refuse_few_classes(parts[0].root, trained, empty)
    for part, there in zip(parts[1:], full[1:], strict=True):
        if unknown := sorted(there - {*parts[0].classes}):
            what = f"{part.folder}/ has class folders that {parts[0].folder}/ lacks ({len(unknown)}): "
            alike = tuple(filter(None, (walk.lookalike_difference(name, parts[0].classes) for name in unknown)))
            hints = (*alike, f"add training pictures of the classes to {parts[0].folder}/, or remove the folders")
            raise UserError(what + _some(unknown), str(part.root), hints)
        if not there:
            hints = (f"put pictures into the class folders of {part.folder}/, or remove {part.folder}/",)
            raise UserError(f"{part.folder}/ has no pictures", str(part.root), hints)
    seen = set[str]().union(*full)
    classes = tuple(name for name in parts[0].classes if name in seen)
    unseen = [name for name in empty if name not in seen]
    for name in unseen:
        if walk.holds_pictures(parts[0].root / name, suffixes=walk.UNREAD_SUFFIXES):
            hints = ("convert the pictures, for example to JPEG", _FORMATS)
            what = f'the class folder "{name}" has only pictures in formats that can\'t be read'
            raise UserError(what, str(parts[0].root / name), hints)
    notes = [f"ignored folders without pictures: {_some(unseen)}"] if unseen else []
    extras = [(part.folder, sorted({*part.classes} - {*parts[0].classes})) for part in parts[1:]]
    notes += [f"{folder}/ has folders without pictures: {_some(extra)}" for folder, extra in extras if extra]
    numbers = {name: number for number, name in enumerate(classes)}
    found = [(part, numpy.array([numbers.get(name, -1) for name in part.classes], numpy.int64)) for part in parts]
    return [replace(part, classes=classes, labels=places[part.labels]) for part, places in found], notes


def _list_classes(root: Path, top: Path, unused: Unused, taken: set[Identity]) -> tuple[Listing, set[Identity]]:
    """Lists one split of the data set in `top`; also returns the folders that were entered."""
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
    found = walk.Walk(root, taken | {os.path.realpath(top)}, unused, prefix)
    names = found.list_classes(classes)
    labels = numpy.repeat(numpy.arange(len(classes), dtype=numpy.int64), list(map(len, names)))
    return Listing(root, classes, PictureNames(numpy.concatenate(names)), labels), found.entered


def _check_names(root: Path, classes: tuple[str, ...]) -> None:
    """Raises UserError for names that can't be displayed, and for two names that look the same."""
    encoding = sys.getfilesystemencoding().lower()
    for name in classes:
        raw = os.fsencode(name)
        shown = f'the name of the class folder "{repr(raw)[2:-1]}"'
        try:
            is_utf8 = raw.decode() == name
        except UnicodeDecodeError:
            if any("\udc80" <= letter <= "\udcff" for letter in name):  # bytes that the locale can't decode either
                hint = f"rename the folder, or convert many: convmv -f gbk -t utf-8 -r --notest {root} (from GBK)"
                raise UserError(f"{shown} isn't UTF-8", str(root), (hint,)) from None
        else:
            if not is_utf8:
                hints = ("export PYTHONUTF8=1", "or choose a UTF-8 locale: export LC_ALL=C.UTF-8")
                raise UserError(f"{shown} is UTF-8, but the locale's encoding is {encoding}", str(root), hints)
    if len({walk.plain_form(name) for name in classes}) < len(classes):
        alike = next(filter(None, (walk.lookalike_difference(name, classes) for name in classes)))
        hints = ("move the pictures of both folders into one folder",)
        raise UserError(f"two class folders look the same: {alike}", str(root), hints)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (" …" if len(names) > _MOST_NAMES else "")


def split(listing: Listing, share: float) -> tuple[Listing, Listing]:
    """Splits a listing class by class into training and evaluation, depending on the file names only.

    Evaluation receives `share` of all pictures, rounded, and of each class to within one picture. A class with two or
    more pictures keeps at least one for training.
    """
    names = listing.names.names
    digests = numpy.fromiter((int.from_bytes(hashlib.sha256(name).digest()[:8]) for name in names), numpy.uint64)
    by_class = numpy.lexsort((digests, listing.labels))
    kept = numpy.zeros(len(listing), bool)
    seen = 0
    for indices in numpy.split(by_class, numpy.flatnonzero(numpy.diff(listing.labels[by_class])) + 1):
        wanted = int((seen + len(indices)) * share + 0.5) - int(seen * share + 0.5)
        seen += len(indices)
        kept[indices[: min(wanted, max(1, len(indices) - 1))]] = True
    if not kept.any():
        kept[digests.argmin()] = True
    train = listing.part(numpy.flatnonzero(~kept))
    return replace(train, notes=listing.notes), listing.part(numpy.flatnonzero(kept))


def _refuse_few_classes(root: Path, full: list[str], empty: list[str]) -> NoReturn:
    if not empty:
        hints = ("add a folder for each further class beside the first; a classifier needs two classes or more",)
        raise UserError(f'{root} has only one class folder, "{full[0]}"', str(root), hints)
    only = f'only one class folder of {root} has pictures, "{full[0]}"; ' if full else ""
    hints = (f"put pictures into {root / empty[0]}", _FORMATS)
    raise UserError(f'{only}the class folder "{empty[0]}" has no pictures', str(root / empty[0]), hints)

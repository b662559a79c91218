"""Folders of class folders: what lies in them, and which pictures are for evaluation."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from manyhands.core.errors import UserError
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.names import PictureNames
from manyhands.data.packed import PackedRows
from manyhands.data.walk import Identity, class_identities, folders_in, walk

_HELD_OUT = "test"
_TEST_NAMES = ("val", "validation", "valid", _HELD_OUT)


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of one split."""

    root: Path  # the folder that holds the class folders
    classes: tuple[str, ...]  # names of the class folders, sorted
    names: PictureNames  # each picture's path below root, with "/"; sorted by class, then by name
    labels: numpy.ndarray  # int64 [n], each picture's class
    ignored: int = 0  # how many other files lie there
    notes: tuple[str, ...] = ()  # sentences for the user on what was left out
    packed: PackedRows | None = None  # the packed copies that are read instead

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])  # noqa: PTH118 - a million of these

    def content(self, index: int) -> bytes | None:
        """A picture's file where it is packed, else None. Raises UserError: the packed copy was altered."""
        return self.packed.content(index) if self.packed else None

    def part(self, chosen: Sequence[int] | numpy.ndarray) -> "Listing":
        packed = self.packed.part(chosen) if self.packed else None
        return Listing(self.root, self.classes, self.names.part(chosen), self.labels[chosen], packed=packed)


def list_parts(root: Path) -> tuple[Listing, ...]:
    """Lists root/train and root/val (or test), or one folder of class folders, which is still to be split.

    Raises UserError: there are no class folders, fewer than two, an empty one, or the two splits differ in classes.
    """
    train_root = root / "train"
    if not is_divided(root):
        return (list_classes(root),)
    for word in _TEST_NAMES:
        if (root / word).is_dir():
            return _list_both(train_root, root / word)
    return (list_classes(train_root),)


def divided(parts: Sequence[Listing], validation: float) -> tuple[Listing, Listing]:
    """The pictures for training and for evaluation; those of one folder are split."""
    return split(parts[0], validation) if len(parts) == 1 else (parts[0], parts[1])


def _list_both(train_root: Path, test_root: Path) -> tuple[Listing, Listing]:
    """Lists two splits; links don't carry pictures of the one into the other."""
    homes = [set(class_identities(place, folders_in(place))) for place in (train_root, test_root)]
    if shared := homes[0] & homes[1]:
        # Somebody linked whole class folders, so they want it; but they must know.
        train, test = list_classes(train_root), list_classes(test_root)
        note = f"{len(shared)} class folder(s) of {test_root.name}/ are those of {train_root.name}/: the network is"
        train = replace(train, notes=(f"{note} evaluated on pictures that it was trained on", *train.notes))
    else:
        train, entered = _list_classes(train_root, homes[1] | {os.path.realpath(test_root)})
        test, _ = _list_classes(test_root, entered - homes[1])
    for here, there in ((train, test), (test, train)):
        _refuse_unknown(here.root.name, here.classes, there, str(there.root))
    return train, test


def list_held_out(root: Path, train: Listing) -> tuple[Listing | None, tuple[str, ...]]:
    """Lists root/test where another split is evaluated during training, and gives sentences for the user.

    Its labels are those of the training classes. Raises UserError: it has classes that the training split lacks, or an
    empty one.
    """
    place = root / _HELD_OUT
    if not is_divided(root) or not place.is_dir() or not any((root / word).is_dir() for word in _TEST_NAMES[:-1]):
        return None, ()
    classes = folders_in(place)
    if not classes:
        return None, (f"{_HELD_OUT}/ has no class folders, so that it can't be evaluated",)
    _refuse_unknown(_HELD_OUT, classes, train, str(place))
    own = set(class_identities(place, classes))
    others = [
        each for word in ("train", *_TEST_NAMES[:-1]) if (root / word).is_dir()
        for each in class_identities(root / word, folders_in(root / word))
    ]  # fmt: skip
    shared = own & set(others)
    notes = (
        (f"{len(shared)} class folder(s) of {_HELD_OUT}/ are those of other splits: this is no test of new pictures",)
        if shared
        else ()
    )
    found, _ = _list_classes(place, set(others) - own, least=1)
    places = numpy.array([train.classes.index(name) for name in found.classes], numpy.int64)
    return replace(found, classes=train.classes, labels=places[found.labels]), notes


def is_divided(root: Path) -> bool:
    """True where a folder has train/ with class folders in it."""
    return (root / "train").is_dir() and bool(folders_in(root / "train"))


def list_classes(root: Path, *, least: int = 2) -> Listing:
    """The pictures in root's class folders, at any depth. Raises UserError: fewer than `least`, or an empty one."""
    return _list_classes(root, set(), least)[0]


def _list_classes(root: Path, taken: set[Identity], least: int = 2) -> tuple[Listing, set[Identity]]:
    """The listing, and the folders that were entered; links to those in `taken` aren't followed."""
    classes = folders_in(root)
    if not classes:
        raise _no_classes(root)
    for name in classes:
        if not _is_utf8(name):
            mend = (f"rename it; of many: convmv -f gbk -t utf-8 -r --notest {root}, with the encoding it was made in",)
            raise UserError(f'the name of the class folder "{_as_bytes(name)}" isn\'t UTF-8', str(root), mend)
    if len(classes) < least:
        mend = ("a classifier needs two classes at least: one folder for each, beside this one",)
        raise UserError(f'{root} has only one class folder, "{classes[0]}"', str(root), mend)
    below = walk(root, classes, taken)
    for name, found in zip(classes, below.classes, strict=True):
        if not found.text:
            mend = ("put pictures into it, or remove it", f"pictures end in {', '.join(sorted(PICTURE_SUFFIXES))}")
            raise UserError(f'the class folder "{name}" has no pictures', str(root / name), mend)
    names = PictureNames.of_text(b"".join(found.text for found in below.classes))
    counts = [found.text.count(0) for found in below.classes]
    labels = numpy.repeat(numpy.arange(len(classes), dtype=numpy.int64), counts)
    ignored = sum(found.others for found in below.classes)
    notes = _of_links(root, below.left_out)
    return Listing(root, classes, names, labels, ignored, notes), below.entered


def _is_utf8(name: str) -> bool:
    """False for a name from the disk whose bytes Python could only carry along."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_bytes(name: str) -> str:
    """A name from the disk in characters that everything can show."""
    return repr(os.fsencode(name))[2:-1]


def _of_links(root: Path, left_out: list[str]) -> tuple[str, ...]:
    if not left_out:
        return ()
    shown = ", ".join(f"{root.name}/{name}" for name in left_out[:3]) + (" …" if len(left_out) > 3 else "")
    return (f"{len(left_out)} link(s) to folders that are part of the set already aren't followed: {shown}",)


def split(listing: Listing, share: float) -> tuple[Listing, Listing]:
    """Splits into training and evaluation, class by class; depends on the names of the files alone.

    Over all classes the evaluation part is `share` of the pictures, to the nearest whole one; each class gives its
    part to within one picture. A class of two or more keeps one for training at least.
    """
    digests = _digests(listing.names)
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
    return replace(train, ignored=listing.ignored, notes=listing.notes), listing.part(numpy.flatnonzero(kept))


def _refuse_unknown(name: str, classes: tuple[str, ...], known: Listing, where: str) -> None:
    unknown = sorted(set(classes) - set(known.classes))
    if unknown:
        shown = ", ".join(unknown[:8]) + (" …" if len(unknown) > 8 else "")
        what = f"{name}/ has {len(unknown)} class folders that {known.root.name}/ lacks: {shown}"
        raise UserError(what, where, ("both need the same class folders",))


def _no_classes(root: Path) -> UserError:
    loose = sum(entry.suffix.lower() in PICTURE_SUFFIXES for entry in root.iterdir())
    found = f"; {loose:,} pictures lie in it directly" if loose else ""
    mend = (
        "make a folder for each class and put its pictures there",
        "ImageNet's validation pictures, too, are sorted into class folders first",
    )
    return UserError(f"{root} has no class folders{found}", str(root), mend)


def _digests(names: PictureNames) -> numpy.ndarray:
    """Numbers by which names are in an order of chance, uint64 [n]."""
    single = (name for block in names.blocks() for name in block[:-1].split(b"\0"))
    return numpy.fromiter((int.from_bytes(hashlib.sha256(name).digest()[:8]) for name in single), numpy.uint64)

"""Folders of class folders: what lies in them, and which pictures are for evaluation."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.packed import PackedRows
from manyhands.data.walk import Identity, class_identities, folders_in, walk

_HELD_OUT = "test"
_TEST_NAMES = ("val", "validation", "valid", _HELD_OUT)


@dataclass(frozen=True)
class Listing:
    """The pictures of one split."""

    root: Path  # the folder that holds the class folders
    classes: tuple[str, ...]  # names of the class folders, sorted
    names: tuple[str, ...]  # each picture's path below root, with "/"; sorted by class, then by name
    labels: tuple[int, ...]  # each picture's class
    ignored: int = 0  # how many other files lie there
    notes: tuple[str, ...] = ()  # sentences for the user on what was left out
    packed: PackedRows | None = field(default=None, compare=False)  # the packed copies that are read instead

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])  # noqa: PTH118 - a million of these

    def content(self, index: int) -> bytes | None:
        """A picture's file where it is packed, else None. Raises UserError: the packed copy was altered."""
        return self.packed.content(index) if self.packed else None

    def part(self, chosen: list[int]) -> "Listing":
        names = tuple(self.names[index] for index in chosen)
        labels = tuple(self.labels[index] for index in chosen)
        packed = self.packed.part(chosen) if self.packed else None
        return Listing(self.root, self.classes, names, labels, packed=packed)


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
    place_of = {label: train.classes.index(name) for label, name in enumerate(found.classes)}
    labels = tuple(place_of[label] for label in found.labels)
    return replace(found, classes=train.classes, labels=labels), notes


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
    names: list[str] = []
    labels: list[int] = []
    for label, (name, found) in enumerate(zip(classes, below.classes, strict=True)):
        if not found.names:
            mend = ("put pictures into it, or remove it", f"pictures end in {', '.join(sorted(PICTURE_SUFFIXES))}")
            raise UserError(f'the class folder "{name}" has no pictures', str(root / name), mend)
        names += found.names
        labels += [label] * len(found.names)
    ignored = sum(found.others for found in below.classes)
    notes = _of_links(root, below.left_out)
    return Listing(root, classes, tuple(names), tuple(labels), ignored, notes), below.entered


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
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(listing.labels):
        by_class.setdefault(label, []).append(index)
    kept: set[int] = set()
    seen = 0
    for indices in by_class.values():
        wanted = int((seen + len(indices)) * share + 0.5) - int(seen * share + 0.5)
        seen += len(indices)
        wanted = min(wanted, max(1, len(indices) - 1))
        kept.update(sorted(indices, key=lambda index: _digest(listing.names[index]))[:wanted])
    if not kept:
        kept.add(min(range(len(listing)), key=lambda index: _digest(listing.names[index])))
    train = listing.part([index for index in range(len(listing)) if index not in kept])
    return replace(train, ignored=listing.ignored, notes=listing.notes), listing.part(sorted(kept))


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


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()

"""What lies below the class folders of a set: each folder is entered once, however links lead."""

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.names import PictureNames, encoded

# A folder's path without links: the same by whatever name it is reached. (Not every file system numbers its folders.)
Identity = str


@dataclass
class ClassFolder:
    """What lies below one class folder."""

    text: bytes = b""  # the pictures' paths below the root, with "/", a zero byte behind each; sorted
    others: int = 0  # how many other files lie there; hidden ones don't count

    def add(self, names: list[str]) -> None:
        self.text = b"".join(map(encoded, sorted([*PictureNames.of_text(self.text), *names])))


@dataclass(frozen=True)
class Below:
    """What lies below all class folders."""

    classes: list[ClassFolder]  # one for each class folder, in the order that was given
    left_out: list[str]  # links (paths below the root) to folders that are part of the set already, or that hold it
    entered: set[Identity]  # all folders that were


def walk(root: Path, folders: Sequence[str], taken: Iterable[Identity] = ()) -> Below:
    """Lists the pictures below root's class folders, at any depth.

    Real folders go first. A link to a folder is followed unless that folder is part of the set already (or is in
    `taken`): a loop would multiply its samples, and give them another class. Raises UserError: a folder can't be read,
    or two class folders are the same one.
    """
    homes = class_identities(root, folders)
    entered = {_identity(place) for place in (root.resolve(), *root.resolve().parents)} | set(homes) | set(taken)
    below = Below([ClassFolder() for _ in folders], [], entered)
    links: list[tuple[int, str]] = []
    for number, name in enumerate(folders):
        links += [(number, link) for link in _enter(root, name, below.classes[number], below)]
    while links:
        number, name = links.pop(0)
        if _is_new(root, name, below):
            links += [(number, link) for link in _enter(root, name, below.classes[number], below)]
    return below


def class_identities(root: Path, folders: Sequence[str]) -> dict[Identity, str]:
    """The names of class folders by what they are. Raises UserError: two are one folder."""
    homes: dict[Identity, str] = {}
    for name in folders:
        here = _identity(root / name)
        if here in homes:
            what = f'the class folders "{homes[here]}" and "{name}" are one folder by two names'
            raise UserError(what, str(root), ("remove the link",))
        homes[here] = name
    return homes


def folders_in(root: Path) -> tuple[str, ...]:
    """Names of the folders and links to some in a folder, without hidden ones. Raises UserError: it can't be read."""
    kinds = [(entry.name, _kind(entry)) for entry in _entries(root)]
    return tuple(sorted(name for name, kind in kinds if kind == "folder" and not name.startswith((".", "__"))))


def _enter(root: Path, name: str, found: ClassFolder, below: Below) -> list[str]:
    """Adds what lies in one folder and in the real folders below it; returns the links to others, sorted."""
    waiting, links, pictures = [name], list[str](), list[str]()
    while waiting:
        folder = waiting.pop()
        for entry in _entries(root / folder):
            name, kind = f"{folder}/{entry.name}", _kind(entry)
            if entry.name.startswith("."):
                continue
            if kind == "folder" and entry.is_symlink():
                links.append(name)
            elif kind == "folder":
                waiting += [name] if _is_new(root, name, below) else []
            elif kind == "file" and os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES:  # noqa: PTH122 - a million
                pictures.append(name)
            else:
                found.others += 1
    found.add(pictures)
    return sorted(links)


def _is_new(root: Path, name: str, below: Below) -> bool:
    """True the first time that a folder is met; otherwise it is noted as left out."""
    here = _identity(root / name)
    if here in below.entered:
        below.left_out.append(name)
        return False
    below.entered.add(here)
    return True


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        mend = ("give its owner's permission to read it, or remove it",)
        raise UserError(f"the folder {folder.name} can't be read: {error.strerror}", str(folder), mend) from error


def _kind(entry: "os.DirEntry[str]") -> str:
    """One of "folder", "file" and "other", such as a named pipe, which would be waited for without end.

    A link that leads nowhere counts as a file, so that a missing picture is named rather than forgotten.
    """
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
        return "other" if stat.S_IFMT(entry.stat().st_mode) else "file"
    except OSError:
        return "file"


def _identity(folder: Path) -> Identity:
    return os.path.realpath(folder)

"""What lies below the class folders of a set: each folder is entered once, however links lead."""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.names import PictureNames, encoded

# A folder's path without links: the same by whatever name it is reached. (Not every file system numbers its folders.)
Identity = str

# Files and folders that systems and programs leave behind, in lower case; they are no data at any level, like hidden
# ones. Names of other folders are classes, even those that begin with "__" or "@".
_NO_DATA = frozenset({
    "__macosx", "__pycache__", "@eadir", "#recycle", "@recycle", "@recently-snapshot", "@tmp", "lost+found",
    "$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini",
})  # fmt: skip
# Of pictures in formats that can't be read.
UNREAD_SUFFIXES = frozenset({".heic", ".heif", ".jxl", ".svg", ".psd", ".dng", ".cr2", ".nef", ".arw", ".dcm"})
_TABLES = {".csv", ".tsv", ".json", ".xlsx"}
_MOST_KINDS = 20


def is_no_data(name: str) -> bool:
    """True for the name of a hidden file or folder, and of what systems leave behind."""
    return name.startswith(".") or name.lower() in _NO_DATA


@dataclass
class Unused:
    """Files and folders of a data set that aren't read: their number by kind, and an example of each."""

    counts: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, path: str, kind: str) -> None:
        """Adds a path below the data set's root, with "/"."""
        name = path.rpartition("/")[2]
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a million of these
        if kind == "folder":
            word, path = f"{name}/", f"{path}/"
        elif kind == "link":
            word = "links to folders that are part of the set already"
        elif is_no_data(name):
            word = "._*" if name.startswith("._") else name
        elif kind == "other":
            word = "pipes or devices"
        else:
            word = f"{suffix} outside the class folders" if suffix in PICTURE_SUFFIXES else suffix or name
        self.counts[word] += 1
        self.examples[word] = min(path, self.examples.get(word, path))

    def notes(self) -> tuple[str, ...]:
        """Sentences for the user."""
        if not self.counts:
            return ()
        kinds = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        shown = [
            self.examples[word] if count == 1 else f"{count:,} {word} (such as {self.examples[word]})"
            for word, count in kinds[:_MOST_KINDS]
        ]
        more = f" and {len(kinds) - _MOST_KINDS:,} more kinds" if len(kinds) > _MOST_KINDS else ""
        notes = [f"files and folders that aren't used ({self.counts.total():,}): {', '.join(shown)}{more}"]
        if tables := sorted(_TABLES & self.counts.keys()):
            notes.append(f"{', '.join(tables)} files aren't read: the class of a picture is the folder that it lies in")
        if pictures := sorted(UNREAD_SUFFIXES & self.counts.keys()):
            notes.append(f"{', '.join(pictures)} pictures can't be read: convert them, to JPEG for example")
        return tuple(note.encode(errors="surrogateescape").decode(errors="backslashreplace") for note in notes)


@dataclass
class ClassFolder:
    """What lies below one class folder."""

    text: bytes = b""  # the pictures' paths below the root, with "/", a zero byte behind each; sorted

    def add(self, names: list[str]) -> None:
        self.text = b"".join(map(encoded, sorted([*PictureNames.of_text(self.text), *names])))


@dataclass(frozen=True)
class Below:
    """What lies below all class folders."""

    classes: list[ClassFolder]  # one for each class folder, in the order that was given
    entered: set[Identity]  # all folders that were
    unused: Unused
    prefix: str  # from the data set's root to this one, for `unused`


def walk(root: Path, folders: Sequence[str], taken: Iterable[Identity], unused: Unused, prefix: str = "") -> Below:
    """Lists the pictures below root's class folders, at any depth; adds everything else to `unused`.

    Real folders go first. A link to a folder is followed unless that folder is part of the set already (or is in
    `taken`): a loop would multiply its samples, and give them another class. Raises UserError: a folder can't be read,
    or two class folders are the same one.
    """
    homes = class_identities(root, folders)
    entered = {_identity(place) for place in (root.resolve(), *root.resolve().parents)} | set(homes) | set(taken)
    below = Below([ClassFolder() for _ in folders], entered, unused, prefix)
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
    """Names of the folders and links to some in a folder, but those of no data. Raises UserError: it can't be read."""
    kinds = [(entry.name, _kind(entry)) for entry in _entries(root)]
    return tuple(sorted(name for name, kind in kinds if kind == "folder" and not is_no_data(name)))


def add_loose(root: Path, unused: Unused, prefix: str = "") -> None:
    """Adds the files that lie in a folder beside its class folders, and what is no data."""
    for entry in _entries(root):
        kind = _kind(entry)
        if kind != "folder" or is_no_data(entry.name):
            unused.add(prefix + entry.name, kind)


def holds_pictures(folder: Path, *, deep: bool = True, suffixes: frozenset[str] = PICTURE_SUFFIXES) -> bool:
    """True where there are pictures in a folder or, if `deep`, in those below it; without following links."""
    for _, below, files in os.walk(folder):
        below[:] = [name for name in below if deep and not is_no_data(name)]
        if any(Path(name).suffix.lower() in suffixes and not is_no_data(name) for name in files):
            return True
    return False


def _enter(root: Path, name: str, found: ClassFolder, below: Below) -> list[str]:
    """Adds what lies in one folder and in the real folders below it; returns the links to others, sorted."""
    waiting, links, pictures = [name], list[str](), list[str]()
    while waiting:
        folder = waiting.pop()
        for entry in _entries(root / folder):
            name, kind = f"{folder}/{entry.name}", _kind(entry)
            if is_no_data(entry.name):
                below.unused.add(below.prefix + name, kind)
            elif kind == "folder" and entry.is_symlink():
                links.append(name)
            elif kind == "folder":
                waiting += [name] if _is_new(root, name, below) else []
            elif kind == "file" and os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES:  # noqa: PTH122 - a million
                pictures.append(name)
            else:
                below.unused.add(below.prefix + name, kind)
    found.add(pictures)
    return sorted(links)


def _is_new(root: Path, name: str, below: Below) -> bool:
    """True the first time that a folder is met; otherwise the link to it is added to those that aren't used."""
    here = _identity(root / name)
    if here in below.entered:
        below.unused.add(below.prefix + name, "link")
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

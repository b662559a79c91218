"""Names of the files in class folders, and the walk that lists them. Imports no torch.

The names of millions of files are one array, which processes share by mapping a file. Python strings would need four
times the memory, and reading a string would copy its page in each process.
"""

import os
import stat
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from manyhands.core.errors import UserError
from manyhands.data.decode import PICTURE_SUFFIXES

_BLOCK = 1 << 12
Identity = str  # a folder's real path, because not every file system has inode numbers
# Names of files and folders of systems and programs, in lower case, which are ignored at every level. Other folders are
# classes, even if the name begins with "__" or "@".
_JUNK = frozenset({
    "__macosx", "__pycache__", "@eadir", "#recycle", "@recycle", "@recently-snapshot", "@tmp", "lost+found",
    "$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini",
})  # fmt: skip
UNREAD_SUFFIXES = frozenset({".heic", ".heif", ".jxl", ".svg", ".psd", ".dng", ".cr2", ".nef", ".arw", ".dcm"})
_TABLES = {".csv", ".tsv", ".json", ".xlsx"}
_LINK, _SPECIAL = "links to folders that are already included", "pipes or devices"
_MOST_KINDS = 20


@dataclass(frozen=True, eq=False)
class PictureNames:
    """Paths of pictures below a folder; equal if the paths below the folder are equal."""

    names: numpy.ndarray  # bytes [n]
    root: str = ""  # the prefix of each path

    @classmethod
    def of(cls, names: Iterable[str]) -> "PictureNames":
        return cls(numpy.array([name.encode(errors="surrogateescape") for name in names], numpy.bytes_))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> str:
        return os.path.join(self.root, self.names[place].decode(errors="surrogateescape"))  # noqa: PTH118 - a million

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return numpy.array_equal(self.names, other.names) if isinstance(other, PictureNames) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def part(self, chosen: slice | Sequence[int] | numpy.ndarray) -> "PictureNames":
        rows = chosen if isinstance(chosen, slice) else numpy.asarray(chosen, numpy.int64)
        return PictureNames(self.names[rows], self.root)

    def blocks(self) -> Iterator[bytes]:
        """Yields all names without the folder, each followed by a zero byte, in blocks of some thousands."""
        for first in range(0, len(self), _BLOCK):
            yield b"".join(name + b"\0" for name in self.names[first : first + _BLOCK].tolist())


def plain_form(name: str) -> str:
    """Returns a name as it looks: in Unicode's composed form (NFC), without spaces at the ends."""
    return unicodedata.normalize("NFC", name).strip()


def lookalike_difference(name: str, known: Iterable[str]) -> str:
    """Describes how a name differs from a known name that looks the same; empty if there is none."""
    for other in known:
        if other != name and plain_form(other) == plain_form(name):
            how = "spaces at the start or end" if other.strip() == name.strip() else "Unicode form (such as NFC, NFD)"
            return f"{name!a} and {other!a} differ in {how}"
    return ""


def is_junk(name: str) -> bool:
    """True for the name of a hidden file or folder, or of a system file such as Thumbs.db."""
    return name.startswith(".") or name.lower() in _JUNK


class Unused:
    """Counts the unused files and folders of a data set by kind, and keeps an example of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, path: str, kind: str) -> None:
        """Counts a path below the data set's root; `kind` is "folder", "file" or a description."""
        name = path.rpartition("/")[2]
        if kind == "folder":
            word, path = f"{name}/", f"{path}/"
        elif is_junk(name):
            word = "._*" if name.startswith("._") else name
        elif kind != "file":
            word = kind
        else:
            suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a million of these
            word = f"{suffix} outside the class folders" if suffix in PICTURE_SUFFIXES else suffix or name
        self._counts[word] += 1
        self._examples[word] = min(path, self._examples.get(word, path))

    def add_files(self, folder: Path, prefix: str = "") -> None:
        """Counts the files next to the class folders in a folder, and junk."""
        for entry in _entries(folder):
            kind = _kind(entry)
            if kind != "folder" or is_junk(entry.name):
                self.add(prefix + entry.name, kind)

    def notes(self) -> tuple[str, ...]:
        if not self._counts:
            return ()
        kinds = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        shown = [
            self._examples[word] if count == 1 else f"{count:,} {word} (such as {self._examples[word]})"
            for word, count in kinds[:_MOST_KINDS]
        ]
        more = f" and {len(kinds) - _MOST_KINDS:,} more kinds" if len(kinds) > _MOST_KINDS else ""
        notes = [f"unused files and folders ({self._counts.total():,}): {', '.join(shown)}{more}"]
        if tables := sorted(_TABLES & self._counts.keys()):
            notes.append(f"{', '.join(tables)} files are not read: the folder of a picture is its class")
        if pictures := sorted(UNREAD_SUFFIXES & self._counts.keys()):
            notes.append(f"{', '.join(pictures)} pictures can't be read: convert the pictures, for example to JPEG")
        return tuple(note.encode(errors="surrogateescape").decode(errors="backslashreplace") for note in notes)


class Walk:
    """Lists the pictures below the class folders of a split, at any depth; adds all other entries to `unused`.

    Real folders precede links. A link to a folder that is already listed is not followed: the link could be a loop, or
    assign pictures to a second class.
    """

    def __init__(self, root: Path, entered: Iterable[Identity], unused: Unused, prefix: str) -> None:
        self.entered = {os.path.realpath(place) for place in (root.resolve(), *root.resolve().parents)} | set(entered)
        self._root, self._unused, self._prefix = root, unused, prefix  # prefix: path from the data set's root to `root`
        self._links: deque[tuple[int, str]] = deque()  # links to folders, with their class indices

    def list_classes(self, folders: Sequence[str]) -> list[numpy.ndarray]:
        """Lists the sorted paths in each class folder, below the root. Raises UserError: a folder can't be read."""
        found = [PictureNames.of(sorted(self._enter(number, name))).names for number, name in enumerate(folders)]
        while self._links:
            number, name = self._links.popleft()
            if self._is_new(name):
                paths = sorted([*PictureNames(found[number]), *self._enter(number, name)])
                found[number] = PictureNames.of(paths).names
        return found

    def _enter(self, number: int, name: str) -> list[str]:
        """Lists the pictures of a folder and of the real folders below it; queues links to folders."""
        waiting, links, pictures = [name], list[str](), list[str]()
        while waiting:
            folder = waiting.pop()
            for entry in _entries(self._root / folder):
                name, kind = f"{folder}/{entry.name}", _kind(entry)
                if is_junk(entry.name):
                    self._unused.add(self._prefix + name, kind)
                elif kind == "folder" and entry.is_symlink():
                    links.append(name)
                elif kind == "folder":
                    waiting += [name] if self._is_new(name) else []
                elif kind == "file" and os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES:  # noqa: PTH122
                    pictures.append(name)
                else:
                    self._unused.add(self._prefix + name, kind)
        self._links += [(number, link) for link in sorted(links)]
        return pictures

    def _is_new(self, name: str) -> bool:
        """True when a folder is reached for the first time; otherwise counts the path as unused."""
        here = os.path.realpath(self._root / name)
        if here in self.entered:
            self._unused.add(self._prefix + name, _LINK)
            return False
        self.entered.add(here)
        return True


def class_identities(root: Path, folders: Sequence[str]) -> set[Identity]:
    homes: dict[Identity, str] = {}
    for name in folders:
        here = os.path.realpath(root / name)
        if here in homes:
            what = f'the class folders "{homes[here]}" and "{name}" are the same folder'
            raise UserError(what, str(root), ("remove the link to the folder",))
        homes[here] = name
    return set(homes)


def folders_in(root: Path) -> tuple[str, ...]:
    """Returns the names of subfolders, with links, without junk. Raises UserError: the folder can't be read."""
    kinds = [(entry.name, _kind(entry)) for entry in _entries(root)]
    return tuple(sorted(name for name, kind in kinds if kind == "folder" and not is_junk(name)))


def holds_pictures(folder: Path, *, deep: bool = True, suffixes: frozenset[str] = PICTURE_SUFFIXES) -> bool:
    """True if a folder contains pictures or, with `deep`, a subfolder does. Doesn't follow links."""
    for _, below, files in os.walk(folder):
        below[:] = [name for name in below if deep and not is_junk(name)]
        if any(Path(name).suffix.lower() in suffixes and not is_junk(name) for name in files):
            return True
    return False


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        hints = ("make the folder readable, or remove the folder",)
        raise UserError(f"the folder {folder.name} can't be read: {error.strerror}", str(folder), hints) from error


def _kind(entry: "os.DirEntry[str]") -> str:
    """Returns "folder", "file" (also for a broken link), or a description of a looping link or a device."""
    try:
        if entry.is_dir():
            place = Path(entry.path)
            loops = entry.is_symlink() and place.resolve() in (place.parent.resolve() / place.name).parents
            return _LINK if loops else "folder"
        return "file" if entry.is_file() or not stat.S_IFMT(entry.stat().st_mode) else _SPECIAL
    except OSError:
        return "file"

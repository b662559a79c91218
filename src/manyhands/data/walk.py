"""The walk that lists the files in class folders. Imports no torch."""

import os
import stat
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy

from manyhands.core.errors import UserError
from manyhands.data.decode import PICTURE_SUFFIXES
from manyhands.data.packed import PictureNames

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
        for entry, kind in _entries(folder):
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


def list_classes(
    root: Path, classes: Sequence[str], entered: set[Identity], unused: Unused, prefix: str
) -> list[numpy.ndarray]:
    """Lists the pictures in each class folder, at any depth, as sorted paths below `root`.

    Adds folders to `entered`, and all other files to `unused`, as paths that begin with `prefix`. Real folders precede
    links. A link to an entered folder is not followed: the link could be a loop, or assign pictures to a second class.
    Raises UserError: a folder can't be read.
    """

    def is_new(name: str) -> bool:
        here = os.path.realpath(root / name)
        if here in entered:
            unused.add(prefix + name, _LINK)
            return False
        entered.add(here)
        return True

    found: dict[int, numpy.ndarray] = {}
    queue = deque(enumerate(classes))  # class folders, then links to folders below them
    while queue:
        number, start = queue.popleft()
        if number in found and not is_new(start):
            continue
        pictures, waiting, links = [*PictureNames(found.get(number, numpy.empty(0)))], [start], list[str]()
        while waiting:
            folder = waiting.pop()
            for entry, kind in _entries(root / folder):
                name = f"{folder}/{entry.name}"
                if is_junk(entry.name):
                    unused.add(prefix + name, kind)
                elif kind == "folder" and entry.is_symlink():
                    links.append(name)
                elif kind == "folder":
                    waiting += [name] if is_new(name) else []
                elif kind == "file" and os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES:  # noqa: PTH122
                    pictures.append(name)
                else:
                    unused.add(prefix + name, kind)
        queue += [(number, link) for link in sorted(links)]
        found[number] = PictureNames.of(sorted(pictures)).names
    return [found[number] for number in range(len(classes))]


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
    return tuple(sorted(entry.name for entry, kind in _entries(root) if kind == "folder" and not is_junk(entry.name)))


def holds_pictures(folder: Path, *, deep: bool = True, suffixes: frozenset[str] = PICTURE_SUFFIXES) -> bool:
    """True if a folder contains pictures or, with `deep`, a subfolder does. Doesn't follow links."""
    for _, below, files in os.walk(folder):
        below[:] = [name for name in below if deep and not is_junk(name)]
        if any(Path(name).suffix.lower() in suffixes and not is_junk(name) for name in files):
            return True
    return False


def _entries(folder: Path) -> list[tuple["os.DirEntry[str]", str]]:
    """Returns what is in a folder, with the kind of each entry."""
    try:
        with os.scandir(folder) as entries:
            return [(entry, _kind(entry)) for entry in entries]
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

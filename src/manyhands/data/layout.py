"""Recognizes a data set's splits by folder names, and lists the pictures in class folders. Imports no torch."""

import os
import re
import stat
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

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

# Usual names, which need no message to the user; for each split, the first name found is used.
_EXACT = ("train", "val", "validation", "valid", "test")
_WORDS = {
    "train": ("train", "training", "trn", "trainval", "训练", "训练集"),
    "val": ("val", "validation", "valid", "validate", "eval", "evaluation", "dev", "development", "验证", "验证集"),
    "test": ("test", "testing", "tst", "holdout", "测试", "测试集"),
    "unlabelled": ("pred", "prediction", "predictions", "unlabeled", "unlabelled"),
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words}
_AFFIXES = ("set", "sets", "data", "dataset", "image", "images", "img", "imgs", "pictures", "photos", "split", "seg")
_JOINED = re.compile(f"({'|'.join(_SPLITS)})(?:{'|'.join(_AFFIXES)})")
_SORT = "sort its pictures into class folders, such as {0}/cat and {0}/dog"
_USES = ("training", "evaluation", "the test at the end")


@dataclass(frozen=True)
class FolderLayout:
    """The folders of a data set's splits."""

    splits: tuple[str, ...] = ()  # folders for training, evaluation and the final test; empty: class folders only
    inside: bool = False  # class folders hold the splits; `splits` has short names, such as "train"
    unused: tuple[str, ...] = ()  # folders that no split uses
    notes: tuple[str, ...] = ()  # messages for the user


def read_layout(root: Path) -> FolderLayout:
    """Recognizes splits by folder names. Raises UserError if the names are ambiguous."""
    folders = folders_in(root)
    kinds = _split_kinds(folders)
    others = [name for name in folders if name not in kinds]
    training = [name for name in folders if kinds.get(name) == "train" and _has_classes(root / name)]
    evaluated = [name for name in folders if kinds.get(name) in ("val", "test")]
    beside = [name for name in others if training and not evaluated and holds_pictures(root / name)]
    has_classes_beside = any(holds_pictures(root / name, deep=False) for name in beside)
    notes: list[str] = []
    if not training or (has_classes_beside and all(holds_pictures(root / name, deep=False) for name in training)):
        _refuse_splits_as_classes(root, kinds, others)
        notes += [f'the folder "{name}" is used as a class, not as a split' for name in kinds if len(folders) > 1]
        splits = _splits_inside(root, folders)
        notes += [f"within each class folder {_describe_folder_uses(splits)}"] if splits else []
        same = folders_in(root / folders[0]) if len(folders) > 1 and not splits else ()
        if len(same) > 1 and all(folders_in(root / name) == same for name in folders):
            what = f"the classes {_quoted(folders[:3])} all hold the folders {_quoted(same[:3])}"
            notes.append(f"{what}; if the outer folders are splits, rename them to train and test")
        return FolderLayout(splits, bool(splits), notes=tuple(notes))
    train = _choose_folder(root, training)
    if len(beside) > 1:
        what = f'"{train}" may be the training split, or a class like {_quoted(beside)}'
        _refuse_layout(root, what, f"if a split, give its path: {root / train}", f'if a class, rename "{train}"')
    val, test = (
        _choose_folder(root, [name for name in evaluated if kinds[name] == kind and folders_in(root / name)])
        for kind in ("val", "test")
    )
    for name in evaluated:
        if not folders_in(root / name):
            if kinds[name] == "val" and not val and holds_pictures(root / name):
                _refuse_layout(root, f'"{name}" has no class folders', _SORT.format(name))
            notes.append(f"{name}/ is not evaluated: the folder has no class folders")
    used = tuple(filter(None, (train, val, test)))
    if any(name not in _EXACT for name in used) or any(holds_pictures(root / name) for name in others):
        notes.insert(0, _describe_folder_uses(used))
    unused = tuple(name for name in folders if name not in used)
    return FolderLayout(tuple(_skip_nested_folder(root, name) for name in used), unused=unused, notes=tuple(notes))


def split_kind(name: str) -> str:
    """Returns the split that a folder name means: "train" for "Training", "valid" for "valid", "" for "cats"."""
    return name if name in _EXACT else parse_split(name)[0]


def _split_kinds(folders: Iterable[str]) -> dict[str, str]:
    """Returns the split of each split folder. Names with other words must form a pair: pets_train and pets_test."""
    parsed = {name: parse_split(name) for name in folders}
    kinds = {rest: {kind for kind, other in parsed.values() if kind and other == rest} for _, rest in parsed.values()}
    common = {rest for rest, found in kinds.items() if "train" in found and len(found) > 1}
    return {name: kind for name, (kind, rest) in parsed.items() if kind and (not rest or rest in common)}


def parse_split(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the split (or "") and the other words in a folder's name: ("train", ("pets",)) for "pets_train"."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    words = [joined[1] if (joined := _JOINED.fullmatch(word)) else word for word in words]
    found = sorted({_SPLITS[word] for word in words if word in _SPLITS})
    kind = found[0] if len(found) == 1 or found == ["train", "val"] else ""
    return kind, tuple(word for word in words if word not in _SPLITS and word not in _AFFIXES)


def _has_classes(folder: Path) -> bool:
    inner = folders_in(folder)
    return len(inner) == 1 or len(_split_kinds(inner)) < len(inner)


def _splits_inside(root: Path, classes: Sequence[str]) -> tuple[str, ...]:
    """Returns the splits in each class folder, as in cat/train, cat/test, dog/train, dog/test, or () if none."""
    kinds = {name: _split_kinds(folders_in(root / name)) for name in classes}
    found = {kind for inner in kinds.values() for kind in inner.values()}
    if "train" not in found or not found & {"val", "test"}:
        return ()
    contents: dict[tuple[str, ...], str] = {}  # an example of a class folder for each content
    for name, inner in kinds.items():
        content = [inner[folder] for folder in inner if inner[folder] != "unlabelled"]
        more = [folder for folder in folders_in(root / name) if inner.get(folder, "unlabelled") == "unlabelled"]
        content += [folder for folder in more if holds_pictures(root / name / folder)]
        content += ["pictures"] if holds_pictures(root / name, deep=False) else []
        if content:
            contents.setdefault(tuple(sorted(content)), name)
    splits = tuple(kind for kind in ("train", "val", "test") if kind in found)
    if contents.keys() != {tuple(sorted(splits))}:
        held = "; ".join(f"{name}/ holds {', '.join(content)}" for content, name in [*contents.items()][:2])
        name = next(iter(contents.values()))
        _refuse_layout(
            root,
            f"class folders hold splits, but not each holds {', '.join(splits)} and nothing else: {held}",
            "give each class folder the same splits, and nothing else",
            f"or move the splits: {name}/train to train/{name}, and so on",
            "or rename the folders that are not splits",
        )
    return splits


def _choose_folder(root: Path, names: list[str]) -> str:
    """Returns which of `names` to use for a split, or "" if there are none. Raises UserError if that is ambiguous."""
    exact = [name for name in _EXACT if name in names]
    if not exact and len(names) > 1:
        hint = f"rename the folder to use to {parse_split(names[0])[0]}, or move the others elsewhere"
        _refuse_layout(root, f"the folders {_quoted(names)} are for the same split", hint)
    return next(iter(exact + names), "")


def _skip_nested_folder(root: Path, name: str) -> str:
    """Returns "train/train" for "train" if that is its only subfolder, as in unpacked archives, else `name`."""
    inner = root / name / name
    single = folders_in(root / name) == (name,) and not inner.is_symlink() and bool(folders_in(inner))
    return f"{name}/{name}" if single else name


def _refuse_splits_as_classes(root: Path, kinds: dict[str, str], others: list[str]) -> None:
    names = list(kinds)
    if len(names) > 1 and "train" in kinds.values():
        rename = f"rename folders that are classes, such as {names[0]} to class-{names[0]}"
        what = f"the folders {_quoted(names)} have names of splits, but hold no class folders"
        _refuse_layout(root, what, _SORT.format(names[0]), rename)
    splits = len(names) > 1 or (names and folders_in(root / names[0]))
    if splits and not any(holds_pictures(root / name) for name in others):
        hint = f"name the folder of class folders: {root / names[0]}"
        _refuse_layout(root, f"there is {_quoted(names)}, but no training split", hint, 'or add a folder named "train"')


def _refuse_layout(root: Path, what: str, *hints: str) -> NoReturn:
    raise UserError(what, str(root), hints)


def _describe_folder_uses(names: Iterable[str]) -> str:
    return ", ".join(f"{name}/ is used for {use}" for name, use in zip(names, _USES, strict=False))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def normalize_name(name: str) -> str:
    """Converts a name to Unicode NFC without spaces at the ends, so that names that look the same are equal."""
    return unicodedata.normalize("NFC", name).strip()


def lookalike_difference(name: str, known: Iterable[str]) -> str:
    """Describes how a name differs from a known name that looks the same, or returns "" if there is none."""
    for other in known:
        if other != name and normalize_name(other) == normalize_name(name):
            how = "spaces at the start or end" if other.strip() == name.strip() else "Unicode form (such as NFC, NFD)"
            return f"{name!a} and {other!a} differ in {how}"
    return ""


def is_junk(name: str) -> bool:
    """Returns True for the name of a hidden file or folder, or of a system file such as Thumbs.db."""
    return name.startswith(".") or name.lower() in _JUNK


class UnusedFiles:
    """Counts the unused files and folders of a data set by kind, with an example of each kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, path: str, kind: str) -> None:
        """Counts a path, relative to the data set's root. `kind`: "folder", "file" or a description of another kind."""
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
        """Counts the files and system folders directly in `folder`. All other subfolders are classes."""
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
    root: Path, classes: Sequence[str], entered: set[Identity], unused: UnusedFiles, prefix: str
) -> list[numpy.ndarray]:
    """Returns an array for each class folder, with the sorted paths, relative to `root`, of pictures at any depth.

    Adds folders to `entered`, and other files, with `prefix`, to `unused`. Follows symbolic links last, and not to
    entered folders, which could be loops or in two classes. Raises UserError if a folder is unreadable.
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
        found[number] = PictureNames.from_strings(sorted(pictures)).names
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
    """Returns the names of subfolders and links to folders, except system folders. Raises UserError on failure."""
    return tuple(sorted(entry.name for entry, kind in _entries(root) if kind == "folder" and not is_junk(entry.name)))


def holds_pictures(folder: Path, *, deep: bool = True, suffixes: frozenset[str] = PICTURE_SUFFIXES) -> bool:
    """Returns True if a folder or, with `deep`, a subfolder contains pictures. Doesn't follow links."""
    for _, below, files in os.walk(folder):
        below[:] = [name for name in below if deep and not is_junk(name)]
        if any(Path(name).suffix.lower() in suffixes and not is_junk(name) for name in files):
            return True
    return False


def _entries(folder: Path) -> list[tuple["os.DirEntry[str]", str]]:
    """Returns a folder's entries as pairs (entry, its `_entry_kind`)."""
    try:
        with os.scandir(folder) as entries:
            return [(entry, _entry_kind(entry)) for entry in entries]
    except OSError as error:
        hints = ("make the folder readable, or remove the folder",)
        raise UserError(f"the folder {folder.name} can't be read: {error.strerror}", str(folder), hints) from error


def _entry_kind(entry: "os.DirEntry[str]") -> str:
    """Returns "folder", "file" (also for a broken link), or a description of a looping link or a device."""
    try:
        if entry.is_dir():
            place = Path(entry.path)
            loops = entry.is_symlink() and place.resolve() in (place.parent.resolve() / place.name).parents
            return _LINK if loops else "folder"
        return "file" if entry.is_file() or not stat.S_IFMT(entry.stat().st_mode) else _SPECIAL
    except OSError:
        return "file"

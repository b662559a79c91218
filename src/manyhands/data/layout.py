"""Recognizes the layout of a folder of pictures: class folders only, or split folders above or inside class folders."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from manyhands.core.errors import UserError
from manyhands.data.walk import folders_in, holds_pictures

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
    """The splits of a folder."""

    splits: tuple[str, ...] = ()  # folders for training, evaluation and the final test; empty: class folders only
    inside: bool = False  # class folders hold the splits; `splits` has short names, such as "train"
    unused: tuple[str, ...] = ()  # folders that no split uses
    notes: tuple[str, ...] = ()  # messages for the user


def read_layout(root: Path) -> FolderLayout:
    """Recognizes splits by folder names. Raises UserError: the names are ambiguous."""
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
        notes += [f"within each class folder {_uses(splits)}"] if splits else []
        same = folders_in(root / folders[0]) if len(folders) > 1 and not splits else ()
        if len(same) > 1 and all(folders_in(root / name) == same for name in folders):
            what = f"the classes {_quoted(folders[:3])} all hold the folders {_quoted(same[:3])}"
            notes.append(f"{what}; if the outer folders are splits, rename them to train and test")
        return FolderLayout(splits, bool(splits), notes=tuple(notes))
    train = _only(root, training)
    if len(beside) > 1:
        what = f'"{train}" may be the training split, or a class like {_quoted(beside)}'
        _refuse(root, what, f"if a split, give its path: {root / train}", f'if a class, rename "{train}"')
    val, test = (
        _only(root, [name for name in evaluated if kinds[name] == kind and folders_in(root / name)])
        for kind in ("val", "test")
    )
    for name in evaluated:
        if not folders_in(root / name):
            if kinds[name] == "val" and not val and holds_pictures(root / name):
                _refuse(root, f'"{name}" has no class folders', _SORT.format(name))
            notes.append(f"{name}/ is not evaluated: the folder has no class folders")
    used = tuple(filter(None, (train, val, test)))
    if any(name not in _EXACT for name in used) or any(holds_pictures(root / name) for name in others):
        notes.insert(0, _uses(used))
    unused = tuple(name for name in folders if name not in used)
    return FolderLayout(tuple(_nested(root, name) for name in used), unused=unused, notes=tuple(notes))


def split_word(path: str) -> str:
    """Returns the short name of a split's folder: "train" for "Training"; "valid" is unchanged."""
    name = path.rpartition("/")[2]
    return name if name in _EXACT else parse_split(name)[0]


def _split_kinds(folders: Iterable[str]) -> dict[str, str]:
    """Maps folder names to kinds of split; other words must recur in another split (pets_train, pets_test)."""
    parsed = {name: parse_split(name) for name in folders}
    kinds = {rest: {kind for kind, other in parsed.values() if kind and other == rest} for _, rest in parsed.values()}
    common = {rest for rest, found in kinds.items() if "train" in found and len(found) > 1}
    return {name: kind for name, (kind, rest) in parsed.items() if kind and (not rest or rest in common)}


def parse_split(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the kind of split in a name, if any, and the other words, without usual affixes."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    words = [joined[1] if (joined := _JOINED.fullmatch(word)) else word for word in words]
    found = sorted({_SPLITS[word] for word in words if word in _SPLITS})
    kind = found[0] if len(found) == 1 or found == ["train", "val"] else ""
    return kind, tuple(word for word in words if word not in _SPLITS and word not in _AFFIXES)


def _has_classes(folder: Path) -> bool:
    inner = folders_in(folder)
    return len(inner) == 1 or len(_split_kinds(inner)) < len(inner)


def _splits_inside(root: Path, classes: Sequence[str]) -> tuple[str, ...]:
    """Returns the splits that every class folder holds, as in cat/train, cat/test, dog/train, dog/test; else ()."""
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
        _refuse(
            root,
            f"class folders hold splits, but not each holds {', '.join(splits)} and nothing else: {held}",
            "give each class folder the same splits, and nothing else",
            f"or move the splits: {name}/train to train/{name}, and so on",
            "or rename the folders that are not splits",
        )
    return splits


def _only(root: Path, names: list[str]) -> str:
    """Returns the folder to use for a split, or "". Raises UserError: several names are possible."""
    exact = [name for name in _EXACT if name in names]
    if not exact and len(names) > 1:
        hint = f"rename the right folder to {parse_split(names[0])[0]}, or move the rest elsewhere"
        _refuse(root, f"the folders {_quoted(names)} are for the same split", hint)
    return next(iter(exact + names), "")


def _nested(root: Path, name: str) -> str:
    """Returns the folder, or its only subfolder if both have the same name, as after unpacking an archive."""
    inner = root / name / name
    single = folders_in(root / name) == (name,) and not inner.is_symlink() and bool(folders_in(inner))
    return f"{name}/{name}" if single else name


def _refuse_splits_as_classes(root: Path, kinds: dict[str, str], others: list[str]) -> None:
    names = list(kinds)
    if len(names) > 1 and "train" in kinds.values():
        rename = f"rename folders that are classes, such as {names[0]} to class-{names[0]}"
        what = f"the folders {_quoted(names)} have names of splits, but hold no class folders"
        _refuse(root, what, _SORT.format(names[0]), rename)
    if (len(names) > 1 or (names and folders_in(root / names[0]))) and not any(
        holds_pictures(root / name) for name in others
    ):
        hint = f"name the folder of class folders: {root / names[0]}"
        _refuse(root, f"there is {_quoted(names)}, but no training split", hint, 'or add a folder named "train"')


def _refuse(root: Path, what: str, *hints: str) -> NoReturn:
    raise UserError(what, str(root), hints)


def _uses(names: Iterable[str]) -> str:
    return ", ".join(f"{name}/ is used for {use}" for name, use in zip(names, _USES, strict=False))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

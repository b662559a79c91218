"""Layout of a folder of pictures: class folders alone, or one folder of class folders for each split."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.walk import folders_in, holds_pictures

# Names that are splits as they are written; of several for the same split the first one counts.
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
_MEND = "sort its pictures into class folders, such as {}/cat and {}/dog"


@dataclass(frozen=True)
class FolderLayout:
    """Folders of the splits, as paths below the root with "/"; without `train` the root's folders are the classes."""

    train: str = ""
    test: str = ""  # evaluated during training; empty: a share of the training pictures is
    held_out: str = ""  # evaluated once, at the end
    unused: tuple[str, ...] = ()  # folders below the root
    notes: tuple[str, ...] = ()  # sentences for the user

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.train, self.test, self.held_out)))


def read_layout(root: Path) -> FolderLayout:
    """Recognises splits by the names of their folders. Raises UserError: the names allow several readings."""
    folders = folders_in(root)
    splits = _split_names(folders)
    others = [name for name in folders if name not in splits]
    training = [name for name in folders if splits.get(name) == "train" and folders_in(root / name)]
    evaluated = [name for name in folders if splits.get(name) in ("val", "test")]
    alone = bool(training) and not evaluated
    beside = [name for name in others if alone and holds_pictures(root / name, deep=False)]
    if not training or (beside and all(holds_pictures(root / name, deep=False) for name in training)):
        _refuse_splits_as_classes(root, splits, others)
        return FolderLayout(
            notes=tuple(f'the folder "{name}" is a class, not a split' for name in splits if len(folders) > 1)
        )
    train = _only(root, training)
    if len(beside) > 1:
        what = f'"{train}" is the training split, or a class beside {_quoted(beside)}'
        raise UserError(what, str(root), (f"name the folder that is meant: {root / train}", "or rename it"))
    val, test = (
        _only(root, [name for name in evaluated if splits[name] == split and folders_in(root / name)])
        for split in ("val", "test")
    )
    notes: list[str] = []
    for name in evaluated:
        if not folders_in(root / name):
            if splits[name] == "val" and not val and holds_pictures(root / name):
                raise UserError(f'"{name}" has no class folders', str(root / name), (_MEND.format(name, name),))
            notes.append(f"{name}/ has no class folders, so that it can't be evaluated")
    used = tuple(filter(None, (train, val or test, test if val else "")))
    uses = zip(used, ("training", "evaluation", "the test at the end"), strict=False)
    if any(name not in _EXACT for name in used) or any(holds_pictures(root / name) for name in others):
        notes.insert(0, ", ".join(f"{name}/ is used for {use}" for name, use in uses))
    below = [_nested(root, name) for name in used] + ["", ""]
    return FolderLayout(below[0], below[1], below[2], tuple(name for name in folders if name not in used), tuple(notes))


def split_word(path: str) -> str:
    """The short name of a split's folder: "Training" is "train", "valid" stays."""
    name = path.rpartition("/")[2]
    return name if name in _EXACT else _parsed(name)[0]


def _split_names(folders: Iterable[str]) -> dict[str, str]:
    """The split that each folder is named after; without those whose name says something else too.

    Other words count for nothing where they are common to training and another split, as in "pets_train", "pets_test".
    """
    parsed = {name: _parsed(name) for name in folders}
    kinds = {
        rest: {split for split, other in parsed.values() if split and other == rest} for _, rest in parsed.values()
    }
    common = {rest for rest, found in kinds.items() if "train" in found and len(found) > 1}
    return {name: split for name, (split, rest) in parsed.items() if split and (not rest or rest in common)}


def _parsed(name: str) -> tuple[str, tuple[str, ...]]:
    """The split that one of the words of a name stands for, if any, and its other words, without usual affixes."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    words = [joined[1] if (joined := _JOINED.fullmatch(word)) else word for word in words]
    found = sorted({_SPLITS[word] for word in words if word in _SPLITS})
    split = found[0] if len(found) == 1 or found == ["train", "val"] else ""
    return split, tuple(word for word in words if word not in _SPLITS and word not in _AFFIXES)


def _only(root: Path, names: list[str]) -> str:
    """The folder to use of those for one split; "" of none. Raises UserError: there are several."""
    exact = [name for name in _EXACT if name in names]
    if not exact and len(names) > 1:
        mend = (f"rename the one that is meant to {_parsed(names[0])[0]}, or move the others elsewhere",)
        raise UserError(f"the folders {_quoted(names)} are for the same split", str(root), mend)
    return next(chain(exact, names), "")


def _nested(root: Path, name: str) -> str:
    """The folder itself, or the only one in it where that has the same name, as archives are often unpacked."""
    inner = root / name / name
    single = folders_in(root / name) == (name,) and not inner.is_symlink() and bool(folders_in(inner))
    return f"{name}/{name}" if single else name


def _refuse_splits_as_classes(root: Path, splits: dict[str, str], others: list[str]) -> None:
    """Raises UserError: the folders are splits that can't be used, rather than classes."""
    names = list(splits)
    if not names or (len(names) == 1 and not folders_in(root / names[0])):
        return
    if "train" not in splits.values() or len(names) == 1:
        if not any(holds_pictures(root / name) for name in others):
            mend = (f"name the folder of class folders: {root / names[0]}", "or add a folder train")
            raise UserError(f"there is {_quoted(names)}, but no training split", str(root), mend)
    else:
        mend = (
            _MEND.format(names[0], names[0]),
            f"rename the folders if they are classes, such as {names[0]} to class-{names[0]}",
        )
        raise UserError(f"{_quoted(names)} are names of splits, but hold no class folders", str(root), mend)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

"""Folders of all kinds: what is trained on and evaluated is what was put there, and everything else is named."""

import itertools
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.data.folder import list_splits
from manyhands.data.layout import read_layout
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions

CLASSES = ("cat", "__background__", "@home", "猫", "0", "Cat", "train data of cats")
JUNK_FOLDERS = ("@eaDir", "__MACOSX", "__pycache__", "#recycle", ".ipynb_checkpoints", "System Volume Information")
JUNK_FILES = (".DS_Store", "Thumbs.db", "desktop.ini", ".hidden.png")
OTHER_FILES = ("README", "labels.csv", "notes.txt", "a.heic", "b.HEIC", "c.json")
WORDS = {
    "train": ("train", "Training", "TrainData", "trn", "训练集"),
    "val": ("val", "valid", "validation", "eval", "Dev"),
    "test": ("test", "Testing", "TEST", "tst", "holdout", "测试集"),
}
AFFIXES = (("", ""), ("", "_set"), ("seg_", ""), ("", "2017"), ("01-", ""), ("", " data"), ("pets_", ""))
COUNTS = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 3), min_size=1, max_size=4)
NUMBERS = itertools.count()


class Made:
    """A folder on the disk, and what is to become of each thing in it."""

    def __init__(self, base: Path, name: str) -> None:
        self.outside, self.root = base / f"{name}-outside", base / name
        self.outside.mkdir()
        self.root.mkdir()
        self.used: dict[str, set[tuple[str, str]]] = defaultdict(set)  # (class, path) by split
        self.unused: dict[str, str] = {}  # the kind of each, by its path
        self.folders: list[tuple[Path, str, str]] = []  # class folders and those below, with their split and class

    def path(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def picture(self, path: Path, split: str, label: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.used[split].add((label, str(path)))

    def classes(self, place: str, split: str, counts: dict[str, int]) -> None:
        """Adds class folders; `place` has a * where their names go."""
        for label, count in counts.items():
            folder = self.root / place.replace("*", label)
            folder.mkdir(parents=True, exist_ok=True)
            self.folders.append((folder, split, label))
            for number in range(count):
                deeper = folder / "more" if number == 2 else folder
                self.picture(deeper / f"{number}.{'png' if number else 'JPG'}", split, label)
            if count > 2:
                self.folders.append((folder / "more", split, label))

    def put_strange(self, place: Path, name: str) -> None:
        """Adds a file, or a folder with a picture, that isn't used."""
        path = place / name
        if name in JUNK_FOLDERS:
            (path / "cat").mkdir(parents=True)
            (path / "cat" / "0.png").touch()
            self.unused[self.path(path) + "/"] = f"{name}/"
        else:
            path.touch()
            self.unused[self.path(path)] = name if name in (*JUNK_FILES, "README") else Path(name).suffix.lower()

    def put_loose(self, place: Path) -> None:
        (place / "loose.jpg").touch()
        self.unused[self.path(place / "loose.jpg")] = ".jpg outside the class folders"

    def put_link(self, place: Path, split: str, label: str, kind: str) -> None:
        """Adds a link: to a folder of pictures elsewhere, to a folder that holds the link, to a picture, or to nothing.

        Without a label it lies beside the class folders, and is one if it holds pictures.
        """
        number = next(NUMBERS)
        link, outside = place / f"link{number}", self.outside / str(number)
        if kind == "elsewhere":
            outside.mkdir()
            link.symlink_to(outside)
            self.picture(link / "x.webp", split, label or link.name)
        elif kind == "loop":
            link.symlink_to(self.root if label else place)
            self.unused[self.path(link)] = "links to folders that are already included"
        elif kind == "picture":
            outside.with_suffix(".png").touch()
            link.with_suffix(".png").symlink_to(outside.with_suffix(".png"))
            self.used[split].add((label, str(link.with_suffix(".png"))))
        else:
            link.with_suffix(".txt").symlink_to("nowhere")
            self.unused[self.path(link.with_suffix(".txt"))] = ".txt"


@st.composite
def plans(draw):
    """Splits with the places of their class folders and the pictures of each class; what else lies at which level."""
    counts = draw(COUNTS.filter(lambda found: sum(map(bool, found.values())) > 1))
    plan: dict[str, tuple[str, dict[str, int]]] = {"": ("*", counts)}
    if draw(st.booleans()):
        splits = ["train", *draw(st.sampled_from([[], ["val"], ["test"], ["val", "test"]]))]
        # other words than those around splits recur in each split
        before, behind = draw(st.sampled_from(AFFIXES if len(splits) > 1 else AFFIXES[:-1]))
        inside = len(splits) > 1 and draw(st.booleans())  # each class folder is divided
        plan = {}
        for split in splits:
            name = before + draw(st.sampled_from(WORDS[split])) + behind
            name = draw(st.sampled_from((name, name.upper(), name.title())))
            name += f"/{name}" * draw(st.booleans())  # as some archives are unpacked
            part = counts if split == "train" else {label: draw(st.integers(0, 2)) for label in counts}
            if split != "train" and not any(part.values()):
                part = dict.fromkeys(counts, 1)
            plan[split] = (f"*/{name}" if inside else f"{name}/*", part)
    strange = st.sampled_from((*JUNK_FOLDERS, *JUNK_FILES, *OTHER_FILES))
    links = st.sampled_from(("elsewhere", "loop", "picture", "nothing"))
    level = st.integers(0, 30)
    return (
        plan,
        draw(st.sets(st.tuples(level, strange), max_size=8)),
        draw(st.sets(st.tuples(level, links), max_size=4)),
        draw(st.sets(level, max_size=2)),
        draw(st.sets(st.sampled_from(("extras", "masks", "pred")), max_size=2)),
        draw(st.sets(st.sampled_from(("elsewhere", "loop", "split", "empty")), max_size=4)),
    )


def put_there(made: Made, plan, strange, links, loose, extras, more) -> None:
    for split, (place, counts) in plan.items():
        made.classes(place, split, counts)
    outer = [made.root / place.removesuffix("/*") for place, _ in plan.values() if place.endswith("/*")]
    above = sorted({made.root, *outer, *(place.parent for place in outer)})
    if outer:
        for name in extras:
            (made.root / name / "deep").mkdir(parents=True)
            (made.root / name / "deep" / "0.png").touch()
            made.unused[f"{name}/"] = f"{name}/"
    places = [*above, *(place for place, *_ in made.folders)]
    for level, name in strange:
        if not os.path.lexists(places[level % len(places)] / name):
            made.put_strange(places[level % len(places)], name)
    for level, kind in links:
        made.put_link(*made.folders[level % len(made.folders)], kind)
    for level in loose:
        if not (above[level % len(above)] / "loose.jpg").exists():
            made.put_loose(above[level % len(above)])
    put_around(made, *next(iter(plan.items())), bool(outer), more)


def put_around(made: Made, split, first, has_splits: bool, more) -> None:
    place, _ = first
    for kind in sorted(more & {"elsewhere", "loop"}):
        if place.endswith("*"):
            made.put_link(made.root / place.removesuffix("*"), split, "", kind)
    if "empty" in more:  # nothing is unused in the first
        (made.folders[0][0] / "empty" / "deep").mkdir(parents=True)
        if has_splits:
            (made.root / "empty").mkdir()
            made.unused["empty/"] = "empty/"
    if "split" in more and has_splits:
        moved = made.root / place.partition("/")[0]
        moved.rename(made.outside / moved.name)
        moved.symlink_to(made.outside / moved.name)


def named_in(notes) -> Counter[str]:
    """The unused things by the words that the note has for each: a path, or a kind with its number."""
    found: Counter[str] = Counter()
    for note in notes:
        if match := re.fullmatch(r"unused files and folders \(([\d,]+)\): (.*)", note):
            for item in re.split(r", (?![^(]*\))", match[2]):
                counted = re.fullmatch(r"(\d+) (.*) \(such as .*\)", item)
                found[counted[2] if counted else item] += int(counted[1]) if counted else 1
            assert found.total() == int(match[1])
    return found


EXAMPLE = {"train": ("Training/*", {"cat": 3, "猫": 2, "0": 0}), "test": ("Testing/*", {"cat": 1, "猫": 0, "0": 2})}
INSIDE = {"train": ("*/Training", {"cat": 3, "猫": 2, "0": 0}), "test": ("*/Testing", {"cat": 1, "猫": 0, "0": 0})}
PLAIN = {"": ("*", {"cat": 3, "猫": 2})}
JUNK = {(0, "labels.csv"), (1, "@eaDir"), (3, "@eaDir")}
MORE = {"elsewhere", "loop", "split", "empty"}


@settings(max_examples=60)
@given(plans())
@example((EXAMPLE, JUNK, {(0, "loop")}, {0, 1}, {"extras"}, MORE))
@example((PLAIN, {(0, "labels.csv")}, set(), {0}, set(), {"loop", "elsewhere"}))
@example((INSIDE, JUNK, {(0, "loop"), (1, "elsewhere")}, {0}, {"extras"}, {"empty"}))
def test_what_is_trained_on_is_what_is_there_and_everything_else_is_named(tmp_path, plan):
    made = Made(tmp_path, f"set{next(NUMBERS)}")
    put_there(made, *plan)
    options = DataOptions(name=str(made.root))
    seen = {label for found in made.used.values() for label, _ in found}
    shared = any(place.startswith("*") for place, _ in plan[0].values())
    folders = [(place, label) for place, split, label in made.folders if shared or split == "train"]
    unread = {label for place, label in folders if [*place.glob("[ab].[hH]*")]}
    if [*plan[0]] == ["train"] and len(plan[4] - {"pred"}) > 1:
        with pytest.raises(UserError, match="may be the training split, or a class like"):
            open_data(options)
        return
    if unread - seen:  # a folder of nothing but HEIC isn't an empty one
        with pytest.raises(UserError, match="has only pictures in formats that can't be read"):
            open_data(options)
        return
    splits = open_data(options)
    sources = {"train": splits.train, "test": splits.test, "held-out": splits.held_out}
    read = {
        word: {(splits.classes[label], path) for path, label in zip(source.paths, source.labels.tolist(), strict=True)}
        for word, source in sources.items()
        if source is not None
    }
    assert [len(source.paths) for source in sources.values() if source] == [len(found) for found in read.values()]
    words = list(made.used)
    if len(words) == 1:
        assert read["train"] | read["test"] == made.used[words[0]]
        assert not read["train"] & read["test"]
    else:
        evaluated = "val" if "val" in words else "test"
        assert (read["train"], read["test"]) == (made.used["train"], made.used[evaluated])
        assert read.get("held-out") == (made.used["test"] if len(words) == 3 else None)
    assert splits.classes == tuple(sorted(seen))
    assert f"{len(splits.train):,} + {len(splits.test):,} pictures" in splits.description
    kinds = Counter(made.unused.values())
    wanted = Counter({kind if kinds[kind] > 1 else path: kinds[kind] for path, kind in made.unused.items()})
    assert named_in(splits.notes) == wanted
    said = "\n".join(splits.notes)
    empty = {label for _, counts in plan[0].values() for label in counts} - {*splits.classes}
    assert all(word in said for word in empty)
    if shared:
        uses = dict(zip(words, ("training", "evaluation", "the test at the end"), strict=False))
        said_of = "within each class folder " + ", ".join(f"{word}/ is used for {use}" for word, use in uses.items())
        assert (said_of in said) == (len(words) > 1)
    else:
        names = {place.partition("/")[0] for place, _ in plan[0].values()}
        assert names <= {"train", "val", "valid", "validation", "test"} or all(
            f"{name}/ is used for" in said for name in names
        )


@given(st.sets(st.sampled_from([word for words in WORDS.values() for word in words]), min_size=2, max_size=4))
def test_folders_that_are_all_named_after_splits_are_never_classes(tmp_path, names):
    root = tmp_path / str(next(NUMBERS))
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "0.png").touch()
    with pytest.raises(UserError, match="split"):
        list_splits(root)


@given(
    st.sampled_from([word for words in WORDS.values() for word in words]),
    st.sampled_from(AFFIXES[:-1]),
    st.sampled_from([("bus",), ("bus", "car")]),
)
def test_one_of_them_among_classes_is_a_class(tmp_path, word, affixes, others):
    root, name = tmp_path / str(next(NUMBERS)), word.join(affixes)
    for folder in (*others, name):
        (root / folder).mkdir(parents=True)
        (root / folder / "0.png").touch()
    (found,) = list_splits(root)
    assert found.classes == tuple(sorted((*others, name)))
    assert read_layout(root).notes == (f'the folder "{name}" is used as a class, not as a split',)


def test_class_folders_that_hold_the_same_folders_are_noted(tmp_path):
    for name in ("te/cat", "te/dog", "tr/cat", "tr/dog"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "0.png").touch()
    (note,) = read_layout(tmp_path).notes
    assert '"te", "tr" all hold the folders "cat", "dog"' in note

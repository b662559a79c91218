"""What the published files of known data sets are called, and which set a place holds. Needs no torch."""

import gzip
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.plugins import is_object_reference


@dataclass(frozen=True)
class Layout:
    """The files of one published form of CIFAR."""

    folder: str  # what the archive unpacks to
    archive: str  # the archive's name
    train: tuple[str, ...]  # files of the training split, in order
    test: str  # file of the test split
    names: str  # file with the class names
    label_bytes: int = 0  # in front of each binary record; 0 for a pickle
    key: str = "labels"  # of labels, or of class names, in a pickle: "labels", "fine_labels"
    # files that together tell this form from everything else; the first of training if empty
    signs: tuple[str, ...] = field(default=())

    def lies_in(self, place: Path) -> bool:
        """True for a folder that holds this form's files themselves."""
        return all((place / name).is_file() for name in self.signs or self.train[:1])


_FIVE = range(1, 6)
# The first form of each is the one that is fetched.
CIFAR = {
    "cifar10": (
        Layout(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            tuple(f"data_batch_{number}" for number in _FIVE),
            "test_batch",
            "batches.meta",
        ),
        Layout(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            tuple(f"data_batch_{number}.bin" for number in _FIVE),
            "test_batch.bin",
            "batches.meta.txt",
            label_bytes=1,
        ),
    ),
    "cifar100": (
        Layout(
            "cifar-100-python",
            "cifar-100-python.tar.gz",
            ("train",),
            "test",
            "meta",
            key="fine_labels",
            signs=("train", "test", "meta"),
        ),
        Layout(
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            ("train.bin",),
            "test.bin",
            "fine_label_names.txt",
            label_bytes=2,
            signs=("train.bin", "test.bin"),
        ),
    ),
}
# MNIST's successors took over the names of its files, so what tells them apart is the first labels of the test split.
MNIST_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
_MNIST_LABELS = {
    bytes((7, 2, 1, 0, 4, 1, 4, 9, 5, 9)): "mnist",
    bytes((9, 2, 1, 1, 6, 1, 4, 6, 5, 7)): "fashion-mnist",
}
_MNIST_FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_IDX_HEADER = 8  # bytes before the labels


def recognise(place: Path) -> str:
    """The known set whose published files a folder holds, or an archive is; empty for anything else.

    Raises UserError: it holds several sets, or files that are called as MNIST's and are not.
    """
    if not place.is_dir():
        return next((name for name, forms in CIFAR.items() if place.name in {form.archive for form in forms}), "")
    found = [name for name, forms in CIFAR.items() if any(_cifar_within(place, name, form) for form in forms)]
    here = mnist_files(place) or mnist_files(place / "raw")
    if here and not mnist_name(here):
        what = "the files are called as MNIST's, and their first labels are neither MNIST's nor Fashion-MNIST's"
        mend = (f"if they are to count as MNIST: mnist --data-dir {place}", "torchvision's others: torchvision:KMNIST")
        raise UserError(what, str(place), mend)
    below = [name for name in MNIST_FOLDERS if any(map(mnist_files, _mnist_below(place, name)))]
    found += [mnist_name(here)] if here else below
    if len(found) > 1:
        mend = tuple(f"{name} --data-dir {place}" for name in found)
        raise UserError(f"the folder holds {' and '.join(found)}", str(place), mend)
    return found[0] if found else ""


def named(name: str) -> tuple[str, str] | None:
    """A known set's name and the folder of its files if `name` is a path to them. Raises UserError as `recognise`."""
    place = Path(name).expanduser()
    # A set's own name stays that, also where the current folder has one called so.
    known = recognise(place) if name not in {"", "digits", *CIFAR, *MNIST_FOLDERS} and place.exists() else ""
    if not known:
        return None
    return known, str(place if place.is_dir() else place.parent)


def refuse_no_folder(name: str) -> None:
    """Raises UserError for a path that is neither a folder nor a known set's archive; any other word may be a name."""
    place = Path(name).expanduser()
    is_path = place.is_file() or "/" in name or "." in name
    if not is_path or is_object_reference(name) or place.is_dir() or named(name):
        return
    folder = "name a folder of class folders, or one with train/ and val/"
    own = "file.py:function of your own, which returns (train, test)"
    if place.suffix in {".yaml", ".yml"} and place.is_file():
        mend = ("a job is written in TOML: manyhands train job.toml", f"for data: {folder}")
        raise UserError(f"{name} is YAML, which isn't read", "data.name", mend)
    if place.is_file():
        mend = (folder, f"or read the file in {own}")
        raise UserError(f"{name} is a file, and data is read from a folder", "data.name", mend)
    raise UserError(f"there is no folder {name}", "data.name", (folder, f"or {own}"))


def mnist_places(folder: Path, name: str) -> list[Path]:
    """Where the files of a named set may lie below a data folder, the most likely first."""
    # The data folder itself may be the set's, or that of another one, whose files have the same names.
    plain = [place for place in (folder, folder / "raw") if (mnist_name(mnist_files(place)) or name) == name]
    return _mnist_below(folder, name) + plain


def _mnist_below(folder: Path, name: str) -> list[Path]:
    own, kept = folder / name, MNIST_FOLDERS[name]
    return [own, own / "raw", own / kept / "raw", folder / kept / "raw"]


def mnist_files(place: Path) -> dict[str, Path]:
    """MNIST's four files by their published names, packed or not; empty where one is missing."""
    found = {name: there for name in _MNIST_FILES if (there := spelt(place, name))}
    return found if len(found) == len(_MNIST_FILES) else {}


def spelt(place: Path, name: str) -> Path | None:
    """A published file, packed or unpacked; "x-idx3" may be spelt "x.idx3"."""
    plain = name.removesuffix(".gz")
    for word in (name, plain, plain.replace("-idx", ".idx")):
        if (place / word).is_file():
            return place / word
    return None


def mnist_name(files: dict[str, Path]) -> str:
    """Which of the sets with MNIST's names these files are, by the first labels for testing; empty for none known."""
    if not files:
        return ""
    path = files["t10k-labels-idx1-ubyte.gz"]
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _MNIST_LABELS.get(file.read(_IDX_HEADER + 10)[_IDX_HEADER:], "")
    except (OSError, EOFError, zlib.error):
        return ""


def _cifar_within(place: Path, name: str, form: Layout) -> bool:
    if form.lies_in(place):
        return True
    return any(
        (above / form.folder).is_dir() or (above / form.archive).is_file() or form.lies_in(above)
        for above in (place, place / name)
    )

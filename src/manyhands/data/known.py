"""Built-in ("known") data sets: names of published files, and detection of a set in a folder. Imports no torch."""

import functools
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.choices import load_choice, module_names, read_choice, unknown_choice_error
from manyhands.core.errors import UserError
from manyhands.core.user_code import is_object_reference

CHOICES = "manyhands.data.datasets"


@dataclass(frozen=True)
class CifarForm:
    """The files of one format in which CIFAR is published, such as Python pickles."""

    folder: str  # folder inside the archive
    archive: str
    train: tuple[str, ...]  # files of the training split, in order
    test: str
    names: str  # file with the class names
    label_bytes: int = 0  # before each binary record; 0 for a pickle
    key: str = "labels"  # key of the labels in a pickle
    signs: tuple[str, ...] = ()  # files that identify this format; empty: the first training file


@dataclass(frozen=True)
class KnownSet:
    """A built-in data set."""

    title: str
    classes: tuple[str, ...]  # used unless the files contain names
    pixels: tuple[int, int, tuple[float, ...], tuple[float, ...], str]  # size, channels, mean, deviation, augmentation
    urls: tuple[str, ...] = ()  # folders on servers, tried in order
    md5: tuple[tuple[str, str], ...] = ()  # files to download, with their checksums
    forms: tuple[CifarForm, ...] = ()  # empty: four files in MNIST's format
    folder: str = ""  # torchvision's folder for files in MNIST's format
    # First labels of the test split, to distinguish sets that use MNIST's file names.
    first_labels: tuple[int, ...] = ()


_DIGITS = tuple("0123456789")
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_BINARY = tuple(f"{name}.bin" for name in _BATCHES)
_BINARY_10 = ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", _BINARY, "test_batch.bin", "batches.meta.txt")
_PYTHON_100 = ("cifar-100-python", "cifar-100-python.tar.gz", ("train",), "test", "meta")
_BINARY_100 = ("cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), "test.bin", "fine_label_names.txt")
_CIFAR_URLS = ("https://www.cs.toronto.edu/~kriz/",)
MNIST_KINDS = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
_MNIST_FILES = tuple(f"{part}-{kind}" for part in ("train", "t10k") for kind in MNIST_KINDS)

KNOWN = {
    "cifar10": KnownSet(
        "CIFAR-10",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (32, 3, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "crop-flip"),
        _CIFAR_URLS,
        (("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
        (
            CifarForm("cifar-10-batches-py", "cifar-10-python.tar.gz", _BATCHES, "test_batch", "batches.meta"),
            CifarForm(*_BINARY_10, label_bytes=1),
        ),
    ),
    "cifar100": KnownSet(
        "CIFAR-100",
        tuple(f"class {number}" for number in range(100)),
        (32, 3, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "crop-flip"),
        _CIFAR_URLS,
        (("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
        (
            CifarForm(*_PYTHON_100, key="fine_labels", signs=("train", "test", "meta")),
            CifarForm(*_BINARY_100, label_bytes=2, signs=("train.bin", "test.bin")),
        ),
    ),
    "mnist": KnownSet(
        "MNIST",
        _DIGITS,
        (28, 1, (0.1307,), (0.3081,), "none"),
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        (
            ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        folder="MNIST",
        first_labels=(7, 2, 1, 0, 4, 1, 4, 9, 5, 9),
    ),
    "fashion-mnist": KnownSet(
        "Fashion-MNIST",
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        (28, 1, (0.2860,), (0.3530,), "none"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        (
            ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        folder="FashionMNIST",
        first_labels=(9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
    ),
    "digits": KnownSet("digits", _DIGITS, (8, 1, (0.3053,), (0.3762,), "none")),
}
_CIFAR = {name: known.forms for name, known in KNOWN.items() if known.forms}
_MNIST = {name: known for name, known in KNOWN.items() if known.folder}


def recognize_data_set(path: Path) -> str:
    """Returns the name of the built-in data set in a folder or archive, or "". Raises UserError if ambiguous."""
    if not path.is_dir():
        return next((name for name, forms in _CIFAR.items() if path.name in {form.archive for form in forms}), "")
    found = [name for name in _CIFAR if cifar_files(path, name)]
    here = mnist_files(path) or mnist_files(path / "raw")
    if here and not mnist_name(here):
        what = "the files have MNIST's names, but their first labels match neither MNIST nor Fashion-MNIST"
        hints = (f"read the files as MNIST: mnist --data-dir {path}", "or read another set: torchvision:KMNIST")
        raise UserError(what, str(path), hints)
    below = [name for name in _MNIST if any(map(mnist_files, mnist_folders(path, name)))]
    found += [mnist_name(here)] if here else below
    if len(found) > 1:
        hints = tuple(f"choose {name}: {name} --data-dir {path}" for name in found)
        raise UserError(f"the folder holds several data sets: {' and '.join(found)}", str(path), hints)
    return found[0] if found else ""


@functools.cache  # some releases of Python 3.11 and 3.12 fail if two threads build syntax trees at once
def _choice_names() -> dict[str, tuple[str, ...]]:
    found = {module: read_choice(CHOICES, module).get("NAMES") for module in module_names(CHOICES)}
    return {word: load_choice(CHOICES, word).NAMES if names is None else names for word, names in found.items()}


def is_published(name: str) -> bool:
    """Returns True for the full name of a built-in data set, whose samples are read into memory or generated."""
    return any(name in names for names in _choice_names().values())


def find_named_choice(name: str) -> str:
    """Returns the name of the module in data/datasets whose NAMES contains `name` or its prefix, or ""."""
    words = {name, name.partition(":")[0] + ":"}
    return next((module for module, names in _choice_names().items() if words & {*names}), "")


def find_choice(name: str) -> str:
    """Returns the module of data/datasets that opens `name`: a data set, a folder or a file.py:function."""
    if module := find_named_choice(name):
        return module
    place = Path(name).expanduser()
    if is_object_reference(name):
        return "user"
    if known := known_set_at(name):
        return find_choice(known[0])
    if place.is_dir():
        return "user"
    if place.is_file() or "/" in name or "." in name:
        folder = "name a folder of class folders, or a folder with train/ and val/"
        own = "a function that returns (train, test): file.py:function"
        what, hints = f"there is no folder {name}", (folder, f"or {own}")
        if place.is_file():
            what, hints = f"{name} is a file, not a folder", (folder, f"or read the file in {own}")
            if place.suffix in {".yaml", ".yml"}:
                what = f"{name} is a YAML file, which manyhands doesn't read"
                hints = ("write the job in TOML: manyhands train job.toml", f"or {folder}")
        raise UserError(what, "data.name", hints)
    words = [word + "…" if word.endswith(":") else word for names in _choice_names().values() for word in names]
    raise unknown_choice_error("data set", name, [*words, "a folder", "file.py:function"], "data.name")


def known_set_at(name: str) -> tuple[str, str] | None:
    """Returns (data set, folder) if `name` is the path of a built-in data set's folder or archive, else None."""
    place = Path(name).expanduser()
    known = recognize_data_set(place) if name and name not in KNOWN and place.exists() else ""
    return (known, str(place if place.is_dir() else place.parent)) if known else None


def cifar_files(folder: Path, name: str) -> tuple[CifarForm, Path] | None:
    """Finds the files of a CIFAR set in or below a data folder. Returns (format, folder or archive), or None."""
    for above in (folder / name, folder):
        for form in KNOWN[name].forms:
            for place in (above / form.folder, above / form.archive):
                if place.exists():
                    return form, place
            if all((above / name).is_file() for name in form.signs or form.train[:1]):
                return form, above
    return None


def mnist_folders(folder: Path, name: str) -> list[Path]:
    """Returns the folders, in or below a data folder, that may hold the files of `name`, likeliest first."""
    own, kept = folder / name, KNOWN[name].folder
    below = [own, own / "raw", own / kept / "raw", folder / kept / "raw"]
    # The data folder itself may have this set's files, or another set's under the same names.
    return below + [place for place in (folder, folder / "raw") if (mnist_name(mnist_files(place)) or name) == name]


def mnist_files(place: Path) -> dict[str, Path]:
    """Returns {published name: path} of MNIST's four files, compressed or not, or {} if one is missing."""
    found = {name: file for name in _MNIST_FILES if (file := find_file(name, [place]))}
    return found if len(found) == len(_MNIST_FILES) else {}


def find_file(name: str, places: list[Path]) -> Path | None:
    """Returns the path of a published file in the first folder that has it, also uncompressed or as "x.idx3"."""
    plain = name.removesuffix(".gz")
    words = (name, plain, plain.replace("-idx", ".idx"))
    return next((place / word for place in places for word in words if (place / word).is_file()), None)


def mnist_name(files: dict[str, Path]) -> str:
    """Returns "mnist" or "fashion-mnist", whose files have the same names, by the first test labels, or ""."""
    if not files:
        return ""
    path = files["t10k-labels-idx1-ubyte.gz"]
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            first = tuple(file.read(18)[8:])  # after the IDX header
    except (OSError, EOFError, zlib.error):
        return ""
    return next((name for name, known in _MNIST.items() if known.first_labels == first), "")

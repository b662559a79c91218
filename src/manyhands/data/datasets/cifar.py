"""CIFAR-10 and CIFAR-100: binary or python files, folders or archives, or pictures in class folders."""

from dataclasses import dataclass
from pathlib import Path

from manyhands.data.cifar import read_class_names, read_files, read_split
from manyhands.data.gallery import open_folder
from manyhands.data.known import CIFAR, Layout
from manyhands.data.options import DataOptions
from manyhands.data.places import data_folder
from manyhands.data.published import fetch_file, unpack_once
from manyhands.data.splits import Splits, describe
from manyhands.data.transforms import Pixels

_URL = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class _CifarSet:
    """One of the two sets: title, classes, forms (the first is fetched), its checksum, pixels, names if known."""

    title: str
    classes: int
    layouts: tuple[Layout, ...]
    md5: str
    pixels: Pixels
    names: tuple[str, ...] = ()


_SETS = {
    "cifar10": _CifarSet(
        "CIFAR-10",
        10,
        CIFAR["cifar10"],
        "c58f30108f718f92721af3b95e74349a",
        Pixels(32, 3, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "crop-flip"),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": _CifarSet(
        "CIFAR-100",
        100,
        CIFAR["cifar100"],
        "eb9058c3a382ffc7106e4002c42a8d85",
        Pixels(32, 3, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "crop-flip"),
    ),
}
NAMES = tuple(_SETS)


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens both splits, in whichever form they lie there, or fetches one. Raises UserError: neither works."""
    published, folder = _SETS[name], data_folder(options) / name
    for place in (folder, folder.parent):
        for layout in published.layouts:
            for there in (place / layout.folder, place / layout.archive):
                if there.exists():
                    return _read(published, layout, there)
            if layout.lies_in(place):
                return _read(published, layout, place)
    pictures = _folder_of_pictures(folder)
    if pictures is not None:
        return open_folder(pictures, options, published.title, published.pixels)
    first = published.layouts[0]
    archive = fetch_file(first.archive, (_URL + first.archive,), published.md5, folder, options)
    return _read(published, first, archive)


def _read(published: _CifarSet, layout: Layout, place: Path) -> Splits:
    files = read_files(place, layout)
    train = read_split(files, layout.train, layout, published.classes)
    test = read_split(files, (layout.test,), layout, published.classes)
    names = read_class_names(files[layout.names], layout, layout.names) if layout.names in files else ()
    if len(names) != published.classes:
        names = published.names or tuple(f"class {number}" for number in range(published.classes))
    return Splits(train, test, names, describe(published.title, train, test, str(place)), published.pixels)


def _folder_of_pictures(folder: Path) -> Path | None:
    """The folder itself, where it holds train/, or the only archive in it, unpacked into the cache."""
    if (folder / "train").is_dir():
        return folder
    archives = sorted(folder.glob("*.tar.xz")) if folder.is_dir() else []
    return unpack_once(archives[0]) if len(archives) == 1 else None

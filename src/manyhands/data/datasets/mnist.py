"""MNIST and Fashion-MNIST, in their published IDX files, packed or not, also as torchvision lays them."""

from dataclasses import dataclass

from manyhands.data.idx import read_pair
from manyhands.data.known import mnist_places
from manyhands.data.options import DataOptions
from manyhands.data.places import data_folder
from manyhands.data.published import fetch_file, find_file
from manyhands.data.splits import ImagesInMemory, Splits, describe
from manyhands.data.transforms import Pixels


@dataclass(frozen=True)
class _MnistSet:
    """One of the two sets: title, addresses, checksums by file, classes, pixels."""

    title: str
    bases: tuple[str, ...]
    checksums: dict[str, str]
    classes: tuple[str, ...]
    pixels: Pixels


_SETS = {
    "mnist": _MnistSet(
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        tuple("0123456789"),
        Pixels(28, 1, (0.1307,), (0.3081,), "none"),
    ),
    "fashion-mnist": _MnistSet(
        "Fashion-MNIST",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        Pixels(28, 1, (0.2860,), (0.3530,), "none"),
    ),
}
NAMES = tuple(_SETS)


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens both splits into memory; fetches what is missing. Raises UserError: it can't be had, or is wrong."""
    published = _SETS[name]
    train, test = (_read(name, part, options) for part in ("train", "t10k"))
    text = describe(published.title, train, test, str(data_folder(options)))
    return Splits(train, test, published.classes, text, published.pixels)


def _read(name: str, part: str, options: DataOptions) -> ImagesInMemory:
    published, folder = _SETS[name], data_folder(options) / name
    inside = mnist_places(folder.parent, name)
    found = []
    for file in (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"):
        urls = tuple(base + file for base in published.bases)
        there = find_file(file, inside)
        found.append(there or fetch_file(file, urls, published.checksums[file], folder, options))
    return read_pair(found[0], found[1], len(published.classes))

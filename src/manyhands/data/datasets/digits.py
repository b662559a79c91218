"""The 1,797 handwritten digits that come with the program; nothing to fetch."""

from pathlib import Path

from manyhands.data import digits as folder
from manyhands.data.idx import read_pair
from manyhands.data.options import DataOptions
from manyhands.data.splits import Splits, describe
from manyhands.data.transforms import Pixels

NAMES = ("digits",)


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001, ARG001
    """Opens the digits: 8 x 8 grey, ten classes; every fifth is for evaluation."""
    place = Path(folder.__path__[0])
    train = read_pair(place / "train-images-idx3-ubyte.gz", place / "train-labels-idx1-ubyte.gz", 10)
    test = read_pair(place / "test-images-idx3-ubyte.gz", place / "test-labels-idx1-ubyte.gz", 10)
    pixels = Pixels(size=8, channels=1, mean=(0.3053,), std=(0.3762,), augment="none")
    return Splits(train, test, tuple("0123456789"), describe("digits", train, test, "UCI, in the package"), pixels)

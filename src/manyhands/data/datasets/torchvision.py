"""Classification data sets of torchvision: "torchvision:SVHN" means torchvision.datasets.SVHN."""

import inspect
from typing import Any

from manyhands.core.choices import unknown_choice_error
from manyhands.core.errors import UserError
from manyhands.core.files import locked
from manyhands.data.options import DataOptions, data_folder
from manyhands.data.samples import splits_of_objects
from manyhands.data.splits import Splits

NAMES = ("torchvision:",)
_TRAIN_WORDS = ("train", "trainval")
_TEST_WORDS = ("test", "val", "valid")


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens a data set in the data folder, one process per host at a time. Raises UserError if that fails."""
    from torchvision import datasets

    word = name.partition(":")[2]
    if word not in datasets.__all__:
        raise unknown_choice_error("torchvision data set", word, datasets.__all__, "data.name")
    kind = getattr(datasets, word)
    root = data_folder(options)
    takes = inspect.signature(kind).parameters
    given: dict[str, Any] = {"root": str(root)} if "root" in takes else {}
    given |= {"download": options.download} if "download" in takes else {}
    with locked(root / f"torchvision-{word}"):
        test = None
        if "train" in takes:
            train, test = (_create_dataset(kind, given, "train", (value,)) for value in (True, False))
        elif "split" in takes:
            train, test = (_create_dataset(kind, given, "split", words) for words in (_TRAIN_WORDS, _TEST_WORDS))
        else:
            train = _create_dataset(kind, given)
    return splits_of_objects(train, test, options, title=name)


def _create_dataset(kind: Any, given: dict[str, Any], parameter: str = "", values: tuple[Any, ...] = ("",)) -> Any:
    for value in values:
        try:
            return kind(**given, **({parameter: value} if parameter else {}))
        except (RuntimeError, OSError, TypeError, ValueError) as error:
            if isinstance(error, ValueError) and value != values[-1]:
                continue
            hints = ("name the folder of torchvision's files: --data-dir DIR", "or write a function: file.py:function")
            reason = " ".join(str(error).split()) or type(error).__name__
            what = f"torchvision's {kind.__name__} can't be opened: {reason}"
            raise UserError(what, "data.name", hints) from error
    raise AssertionError

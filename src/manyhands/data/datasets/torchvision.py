"""Any classification data set of torchvision: "torchvision:SVHN" stands for torchvision.datasets.SVHN."""

import inspect
from typing import Any

from manyhands.core.choices import unknown_choice
from manyhands.core.errors import UserError
from manyhands.core.files import one_at_a_time
from manyhands.data.objects import splits_of_objects
from manyhands.data.options import DataOptions
from manyhands.data.places import data_folder
from manyhands.data.splits import Splits

NAMES = ("torchvision:",)
_TRAIN_WORDS = ("train", "trainval")
_TEST_WORDS = ("test", "val", "valid")


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens the data set below the data folder, one process of a host after the other; torchvision fetches it.

    Its training and test splits are used; a data set without splits is divided. Raises UserError: there is no such
    class, it takes more than a folder and a split, or its files are missing.
    """
    from torchvision import datasets

    word = name.partition(":")[2]
    if word not in datasets.__all__:
        raise unknown_choice("torchvision data set", word, datasets.__all__, "data.name")
    kind = getattr(datasets, word)
    root = data_folder(options)
    with one_at_a_time(root / f"torchvision-{word}"):
        train, test = _both(kind, str(root), options.download)
    return splits_of_objects(train, test, options, title=name)


def _both(kind: Any, root: str, download: bool) -> tuple[Any, Any]:
    takes = inspect.signature(kind).parameters
    given: dict[str, Any] = {"root": root} if "root" in takes else {}
    if "download" in takes:
        given["download"] = download
    if "train" in takes:
        return _make(kind, given | {"train": True}), _make(kind, given | {"train": False})
    if "split" in takes:
        return _first_split(kind, given, _TRAIN_WORDS), _first_split(kind, given, _TEST_WORDS)
    return _make(kind, given), None


def _first_split(kind: Any, given: dict[str, Any], words: tuple[str, ...]) -> Any:
    """The first of the words that the class knows as a split."""
    for word in words[:-1]:
        try:
            return kind(**given, split=word)
        except ValueError:
            continue
        except (RuntimeError, OSError, TypeError) as error:
            raise _unusable(kind, error) from error
    return _make(kind, given | {"split": words[-1]})


def _make(kind: Any, given: dict[str, Any]) -> Any:
    try:
        return kind(**given)
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        raise _unusable(kind, error) from error


def _unusable(kind: Any, error: Exception) -> UserError:
    hints = ("name the folder of torchvision's files: --data-dir DIR", "or write a function: file.py:function")
    what = f"torchvision's {kind.__name__} can't be opened: {' '.join(str(error).split()) or type(error).__name__}"
    return UserError(what, "data.name", hints)

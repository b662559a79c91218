"""What a user of the Python interface brings instead of names; without torch, as the head puts it together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.config.job import OBJECT
from manyhands.core.errors import UserError, shortened
from manyhands.core.plugins import is_object_reference, load_object

if TYPE_CHECKING:
    from manyhands.train.epoch_end import AtEpochEnd
    from manyhands.train.own_optimizer import MakeOptimizer


@dataclass
class Objects:
    """Any may be left out."""

    model: Any = None  # an nn.Module
    train_set: Any = None  # a data set; so are test_set and held_out_set
    test_set: Any = None
    held_out_set: Any = None
    loss: Callable[..., Any] | None = None  # function (output, labels) of the mean loss or one per sample
    at_epoch_end: "AtEpochEnd | None" = None  # called on rank 0 after each epoch
    optimizer: "MakeOptimizer | None" = None  # makes one of the list of parameters
    schedule: Callable[..., Any] | None = None  # function of the step, or what makes a torch scheduler of the optimizer
    metrics: Mapping[str, Any] | None = None  # functions of outputs and labels, or objects that add up, by name
    targets: bool = False  # the y of train_set are no classes


def metric_words(given: Any) -> tuple[str, ...] | None:
    """What a job says of metrics that a user of Python gives: objects by name, or words as in a job.

    Raises:
        UserError: they are something else.
    """
    if isinstance(given, Mapping):
        named: Mapping[Any, Any] = given
        for name in named:
            if not (isinstance(name, str) and name.isidentifier()):
                mend = ("letters, digits and _ alone: top_3, macro_recall",)
                raise UserError(f"{shortened(repr(name))} is no name of a metric", "metrics", mend)
        return tuple(f"{OBJECT}:{name}" for name in named)
    words: Sequence[Any] = (given,) if isinstance(given, str) else given if isinstance(given, list | tuple) else ()
    if given is not None and not (words and all(isinstance(word, str) for word in words)):
        mend = ('metrics={"top3": function}', 'or metrics=["file.py:function"]')
        raise UserError(f"metrics is a {type(given).__name__} that names none", "fit", mend)
    return tuple(words) if words else None


def brought(key: str, word: str, given: Any) -> Any:
    """What the user brings in the place of a name: from Python, or from their file; None where a job names one of ours.

    Args:
        key: of the option.
        word: what the job says.
        given: from Python; it wins.

    Raises:
        UserError: the file has no such object, or it was one of a program that has ended.
    """
    if given is not None:
        return given
    if word == OBJECT:
        name = key.rpartition(".")[2]
        mend = (f"go on in Python: fit(…, {name}=…)", f"or name it: --set {key}=file.py:function")
        raise UserError(f"this run's {name} was an object in Python, which isn't here", key, mend)
    return load_object(word, key) if is_object_reference(word) else None

"""Python objects passed to `fit()` in place of names. Imports no torch, because the launcher uses this file."""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from manyhands.config.job import OBJECT
from manyhands.core.errors import UserError, shortened
from manyhands.core.records import EvaluationMetrics
from manyhands.core.user_code import is_object_reference, load_object

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class EpochEnd:
    """The state of a run at the end of an epoch. Modifying this object has no effect on the training.

    Attributes:
        epoch: the number of completed epochs.
        step: the number of completed updates.
        evaluation: the evaluation after this epoch, or None.
        path: the run folder.
    """

    epoch: int
    step: int
    evaluation: EvaluationMetrics | None
    path: Path


AtEpochEnd = Callable[[EpochEnd], object]
MakeOptimizer = Callable[["list[nn.Parameter]"], "torch.optim.Optimizer"]


@dataclass
class Objects:
    """The Python objects that the user may pass to `fit()` in place of names."""

    model: Any = None  # an nn.Module
    train_set: Any = None  # a data set; so are test_set and held_out_set
    test_set: Any = None
    held_out_set: Any = None
    loss: Callable[..., Any] | None = None  # takes outputs and labels; returns the mean loss or one per sample
    at_epoch_end: AtEpochEnd | None = None  # called on rank 0 after each epoch
    optimizer: MakeOptimizer | None = None  # takes the list of parameters
    schedule: Callable[..., Any] | None = None  # takes the step, or the optimizer and returns a torch scheduler
    metrics: Mapping[str, Any] | None = None  # by name: functions, or objects with `update` and `compute`
    targets: bool = False  # the y of train_set are targets, not classes
    digests: dict[str, str] = field(default_factory=dict[str, str])  # the result of `digest_objects`


def metric_names(given: Any) -> tuple[str, ...] | None:
    """Returns train.metrics for the argument `metrics`, a dict of objects or names. Raises UserError for others."""
    if isinstance(given, Mapping):
        named: Mapping[Any, Any] = given
        for name in named:
            if not (isinstance(name, str) and name.isidentifier()):
                hints = ("use letters, digits and _, such as top_3 or macro_recall",)
                raise UserError(f"{shortened(repr(name))} is not a valid name for a metric", "metrics", hints)
        return tuple(f"{OBJECT}:{name}" for name in named)
    words: Sequence[Any] = (given,) if isinstance(given, str) else given if isinstance(given, list | tuple) else ()
    if given is not None and not (words and all(isinstance(word, str) for word in words)):
        hints = ('pass metrics={"top3": function}', 'or metrics=["file.py:function"]')
        raise UserError(f"metrics is a {type(given).__name__}, not a dict or a list of names", "fit", hints)
    return tuple(words) if words else None


def digest_objects(**objects: Any) -> dict[str, str]:
    """Returns a SHA-256 digest of the structure, source and plain attributes of each network or function, by name."""
    texts = {name: "\n".join(_definition_texts(thing)) for name, thing in objects.items() if thing is not None}
    plain = {name: re.sub(r" at 0x[0-9a-f]+", "", text).encode() for name, text in texts.items()}
    return {name: hashlib.sha256(text).hexdigest() for name, text in plain.items()}


def _definition_texts(thing: Any) -> Iterator[str]:
    if isinstance(thing, functools.partial):
        yield _plain_values_text({"args": thing.args, **thing.keywords})
        yield from _definition_texts(thing.func)
        return
    yield repr(thing)
    sources, named = [thing], dict[str, Any]()
    if isinstance(thing, FunctionType):
        used = inspect.getclosurevars(thing)
        named = {**used.nonlocals, **used.globals}
    modules: Any = getattr(thing, "modules", lambda: () if isinstance(thing, FunctionType | type) else (thing,))
    for number, part in enumerate(modules()):
        held = {name: one for name, one in getattr(part, "__dict__", {}).items() if name != "training"}
        fixed = str | int | float | tuple | FunctionType  # the contents of lists and dicts may change in training
        named |= {f"{number}.{name}": one for name, one in held.items() if isinstance(one, fixed)}
        sources += type(part).__mro__
    yield _plain_values_text(named)
    for one in dict.fromkeys([*sources, *filter(inspect.isfunction, named.values())]):
        if getattr(one, "__module__", "").partition(".")[0] not in {"torch", "torchvision", "builtins"}:
            yield from _source_or_bytecode(one)


def _plain_values_text(named: Mapping[str, Any]) -> str:
    """Formats plain values so that the text is equal in all processes. Sorts sets, whose order differs."""
    plain = (str, int, float, tuple, list, dict, set, frozenset, FunctionType)
    kept = {name: one for name, one in named.items() if isinstance(one, plain) or type(one).__name__ == "Tensor"}
    return repr({k: sorted(map(repr, one)) if isinstance(one, set | frozenset) else one for k, one in kept.items()})


def _source_or_bytecode(thing: Any) -> Iterator[str]:
    """Yields the source of a class or function or, if it has none (in a notebook), the bytecode."""
    try:
        yield (text := inspect.getsource(thing))
        if isinstance(thing, FunctionType) and text.count("lambda") > 1:  # the column distinguishes them
            yield str(min((column for *_, column, _ in thing.__code__.co_positions() if column), default=0))
    except (OSError, TypeError):
        for one in (thing, *(vars(thing).values() if isinstance(thing, type) else ())):
            if isinstance(one, FunctionType):
                constants = [value for value in one.__code__.co_consts if isinstance(value, str | int | float)]
                yield f"{one.__code__.co_code.hex()} {one.__code__.co_names} {constants}"


def load_user_object(key: str, word: str, given: Any) -> Any:
    """Returns `given`, else the object that `word` names, else None. Raises UserError if a needed one is missing."""
    if given is not None:
        return given
    if word == OBJECT:
        name = key.rpartition(".")[2]
        hints = (f"resume in Python: fit(…, {name}=…)", f"or name the code: --set {key}=file.py:function")
        raise UserError(f"this run's {name} was a Python object, which is not available here", key, hints)
    return load_object(word, key) if is_object_reference(word) else None

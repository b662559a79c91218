"""The interface of networks: constructor arguments, picture requirements, outputs and initialization."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError

WHERE = "model.arguments"
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'|multiple values for (?:keyword )?argument '(\w+)'")
_MISSING = re.compile(r"missing (?:a|\d+) required .*arguments?: (.+)")
INITIALIZATION_SAMPLES = 1_000  # small pictures, which have a million patches


def construct(builder: Callable[..., Any], name: str, arguments: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """Returns `builder(**arguments, **fixed)`. Raises UserError if the user's `arguments` don't fit the builder."""
    if taken := sorted(set(arguments) & set(fixed)):
        hints = ("set the number of classes with model.num_classes, published weights with model.pretrained",)
        raise UserError(f"{name} already gets {taken[0]} from another option", f"{WHERE}.{taken[0]}", hints)
    try:
        return builder(**arguments, **fixed)
    except TypeError as error:
        raise argument_error(builder, name, arguments, error) from error
    except (ValueError, AssertionError, KeyError) as error:
        raise UserError(f"{name} does not accept these arguments: {error}", WHERE, (f"given: {arguments}",)) from error


def argument_error(builder: Callable[..., Any], name: str, arguments: dict[str, Any], error: TypeError) -> UserError:
    """Converts the TypeError of a call of `builder` to a UserError that names wrong and accepted arguments."""
    if match := _UNEXPECTED.search(str(error)):
        word = match[1] or match[2]
        return UserError(f"{name} takes no argument {word}", f"{WHERE}.{word}", _argument_hints(builder, word))
    if match := _MISSING.search(str(error)):
        return UserError(f"{name} needs {match[1]}", WHERE, ("set the argument under [model.arguments]",))
    return UserError(f"{name} does not accept these arguments: {error}", WHERE, (f"given: {arguments}",))


def _argument_hints(builder: Callable[..., Any], word: str) -> tuple[str, ...]:
    parameters = inspect.signature(builder).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [name for name in names if name not in ("weights", "progress", "num_classes", "channels", "size")]
    if not names:
        return ()
    return tuple(filter(None, (did_you_mean(word, names), f"choose from {', '.join(names)}")))


@dataclass(frozen=True)
class ModelNeeds:
    """The pictures that a network requires."""

    channels: int | None = None  # 1 or 3; None: any number
    size: int | None = None  # required height and width in pixels; None: any
    notes: list[str] = field(default_factory=list)  # messages for the user


def main_and_auxiliary(output: Any) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """Splits an output into (logits [N, classes], [(logits of an auxiliary head, weight of its loss), …]).

    In a tuple, the first item is the main logits, and items that are None are ignored. The weight is 0.3 with several
    heads (GoogLeNet, Szegedy et al. 2014, arXiv:1409.4842, section 5) and 0.4 with one head (as Inception v3 is usually
    trained). Raises UserError if the output has another form.
    """
    if isinstance(output, Tensor) and output.ndim == 2:
        return output, []
    main, *others = output if isinstance(output, Sequence) and output else [output]
    others = [head for head in others if head is not None]
    if isinstance(main, Tensor) and main.ndim == 2:
        heads = [head for head in others if isinstance(head, Tensor) and head.shape == main.shape]
        if len(heads) == len(others):
            weight = 0.4 if len(heads) == 1 else 0.3
            return main, [(head, weight) for head in heads]
    tuples = "or return a tuple of such tensors with equal shapes: the logits, then the logits of auxiliary heads"
    hints = ("return a tensor [N, classes]: one row for each picture", tuples)
    raise UserError(f"the network's forward returns {_format(output)}", "model", hints)


def _format(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    if isinstance(output, Sequence) and not isinstance(output, str) and output:
        return f"a {type(output).__name__} of {', '.join(map(_format, output))}"
    if isinstance(output, Mapping) and output:
        return f"a {type(output).__name__} of {', '.join(f'{key}: {_format(value)}' for key, value in output.items())}"
    return "nothing" if output is None else f"a {type(output).__name__}"


class InitializedFromData(nn.Module):
    """Base class of networks that are initialized from training pictures, unless there are saved weights."""

    def initialize(self, pictures: Tensor) -> None:
        """Initializes weights from training pictures [n, C, S, S], which are normalized, and equal on all ranks."""
        raise NotImplementedError

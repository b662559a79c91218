"""Calls a builder with the arguments of the user, and says what a network asks of its pictures."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError

WHERE = "model.arguments"
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'|multiple values for (?:keyword )?argument '(\w+)'")
_MISSING = re.compile(r"missing (?:a|\d+) required .*arguments?: (.+)")


def construct(builder: Callable[..., Any], name: str, arguments: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """builder(**arguments, **fixed), the user's arguments and ours. Raises UserError: one is wrong or missing."""
    if taken := sorted(set(arguments) & set(fixed)):
        hints = ("set the classes by model.num_classes, published weights by model.pretrained",)
        raise UserError(f"{name} already gets {taken[0]} from another option", f"{WHERE}.{taken[0]}", hints)
    try:
        return builder(**arguments, **fixed)
    except TypeError as error:
        raise refused(builder, name, arguments, error) from error
    except (ValueError, AssertionError, KeyError) as error:
        raise UserError(f"{name} does not accept these arguments: {error}", WHERE, (f"given: {arguments}",)) from error


def refused(builder: Callable[..., Any], name: str, arguments: dict[str, Any], error: TypeError) -> UserError:
    """The error for arguments that a builder doesn't take, with the one that is wrong and those it knows."""
    if match := _UNEXPECTED.search(str(error)):
        word = match[1] or match[2]
        return UserError(f"{name} takes no argument {word}", f"{WHERE}.{word}", _known(builder, word))
    if match := _MISSING.search(str(error)):
        return UserError(f"{name} needs {match[1]}", WHERE, ("set the argument under [model.arguments]",))
    return UserError(f"{name} does not accept these arguments: {error}", WHERE, (f"given: {arguments}",))


def _known(builder: Callable[..., Any], word: str) -> tuple[str, ...]:
    """A suggestion from the builder's own parameters, where it has any of its own."""
    parameters = inspect.signature(builder).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [name for name in names if name not in ("weights", "progress", "num_classes", "channels", "size")]
    if not names:
        return ()
    return tuple(filter(None, (did_you_mean(word, names), f"choose from {', '.join(names)}")))


@dataclass(frozen=True)
class ModelNeeds:
    """What pictures must be like, and what the user should know of the choice."""

    channels: int | None = None  # 1 or 3; None where any number will do
    # height and width in pixels to which pictures must be brought; None where they can stay as they are
    size: int | None = None
    notes: list[str] = field(default_factory=list)  # sentences for the user

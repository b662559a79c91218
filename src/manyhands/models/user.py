"""The user's own network: file.py:object, a class, a network or a function that makes one."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from manyhands.core.blame import users_line
from manyhands.core.errors import UserError
from manyhands.core.plugins import load_object
from manyhands.models.construct import WHERE, refused


def build_user_model(reference: str, arguments: dict[str, Any], num_classes: int) -> nn.Module:
    """Makes the network that `file.py:object` stands for.

    A class or function is called with the user's arguments, and with num_classes if it has a parameter of that name.
    A network that exists already is copied, so that training leaves the user's own as it was.

    Raises:
        UserError: the file or object is missing, raises, refuses an argument, or gives no nn.Module.
    """
    found = load_object(reference, "model.name")
    if isinstance(found, nn.Module):
        if arguments:
            raise UserError(f"{reference} is a network already, so it takes no arguments", WHERE)
        return copy.deepcopy(found)
    if not callable(found):
        raise UserError(f"{reference} is a {type(found).__name__}, not a network", "model.name", _MEND)
    model = _call(found, reference, arguments, num_classes)
    if not isinstance(model, nn.Module):
        raise UserError(f"{reference} returned a {type(model).__name__}, not a network", "model.name", _MEND)
    return model


_MEND = ("name a subclass of torch.nn.Module, an object of one, or a function that returns one",)


def _call(builder: Callable[..., Any], reference: str, arguments: dict[str, Any], num_classes: int) -> Any:
    signature = inspect.signature(builder)
    if "num_classes" in signature.parameters:
        arguments = {"num_classes": num_classes, **arguments}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise refused(builder, reference, arguments, error) from error
    try:
        return builder(**arguments)
    except Exception as error:
        where = users_line(error) or WHERE
        raise UserError(f"{reference} failed: {type(error).__name__}: {error}", where) from error

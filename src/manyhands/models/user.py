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


def build_user_model(reference: str, arguments: dict[str, Any], num_classes: int, mesh: Any = None) -> nn.Module:
    """Makes the network that `file.py:object` stands for.

    A class or function is called with the user's arguments, and with num_classes and mesh if it has parameters of those
    names. A network that exists already is copied, so that training leaves the user's own as it was. Raises UserError:
    the file or object is missing, raises, refuses an argument, wants a mesh where there is none, or gives no nn.Module.
    """
    found = load_object(reference, "model.name")
    if isinstance(found, nn.Module):
        if arguments:
            raise UserError(f"{reference} is a network already, so it takes no arguments", WHERE)
        return copy.deepcopy(found)
    if not callable(found):
        raise UserError(f"{reference} is a {type(found).__name__}, not a network", "model.name", _MEND)
    model = _call(found, reference, _with_mesh(found, reference, arguments, mesh), num_classes)
    if not isinstance(model, nn.Module):
        raise UserError(f"{reference} returned a {type(model).__name__}, not a network", "model.name", _MEND)
    return model


_MEND = ("name a subclass of torch.nn.Module, an object of one, or a function that returns one",)


def _with_mesh(builder: Callable[..., Any], reference: str, arguments: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """The arguments, with the mesh where the builder has a parameter for it that the user has not given."""
    parameter = inspect.signature(builder).parameters.get("mesh")
    if parameter is None or "mesh" in arguments:
        return arguments
    if mesh is not None:
        return {"mesh": mesh, **arguments}
    if parameter.default is not inspect.Parameter.empty:
        return arguments
    mend = ("--parallel hybrid --mesh dp=1,tp=2", "or give the parameter a default, for other modes")
    raise UserError(f"{reference} is made with a mesh, and this parallel mode has none", "parallel.mode", mend)


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

"""Builds networks by name, from user code or from an architecture module."""

import copy
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from manyhands.core.choices import load_choice, module_names, unknown_choice_error
from manyhands.core.errors import UserError
from manyhands.core.user_code import is_object_reference, load_object, user_line
from manyhands.models.interface import WHERE, ModelNeeds, argument_error
from manyhands.models.options import ModelOptions
from manyhands.models.published import CHOICES, no_weights_error

_SMALL_UP_TO = 64  # pictures up to this size are called small
_HINTS = ("name a subclass of torch.nn.Module, an instance, or a function that returns an instance",)


def picture_needs(options: ModelOptions, size: int) -> ModelNeeds:
    """Returns what a network requires of pictures with sides of `size` pixels. Raises UserError for an unknown name."""
    if is_object_reference(options.name):
        return ModelNeeds()
    name, choice = _find_architecture(options, size)
    needs = _architecture_needs(name, choice, options, size)
    smaller = (each for each in _modules() if _max_size(each) < size <= _SMALL_UP_TO and name in each.NAMES)
    if name == options.name and not options.pretrained and (small := next(smaller, None)):
        note = f"{name} has its original form because pictures are {size} px; {small.PREFIX}{name} {small.DIFFERS}"
        needs.notes.append(note)
    return needs


def build_model(options: ModelOptions, *, channels: int, size: int, num_classes: int, mesh: Any = None) -> nn.Module:
    """Builds the network on torch's default device. Random weights depend on torch's global seed.

    The network maps [N, channels, size, size] to [N, options.num_classes or num_classes]. In training it may return
    auxiliary outputs too; see `main_and_auxiliary`. `mesh` is passed to user code with such a parameter. The file
    `options.weights` isn't loaded. Raises UserError if an option is invalid, or doesn't fit `channels` or `size`.
    """
    classes = options.num_classes or num_classes
    if is_object_reference(options.name):
        if options.pretrained:
            raise no_weights_error(options.name)
        return build_user_model(options.name, options.arguments, classes, mesh)
    name, choice = _find_architecture(options, size)
    needs = _architecture_needs(name, choice, options, size)
    if needs.channels not in (None, channels):
        raise UserError(f"{name} takes pictures of {needs.channels} channels, not {channels}", "model.name")
    if needs.size not in (None, size):
        raise UserError(f"{name} takes pictures of {needs.size} px, not {size}", "model.name")
    if not options.pretrained:
        return choice.build(name, channels=channels, size=size, num_classes=classes, arguments=options.arguments)
    if not hasattr(choice, "build_pretrained"):
        raise no_weights_error(name)
    return choice.build_pretrained(name, num_classes=classes, arguments=options.arguments)


def is_built_in(name: str) -> bool:
    """Returns True for a network of this package, and False for torchvision's networks and user code."""
    if is_object_reference(name):
        return False
    own = [choice for choice in _modules() if not getattr(choice, "TORCHVISION", False)]
    return any(name in choice.NAMES for choice in own)


def resolve_model(options: ModelOptions, size: int) -> ModelOptions:
    """Returns options that build the network of `options` and `size` for any picture size, with random weights."""
    plain = {"weights": "", "pretrained": False}
    if is_object_reference(options.name):
        return options.model_copy(update=plain)
    name, choice = _find_architecture(options, size)
    arguments = choice.published_arguments(name, options.arguments) if options.pretrained else options.arguments
    return options.model_copy(update={**plain, "name": _prefix(choice) + name, "arguments": arguments})


def _find_architecture(options: ModelOptions, size: int) -> tuple[str, ModuleType]:
    """Returns (the network's name without prefix, its architecture module). Raises UserError for an unknown name.

    For a name without prefix, prefers modules for small pictures, or if `pretrained` those with published weights.
    """

    def priority(choice: ModuleType) -> tuple[bool, float]:
        return options.pretrained and not hasattr(choice, "build_pretrained"), _max_size(choice)

    choices = _modules()
    named = next((choice for choice in choices if _prefix(choice) and options.name.startswith(_prefix(choice))), None)
    prefix = _prefix(named) if named else ""
    name = options.name.removeprefix(prefix)
    searched = [named] if named else sorted(choices, key=priority)
    for choice in searched:
        fits = named or (options.pretrained and hasattr(choice, "build_pretrained")) or _max_size(choice) >= size
        if fits and name in choice.NAMES:
            return name, choice
    known = {prefix + word for choice in searched for word in choice.NAMES}
    raise unknown_choice_error("network", options.name, known, "model.name")


def _modules() -> list[ModuleType]:
    return [load_choice(CHOICES, word) for word in module_names(CHOICES)]


def _prefix(choice: ModuleType) -> str:
    return getattr(choice, "PREFIX", "")


def _max_size(choice: ModuleType) -> float:
    return getattr(choice, "MAX_SIZE", float("inf"))


def _architecture_needs(name: str, choice: ModuleType, options: ModelOptions, size: int) -> ModelNeeds:
    if hasattr(choice, "needs"):
        return choice.needs(name, size, options.arguments, options.pretrained)
    smallest = getattr(choice, "SMALLEST", 0)
    if size >= smallest:
        return ModelNeeds()
    return ModelNeeds(size=smallest, notes=[f"{name} needs at least {smallest} px; pictures are enlarged"])


def build_user_model(reference: str, arguments: dict[str, Any], num_classes: int, mesh: Any = None) -> nn.Module:
    """Builds the network that `file.py:object` names.

    A class or function is called with the user's arguments, and with num_classes and mesh if it has these parameters.
    An nn.Module instance is copied. Raises UserError if the file or object is missing, or if the object rejects an
    argument, requires a mesh that doesn't exist, raises an exception, or returns no nn.Module.
    """
    found = load_object(reference, "model.name")
    if isinstance(found, nn.Module):
        if arguments:
            raise UserError(f"{reference} is already a network and takes no arguments", WHERE)
        return copy.deepcopy(found)
    if not callable(found):
        raise UserError(f"{reference} is a {type(found).__name__}, not a network", "model.name", _HINTS)
    given = {**_mesh_argument(found, reference, arguments, mesh), **arguments}
    if "num_classes" in inspect.signature(found).parameters:
        given = {"num_classes": num_classes, **given}
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        raise argument_error(found, reference, given, error) from error
    try:
        model = found(**given)
    except Exception as error:
        where = user_line(error) or WHERE
        raise UserError(f"{reference} failed: {type(error).__name__}: {error}", where) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{reference} returned a {type(model).__name__}, not a network", "model.name", _HINTS)
    return model


def _mesh_argument(builder: Callable[..., Any], reference: str, arguments: dict[str, Any], mesh: Any) -> dict[str, Any]:
    parameter = inspect.signature(builder).parameters.get("mesh")
    if parameter is None or "mesh" in arguments:
        return {}
    if mesh is not None:
        return {"mesh": mesh}
    if parameter.default is not inspect.Parameter.empty:
        return {}
    hints = ("use --parallel hybrid --mesh dp=1,tp=2", "or give the parameter mesh a default")
    raise UserError(f"{reference} requires a mesh, but this parallel mode has none", "parallel.mode", hints)

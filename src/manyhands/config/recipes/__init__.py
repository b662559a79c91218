"""Recipes: settings known to reach good accuracy, one TOML file per data set, by its name, and others by theirs.

A section [for."PATTERN"] of a recipe holds what differs for networks whose name, without "torchvision:", fits the
pattern. `TRANSFORMERS` comes before it in every recipe.
"""

import fnmatch
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError, shortened
from manyhands.core.files import parse_toml
from manyhands.core.user_code import is_object_reference

# For vision transformers in every recipe: with SGD at a convolutional network's rate they don't learn.
TRANSFORMERS = {"train.optimizer": "adamw", "train.lr": 5e-4, "train.weight_decay": 0.05}


@dataclass(frozen=True)
class Recipe:
    """Settings by dotted key, under the name of the file they come from."""

    name: str
    values: dict[str, Any] = field(default_factory=dict[str, Any])


def recipe_for(data: str, model: str) -> Recipe:
    """The recipe of a named data set, "objects" for data from the user's code, and "folder" for anything else.

    An empty `model` takes the recipe's own.
    """
    base = "objects" if is_object_reference(data) else data.partition(":")[0]
    # By name among our own: a path, such as that of a folder of pictures, must not lead to a file beside it.
    return _read(base if base in _names() else "folder", model)


def recipe_named(name: str, model: str) -> Recipe:
    """The recipe that a user asks for. Raises UserError: there is none of that name."""
    known = sorted(_names())
    if name not in known:
        hints = tuple(filter(None, (did_you_mean(name, known), f"choose one of: {', '.join(known)}")))
        raise UserError(f"there is no recipe {shortened(name)}", "--recipe", hints)
    return _read(name, model)


def _names() -> set[str]:
    return {file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml")}


def _read(name: str, model: str) -> Recipe:
    tree = parse_toml((files(__name__) / f"{name}.toml").read_bytes())
    per_model: dict[str, dict[str, Any]] = tree.pop("for", {})
    values = {f"{section}.{key}": value for section, table in tree.items() for key, value in table.items()}
    chosen = (model or str(values.get("model.name", ""))).removeprefix("torchvision:")
    if chosen.startswith("vit"):
        values.update(TRANSFORMERS)
    for pattern, table in per_model.items():
        if fnmatch.fnmatch(chosen, pattern):
            values.update({f"{section}.{key}": value for section, t in table.items() for key, value in t.items()})
    return Recipe(name, values)

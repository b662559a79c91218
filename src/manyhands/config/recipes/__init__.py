"""Recipes: TOML files of options that reach good accuracy. A data set's default recipe has the name of the data set.

A section [for."PATTERN"] of a recipe applies to networks whose name, without "torchvision:", matches the pattern.
Before these sections, every recipe applies `TRANSFORMERS` to vision transformers.
"""

import fnmatch
from importlib.resources import files
from typing import Any

from manyhands.core import choices, user_code
from manyhands.core.errors import UserError, shortened
from manyhands.core.files import parse_toml

# For vision transformers in every recipe: they don't learn with SGD at a convolutional network's learning rate.
TRANSFORMERS = {"train.optimizer": "adamw", "train.lr": 5e-4, "train.weight_decay": 0.05}


def choose_recipe(name: str, data: str, model: str) -> tuple[str, dict[str, Any]]:
    """Returns a recipe's name, and a dict of its options by dotted key. Raises UserError if `name` is not a recipe.

    If `name` is empty, selects the data set's recipe, else "objects" for data from user code, else "folder". If `model`
    is empty, the options are for the recipe's network.
    """
    known = sorted(file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml"))
    if name and name not in known:
        hints = tuple(filter(None, (choices.did_you_mean(name, known), f"choose one of: {', '.join(known)}")))
        raise UserError(f"there is no recipe {shortened(name)}", "--recipe", hints)
    base = "objects" if user_code.is_object_reference(data) else data.partition(":")[0]
    # Only names of our recipes count: a path, such as a folder of pictures, must not select another TOML file.
    name = name or (base if base in known else "folder")
    tree = parse_toml((files(__name__) / f"{name}.toml").read_bytes())
    per_model: dict[str, dict[str, Any]] = tree.pop("for", {})
    values = {f"{section}.{key}": value for section, table in tree.items() for key, value in table.items()}
    chosen = (model or str(values.get("model.name", ""))).removeprefix("torchvision:")
    if chosen.startswith("vit"):
        values.update(TRANSFORMERS)
    for pattern, table in per_model.items():
        if fnmatch.fnmatch(chosen, pattern):
            values.update({f"{section}.{key}": value for section, t in table.items() for key, value in t.items()})
    return name, values

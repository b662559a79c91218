"""A multi-layer perceptron on flattened pictures, with ReLU after each hidden layer."""

from typing import Any

from torch import nn

from manyhands.core.errors import UserError
from manyhands.models.interface import WHERE, construct

NAMES = ("mlp",)


def build(name: str, *, channels: int, size: int, num_classes: int, arguments: dict[str, Any]) -> nn.Module:
    return construct(make_mlp, name, arguments, {"inputs": channels * size * size, "num_classes": num_classes})


def make_mlp(inputs: int, num_classes: int, hidden: int = 256, depth: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """Builds `depth` hidden layers of `hidden` units, and an output layer. Raises UserError for invalid arguments."""
    for word, value, lowest in (("hidden", hidden, 1), ("depth", depth, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise UserError(f"{word} is {value!r}, expected a whole number of at least {lowest}", f"{WHERE}.{word}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise UserError(f"dropout is {dropout!r}, expected a number of at least 0 and less than 1", f"{WHERE}.dropout")
    layers: list[nn.Module] = [nn.Flatten()]
    width = inputs
    for _ in range(depth):
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_classes))

"""How a user writes which part of an op's work each process does: "n@dp o@tp", or MindSpore's tuples.

A letter names the loop that is cut, and stands before the mesh axes that cut it:

    n  samples            o  output channels or features     i  input channels or features
    c  channels           h  heads of attention              v  rows of a table
    r  nothing: every process along the axis does all of it
"""

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh

MEANINGS = {
    "n": "samples",
    "o": "outputs",
    "i": "inputs",
    "c": "channels",
    "h": "heads",
    "v": "rows",
    "r": "nothing: replicated",
}
_PART = re.compile(r"([a-z])@([A-Za-z0-9_,]+)")
EXAMPLE = "such as n@dp o@tp"


def parse_strategy(text: str, mesh: Mesh, where: str) -> dict[int, str]:
    """Reads "n@dp o@tp": the letter of each axis (its number) named. Raises UserError: it doesn't fit the mesh."""
    found: dict[int, str] = {}
    for word in text.split():
        # A letter alone is meant for all axes.
        match = _PART.fullmatch(f"{word}@{','.join(mesh.names)}" if len(word) == 1 else word)
        if not match or match[1] not in MEANINGS:
            letters = ", ".join(f"{letter} ({meaning})" for letter, meaning in MEANINGS.items())
            raise UserError(f'"{word}" is not a part of a strategy', where, (EXAMPLE, f"letters: {letters}"))
        for name in match[2].split(","):
            if name not in mesh.names:
                hints = (f"name axes of the mesh {mesh}, {EXAMPLE}",)
                raise UserError(f'"{text}" names the axis {name}, which the mesh lacks', where, hints)
            axis = mesh.names.index(name)
            if axis in found:
                raise UserError(f'"{text}" names the axis {name} twice', where, (EXAMPLE,))
            found[axis] = match[1]
    if not found:
        raise UserError("the strategy is empty", where, (EXAMPLE,))
    return found


def write_strategy(letters: tuple[str, ...], mesh: Mesh) -> str:
    """The shortest text for the letters of all axes, in the mesh's order: "n@dp,tp"."""
    axes: dict[str, list[str]] = {}
    for letter, name in zip(letters, mesh.names, strict=True):
        axes.setdefault(letter, []).append(name)
    return " ".join(f"{letter}@{','.join(names)}" for letter, names in axes.items())


def is_tuples(text: str) -> bool:
    """True for MindSpore's form, which begins with a bracket."""
    return text.lstrip()[:1] in {"(", "{", "["}


def parse_tuples(text: str, where: str) -> tuple[tuple[int, ...], ...]:
    """Reads "((1, 1), (1, 2))" or "{(1, 1), (1, 2)}": pieces of each dimension of each input. Raises UserError."""
    plain = text.strip()
    if plain.startswith("{"):
        plain = f"({plain[1:-1]},)"
    try:
        content: Any = ast.literal_eval(plain)
        found = tuple(tuple(operator.index(number) for number in one) for one in content)
    except (ValueError, SyntaxError, TypeError) as error:
        hints = ("write MindSpore's form, such as ((1, 1), (1, 2))", f"or axes, {EXAMPLE}")
        raise UserError(f'"{text}" is not a strategy', where, hints) from error
    if not found or not all(found) or any(number < 1 for one in found for number in one):
        raise UserError(f'"{text}" is not a strategy: counts start at 1', where, (f"write axes, {EXAMPLE}",))
    return found


def from_mindspore(kind: str, tuples: tuple[tuple[int, ...], ...], mesh: Mesh, where: str = "pin") -> dict[int, str]:
    """The letter of each axis, "r" where nothing is cut, that MindSpore's tuples mean; axes are found by their sizes.

    A tuple says for each input into how many pieces its dimensions are cut; a linear layer's weight is given as MatMul
    takes it, [inputs, outputs], a convolution's as [outputs, inputs, height, width]. Of other ops than these ("linear",
    "conv") the first input decides. Raises UserError: the pieces don't fit each other or the mesh, or pixels are cut.
    """
    pieces = _pieces(kind.lower(), tuples, where)
    letters: dict[int, str] = {}
    for letter, count in pieces.items():
        for axis in _axes_of(count, mesh, letters, where):
            letters[axis] = letter
    return {axis: letters.get(axis, "r") for axis in range(len(mesh.axes))}


def _pieces(kind: str, tuples: tuple[tuple[int, ...], ...], where: str) -> dict[str, int]:
    if kind not in _WEIGHTED:
        first, last = tuples[0], tuples[-1]
        if set(first[2:]) - {1}:
            raise UserError("only samples and channels can be split here", where, ("give 1 for all other dimensions",))
        return {"n": first[0], "c": first[1] if len(first) > 1 else last[0]}
    inner, outer, pixels_too = _WEIGHTED[kind]
    dims = len(tuples[0]) if pixels_too else 2
    if len(tuples) < 2 or len(tuples[0]) < 2 or len(tuples[1]) != dims:
        form = ", ".join("1" * dims)
        what = f"{tuples} should have a tuple for the input and one of {dims} numbers for the weight"
        raise UserError(what, where, (f"such as (({form}), ({form}))",))
    (samples, *pixels), weight = tuples[0], tuples[1]
    features = pixels.pop(0 if pixels_too else -1)
    if {*pixels, *weight[2:]} - {1}:
        raise UserError("height and width can't be split here", where, ("give 1 for height and width",))
    if features != weight[inner]:
        what = f"the input's features are split into {features} parts, but the weight's into {weight[inner]}"
        raise UserError(what, where, ("split both alike",))
    if any(one != (weight[outer],) for one in tuples[2:]):
        what = f"the weight's outputs are split into {weight[outer]} parts, but the bias as {tuples[2:]}"
        raise UserError(what, where, ("split both alike",))
    return {"n": samples, "i": features, "o": weight[outer]}


# Of ops whose weight has a tuple of its own: where it has inputs and outputs, and whether pixels follow them.
_WEIGHTED = {
    **dict.fromkeys(("linear", "matmul", "dense"), (0, 1, False)),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d"), (1, 0, True)),
}


def _axes_of(count: int, mesh: Mesh, taken: Mapping[int, str], where: str) -> list[int]:
    """Axes that are free and whose sizes' product is the number of pieces; one axis before several."""
    free = [axis for axis, size in enumerate(mesh.sizes) if axis not in taken and size > 1]
    if count == 1:
        return []
    for chosen in sorted(range(1, 1 << len(free)), key=int.bit_count):
        axes = [axis for place, axis in enumerate(free) if chosen >> place & 1]
        if mesh.parts(axes) == count:
            return axes
    raise UserError(f"no axes of the mesh {mesh} have {count} processes for {count} pieces", where, ("change --mesh",))

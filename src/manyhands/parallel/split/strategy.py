"""Strategies of ops as users write them: "n@dp o@tp", or MindSpore's tuples.

A letter names a dimension of an op. The mesh axes after the letter shard this dimension:

    n  samples            o  output channels or features     i  input channels or features
    c  channels           h  heads of attention              v  rows of a table
    r  nothing: each process along the axis computes all of the op
"""

import ast
import itertools
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.graph import Graph, Op, Sharding

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
_FORM = f"write letters and mesh axes, {EXAMPLE}"


def parse_strategy(text: str, mesh: Mesh, where: str) -> dict[int, str]:
    """Parses a strategy such as "n@dp o@tp" into {axis index: letter}. Raises UserError if it doesn't fit the mesh."""
    found: dict[int, str] = {}
    for word in text.split():
        # A letter alone applies to all axes.
        match = _PART.fullmatch(f"{word}@{','.join(mesh.names)}" if len(word) == 1 else word)
        if not match or match[1] not in MEANINGS:
            letters = ", ".join(f"{letter} ({meaning})" for letter, meaning in MEANINGS.items())
            raise UserError(
                f'"{word}" is not a valid part of a strategy', where, (_FORM, f"with the letters {letters}")
            )
        for name in match[2].split(","):
            if name not in mesh.names:
                hints = (f"name axes of the mesh {mesh}, {EXAMPLE}",)
                raise UserError(f'"{text}" names the axis {name}, which the mesh does not have', where, hints)
            axis = mesh.names.index(name)
            if axis in found:
                raise UserError(f'"{text}" names the axis {name} twice', where, (_FORM,))
            found[axis] = match[1]
    if not found:
        raise UserError("the strategy is empty", where, (_FORM,))
    return found


def write_strategy(letters: tuple[str, ...], mesh: Mesh) -> str:
    """Formats one letter for each mesh axis as a strategy, such as "n@dp,tp"."""
    axes: dict[str, list[str]] = {}
    for letter, name in zip(letters, mesh.names, strict=True):
        axes.setdefault(letter, []).append(name)
    return " ".join(f"{letter}@{','.join(names)}" for letter, names in axes.items())


def is_mindspore(text: str) -> bool:
    """Returns True if a strategy consists of MindSpore's tuples, such as ((1, 1), (1, 2))."""
    return text.lstrip()[:1] in {"(", "{", "["}


def parse_mindspore(text: str, where: str) -> tuple[tuple[int, ...], ...]:
    """Parses MindSpore's tuples, such as "((1, 1), (1, 2))": the number of shards of each dimension of each input."""
    plain = text.strip()
    if plain.startswith("{"):
        plain = f"({plain[1:-1]},)"
    try:
        content: Any = ast.literal_eval(plain)
        found = tuple(tuple(operator.index(number) for number in one) for one in content)
    except (ValueError, SyntaxError, TypeError) as error:
        hints = ("write MindSpore's form, such as ((1, 1), (1, 2))", f"or letters and axes, {EXAMPLE}")
        raise UserError(f'"{text}" is not a strategy', where, hints) from error
    if not found or not all(found) or any(number < 1 for one in found for number in one):
        raise UserError(f'"{text}" is not a strategy: numbers must be 1 or more', where, (f"write axes, {EXAMPLE}",))
    return found


def mindspore_letters(kind: str, tuples: tuple[tuple[int, ...], ...], mesh: Mesh, where: str = "pin") -> dict[int, str]:
    """Converts MindSpore's tuples to {axis index: letter}. Chooses axes by their sizes; unused ones get the letter r.

    Each tuple has the number of shards of each dimension of an input. A linear layer's weight is [inputs, outputs], a
    convolution's [outputs, inputs, height, width]. Without a weight, the first tuple decides. Raises UserError.
    """
    letters: dict[int, str] = {}
    for letter, count in _counts_by_letter(kind.lower(), tuples, where).items():
        free = [axis for axis, size in enumerate(mesh.sizes) if axis not in letters and size > 1]
        counts = range(len(free) + 1)  # one axis before several
        subsets = itertools.chain.from_iterable(itertools.combinations(free, number) for number in counts)
        in_order = sorted(subsets, key=lambda axes: (len(axes), axes[::-1]))
        axes = next((axes for axes in in_order if mesh.shard_count(axes) == count), None)
        if axes is None:
            what = f"{count} pieces are needed, but no combination of unused axes of the mesh {mesh} has that size"
            raise UserError(what, where, ("change --mesh",))
        letters |= dict.fromkeys(axes, letter)
    return {axis: letters.get(axis, "r") for axis in range(len(mesh.axes))}


def _counts_by_letter(kind: str, tuples: tuple[tuple[int, ...], ...], where: str) -> dict[str, int]:
    if kind not in _WEIGHTED:
        first, last = tuples[0], tuples[-1]
        if set(first[2:]) - {1}:
            raise UserError(f"only samples and channels of {kind} can be split", where, ("use 1 for other dimensions",))
        return {"n": first[0], "c": first[1] if len(first) > 1 else last[0]}
    inner, outer, pixels_too = _WEIGHTED[kind]
    dims = len(tuples[0]) if pixels_too else 2
    if len(tuples) < 2 or len(tuples[0]) < 2 or len(tuples[1]) != dims:
        form = ", ".join("1" * dims)
        what = f"expected a tuple for the input and a tuple of {dims} numbers for the weight, found {tuples}"
        raise UserError(what, where, (f"write tuples such as (({form}), ({form}))",))
    (samples, *pixels), weight = tuples[0], tuples[1]
    features = pixels.pop(0 if pixels_too else -1)
    if {*pixels, *weight[2:]} - {1}:
        raise UserError(f"height and width of {kind} can't be split", where, ("give 1 for height and width",))
    if features != weight[inner]:
        what = f"the input's features are split into {features} parts, but the weight's into {weight[inner]}"
        raise UserError(what, where, ("split both into the same number of parts",))
    if any(one != (weight[outer],) for one in tuples[2:]):
        what = f"the weight's outputs are split into {weight[outer]} parts, but the bias as {tuples[2:]}"
        raise UserError(what, where, ("split both into the same number of parts",))
    return {"n": samples, "i": features, "o": weight[outer]}


# For ops whose weight has a tuple: (dimension of inputs, dimension of outputs, True if height and width follow).
_WEIGHTED = {
    **dict.fromkeys(("linear", "matmul", "dense"), (0, 1, False)),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d"), (1, 0, True)),
}


def resolve_letters(plan: Plan, graph: Graph, where: str = "plan") -> dict[str, tuple[str, ...]]:
    """Returns {op: letter for each mesh axis} for all ops of a network under a plan.

    An op that doesn't allow the default, such as one that mixes samples, is replicated. A pattern that matches several
    ops applies to those that allow its letters. Raises UserError if a pattern that names one op doesn't fit it.
    """
    default = parse_strategy(plan.default_strategy, plan.mesh, f"{where}, default")
    explicit, found = explicit_letters(plan, graph, where), dict[str, tuple[str, ...]]()
    for ops in graph.ops_by_tie().values():
        chosen: dict[int, tuple[str, Op]] = {}
        for op in ops:
            for axis, letter in explicit.get(op.name, ("", {}))[1].items():
                other, first = chosen.setdefault(axis, (letter, op))
                if other != letter:
                    name = plan.mesh.names[axis]
                    two = f"{first.name} and {op.name} share a parameter or a size"
                    what = f"{two}, but are split differently along {name}: {other} and {letter}"
                    raise UserError(what, where, (f"give both ops {other}@{name}",))
        letters = tuple(
            chosen[axis][0] if axis in chosen else _default_letter(ops, default.get(axis, "n"))
            for axis in range(len(plan.mesh.axes))
        )
        for op in sorted(ops, key=lambda op: op.name not in explicit):  # errors name an op that the user named
            _require_valid(op, letters, plan.mesh, where)
            found[op.name] = letters
    return {name: found[name] for name in graph.ops}


def explicit_letters(plan: Plan, graph: Graph, where: str = "plan") -> dict[str, tuple[str, dict[int, str]]]:
    """Returns {op: (pattern, {axis index: letter})} of ops that patterns match. Raises UserError if one doesn't fit."""
    explicit: dict[str, tuple[str, dict[int, str]]] = {}
    for pattern, text in plan.ops.items():
        ops = graph.ops_matching(pattern)
        if not ops:
            hint = did_you_mean(pattern, list(graph.ops))
            names = ", ".join(list(graph.ops)[:8])
            raise UserError(f"the network has no op {pattern}", where, (hint or f"choose from the ops {names} …",))
        unkept: dict[str, str] = {}
        for op in ops:
            strategy = _parse_for_op(text, op, graph, plan.mesh, f"{where}, {pattern}")
            exact = len(ops) == 1 or op.name == pattern
            chosen = {axis: _letter_for_op(op, letter, exact=exact) for axis, letter in strategy.items()}
            explicit[op.name] = (pattern, {axis: letter for axis, letter in chosen.items() if letter})
            unkept[op.name] = "".join(strategy[axis] for axis, letter in chosen.items() if not letter)
        refused = [one for one in "".join(unkept.values()) if all(one in letters for letters in unkept.values())]
        if refused:
            names = ", ".join(list(unkept)[:4])
            what = f"{pattern} can't be split as {text}: the ops {names} have no dimension {refused[0]}"
            hints = ("name one op and a dimension of that op", "run manyhands plan to list the ops")
            raise UserError(what, f"{where}, {pattern}", hints)
    return explicit


def _parse_for_op(text: str, op: Op, graph: Graph, mesh: Mesh, where: str) -> dict[int, str]:
    if not is_mindspore(text):
        return parse_strategy(text, mesh, where)
    tuples = parse_mindspore(text, where)
    letters = mindspore_letters(op.kind, tuples, mesh, where)
    if op.module is not None and op.kind in {"linear", "conv"}:
        return letters  # the tuples include the parameters, and `_counts_by_letter` has compared them
    if any(not isinstance(op.letters.get(letter), Sharding) for letter in letters.values()):
        return letters  # refused later, with a reason
    allowed = f"split the op by {', '.join(op.allowed_letters())}, such as n@{mesh.names[0]}"
    read = _shards_read(op, graph, [letters[axis] for axis in sorted(letters)], mesh)
    if len(tuples) > max(1, len(read)):
        what = f"{op.name} ({op.kind}) reads {len(read)} tensor(s), but {tuples} has {len(tuples)} tuples"
        raise UserError(what, where, ("give a tuple for each tensor that the op reads", allowed))
    for (name, pieces), wanted in zip(read, tuples, strict=False):
        if pieces != wanted:
            what = f"{op.name} ({op.kind}) can't be split as {tuples}: {name} would be split into {pieces}"
            raise UserError(what, where, (allowed,))
    return letters


def _shards_read(op: Op, graph: Graph, letters: list[str], mesh: Mesh) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (name, number of shards of each dimension) of all tensors that an op reads. `letters`: one per axis."""
    shardings = [sharding for sharding in (op.letters[letter] for letter in letters) if isinstance(sharding, Sharding)]

    def pieces(sides: list[Any], dims: int) -> tuple[int, ...]:
        cut = tuple(mesh.shard_count([axis for axis, side in enumerate(sides) if side == dim]) for dim in range(dims))
        return cut or (1,)

    found: list[tuple[str, tuple[int, ...]]] = []
    for place, name in enumerate(op.sources):
        taken = pieces([sharding.inputs[place] for sharding in shardings], len(graph.ops[name].extents[0].dims))
        transposed = place == 1 and op.node is not None and op.node.target is functional.linear
        found.append((name, taken[::-1] if transposed else taken))
    for name, tensor in op.parameters().items():
        found.append((name, pieces([sharding.cuts.get(name) for sharding in shardings], tensor.ndim)))
    return found


def _letter_for_op(op: Op, letter: str, *, exact: bool) -> str:
    """Returns `letter` if the op has it or `exact` is True. Otherwise "c" in place of "o" if the op has it, or ""."""
    if exact or letter in op.letters:
        return letter
    return "c" if letter in {"o", "c"} and "c" in op.letters else ""


def _default_letter(ops: list[Op], letter: str) -> str:
    return letter if all(isinstance(op.letters.get(letter), Sharding) for op in ops if op.letters) else "r"


def _require_valid(op: Op, letters: tuple[str, ...], mesh: Mesh, where: str) -> None:
    reason = refusal(op, letters, mesh)
    if reason:
        # letters that are valid along at least one axis
        axes = [Mesh((axis,)) for axis in mesh.axes]
        fitting = [one for one in op.allowed_letters() if any(not refusal(op, (one,), axis) for axis in axes)]
        what = f"{op.name} ({op.kind}) can't be split as {write_strategy(letters, mesh)}: {reason}"
        raise UserError(what, f"{where}, {op.name}", (f"split the op by {', '.join(fitting or ['r'])}",))


def refusal(op: Op, letters: tuple[str, ...], mesh: Mesh) -> str:
    """Returns the reason why an op can't be sharded by `letters` (one per mesh axis), or "" if it can."""
    for letter in set(letters):
        sharding = op.letters.get(letter)
        if sharding is None:
            return f"the op has no dimension {letter}"
        if isinstance(sharding, str):
            return sharding
        parts = mesh.shard_count([axis for axis, one in enumerate(letters) if one == letter])
        if sharding.length and sharding.even and sharding.length % parts:
            return f"the length {sharding.length} can't be divided into {parts} equal pieces"
        if sharding.length and sharding.length < parts:
            return f"the length {sharding.length} can't be divided into {parts} pieces"
    return ""


def shorten_strategies(letters: Mapping[str, tuple[str, ...]], graph: Graph, mesh: Mesh) -> tuple[str, dict[str, str]]:
    """Converts letters of all ops to (default strategy, {op: other strategy}). `resolve_letters` is the inverse."""
    default = tuple("n" for _ in mesh.axes)
    exceptions: dict[str, str] = {}
    for ops in graph.ops_by_tie().values():
        natural = tuple(_default_letter(ops, letter) for letter in default)
        # Names a product rather than the parameter that the product reads.
        first = next((op for op in ops if op.batched), ops[0])
        if letters[first.name] != natural:
            exceptions[first.name] = write_strategy(letters[first.name], mesh)
    ordered = {name: exceptions[name] for name in graph.ops if name in exceptions}
    return write_strategy(default, mesh), ordered

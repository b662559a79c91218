"""Parameters that several ops share or read: each has one layout, which must fit all of its readers."""

from typing import Any

from torch import nn

from manyhands.parallel.mesh.placement import SPREAD, SUM, WHOLE, Side
from manyhands.parallel.split.graph import Loop, Op

PRODUCT = "matmul"


def sharing(ops: dict[str, Op]) -> list[tuple[str, str]]:
    """Pairs of ops that use the same parameter or buffer, so have the same placements."""
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for op in ops.values():
        for tensor in op.parameters().values():
            owner = first.setdefault(id(tensor), op.name)
            if owner != op.name:
                pairs.append((owner, op.name))
    return pairs


def cut_with_readers(ops: dict[str, Op]) -> list[tuple[str, str]]:
    """Lets parameters that products read, maybe transposed, be sharded as these need; returns pairs of tied ops."""
    ties: list[tuple[str, str]] = []
    readers: dict[str, list[tuple[Op, int]]] = {}
    for op in ops.values():
        for place, name in enumerate(op.sources):
            readers.setdefault(name, []).append((op, place))
    for op in reversed(list(ops.values())):
        reading = readers.get(op.name, [])
        if not _may_be_cut(op, ops) or not all(_wants_pieces(reader) for reader, _ in reading) or not reading:
            continue
        for letter in ("o", "i"):
            op.letters[letter] = _as_wanted(op, letter, reading)
        ties += [(op.name, reader.name) for reader, _ in reading]
    return ties


def _may_be_cut(op: Op, ops: dict[str, Op]) -> bool:
    """True for a parameter, also a transposed one."""
    if op.reads_attribute:
        return isinstance(op.parameters()[""], nn.Parameter)
    source = ops[op.sources[0]] if len(op.sources) == 1 else None
    return source is not None and source.reads_attribute and _order(op) is not None and _may_be_cut(source, ops)


def _order(op: Op) -> list[int] | None:
    """The permutation of a transposed matrix; None for other ops."""
    node, dims = op.node, len(op.extents[0].dims) if len(op.extents) == 1 else 0
    if node is None or dims != 2:
        return None
    if node.op == "call_method" and node.target == "t":
        return [1, 0]
    swaps = node.op == "call_method" and node.target in {"transpose", "swapaxes"}
    if swaps and all(isinstance(one, int) for one in node.args[1:]):
        return [1, 0] if {int(str(one)) % 2 for one in node.args[1:]} == {0, 1} else [0, 1]
    return [1, 0] if node.target is getattr and node.args[1:] in {("T",), ("mT",)} else None


def _wants_pieces(reader: Op) -> bool:
    """True for products that can be sharded, and for transposed parameters that they read."""
    offered = {"o", "i"} & set(reader.letters)
    return bool(offered) and (reader.kind == PRODUCT or _order(reader) is not None)


def _as_wanted(op: Op, letter: str, reading: list[tuple[Op, int]]) -> Loop | str:
    """The placement of a parameter for all of its readers under one letter, or why there is none."""
    sides: set[Side] = set()
    for reader, place in reading:
        loop = reader.letters.get(letter, f"the op has no dimension {letter}")
        if isinstance(loop, str):
            return f"{reader.name} reads the parameter, and {loop}"
        sides.add(loop.inputs[place])
    if len(sides) > 1:
        return f"{' and '.join(reader.name for reader, _ in reading)} would split the parameter differently"
    side = sides.pop()
    order = None if op.reads_attribute else _order(op)
    inputs: tuple[Side, ...] = () if op.reads_attribute else (order[side] if order and isinstance(side, int) else side,)
    if isinstance(side, int):
        cuts = {"": side} if op.reads_attribute else {}
        return Loop(inputs, side, cuts, length=op.extent.dims[side])
    # A term of a sum is taken of the whole, and its gradient is the whole one.
    return Loop(
        inputs if side != SUM else tuple(WHOLE for _ in inputs),
        WHOLE if side == SUM else SPREAD,
        partial=frozenset({""} if op.reads_attribute and side == SPREAD else ()),
    )


def refuse_two_ways(ops: dict[str, Op]) -> None:
    """Refuses letters under which two tied ops would shard a shared parameter differently."""
    users: dict[int, list[tuple[Op, str]]] = {}
    for op in ops.values():
        for name, tensor in op.parameters().items():
            users.setdefault(id(tensor), []).append((op, name))
    for sharing_it in users.values():
        first, own = sharing_it[0]
        for other, name in sharing_it[1:]:
            for letter in {*first.letters, *other.letters}:
                if _cut(first, own, letter) != _cut(other, name, letter):
                    reason = f"{first.name} and {other.name} share a parameter, but would split differently"
                    first.letters[letter] = other.letters[letter] = reason
    for op in ops.values():
        if op.reads_attribute:
            refused = {letter: reason for letter, reason in op.letters.items() if isinstance(reason, str)}
            for other in [one for one in ops.values() if refused and one.tied == op.tied]:
                other.letters.update({letter: reason for letter, reason in refused.items() if letter in other.letters})


def _cut(op: Op, name: str, letter: str) -> Any:
    """How an op shards a parameter under a letter: the dimension, its view, and whether gradients are summed."""
    loop = op.letters.get(letter)
    if not isinstance(loop, Loop):
        return None
    return loop.cuts.get(name), op.views.get(name), name in loop.partial


def cut_alike(training: dict[str, Op], evaluation: dict[str, Op]) -> None:
    """Refuses letters under which a parameter that ops read directly couldn't be evaluated."""
    for name, op in evaluation.items():
        if op.reads_attribute and name in training:
            for letter, loop in training[name].letters.items():
                if isinstance(loop, Loop) and loop.cuts and not isinstance(op.letters.get(letter), Loop):
                    training[name].letters[letter] = "evaluation reads the parameter differently"

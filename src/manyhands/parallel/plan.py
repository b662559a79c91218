"""A plan: which part of each op's work each process does. Short, readable, and edited by hand."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.nn import functional

from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, parse_mesh
from manyhands.core.plan_record import FORMAT, PlanRecord, no_plan, parse_plan_record, read_plan_record
from manyhands.parallel.graph import INPUT, Graph, Loop, Op
from manyhands.parallel.options import ParallelOptions
from manyhands.parallel.strategy import from_mindspore, is_tuples, parse_strategy, parse_tuples, write_strategy


@dataclass(frozen=True)
class Plan:
    """The strategy of each op of a network on a mesh.

    Attributes:
        mesh: the mesh of processes.
        ops: strategies by op, module path or glob; the last match applies.
        default: the strategy of other ops; if empty, `fallback` shards the samples over all axes.
        pinned: the keys of `ops` that the user set.
        layouts: the layout of each tensor, filled in from the network for tools that read the plan alone.
        about: other fields of plan.json, such as predicted, measured, reason and graph; see `PlanRecord`.
    """

    mesh: Mesh
    ops: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    pinned: tuple[str, ...] = ()
    layouts: Mapping[str, TensorLayout] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fallback(self) -> str:
        """The strategy of ops that no pattern matches; by default, samples are sharded over all axes."""
        return self.default or f"n@{','.join(self.mesh.names)}"

    def record(self) -> PlanRecord:
        cut = (
            {}
            if self.layouts is None
            else {"layouts": {name: one.as_plain() for name, one in self.layouts.items() if one.cuts}}
        )
        pinned = {"pinned": list(self.pinned)} if self.pinned else {}
        split = {"mesh": self.mesh.as_dict(), "default": self.fallback, "ops": dict(self.ops), **pinned, **cut}
        return PlanRecord.model_validate({"format": FORMAT, **self.about, **split})

    def as_plain(self) -> dict[str, Any]:
        return self.record().as_plain()


def read_plan(path: Path) -> Plan:
    """Reads a plan.json.

    Raises:
        UserError: the file does not exist, or a field is invalid.
    """
    return _plan_of_record(read_plan_record(path), str(path))


def plan_from_plain(content: Any, where: str) -> Plan:
    """Parses the result of `Plan.as_plain`.

    Raises:
        UserError: a field is invalid.
    """
    return _plan_of_record(parse_plan_record(content, where), where)


def _plan_of_record(record: PlanRecord, where: str) -> Plan:
    if not {"format", "mesh"} <= record.model_fields_set:
        raise no_plan(where)
    mesh, layouts = record.mesh_and_layouts(where)
    known = None if record.layouts is None else layouts
    return Plan(mesh, record.ops, record.default, tuple(record.pinned), known, record.about())


def resolve(plan: Plan, graph: Graph, where: str = "plan") -> dict[str, tuple[str, ...]]:
    """The letters of each op of a network.

    An op that can't follow the default (it mixes samples, say) does all of its work everywhere. A pattern for several
    ops binds those that know its letters; one that names a single op must fit. Raises UserError: a strategy doesn't fit
    its op or the mesh, or two ops that must agree don't.
    """
    default = parse_strategy(plan.fallback, plan.mesh, f"{where}, default")
    return _spread(strategies(plan, graph, where), default, plan, graph, where)


def strategies(plan: Plan, graph: Graph, where: str = "plan") -> dict[str, tuple[str, dict[int, str]]]:
    """By op, the pattern that a plan has for it, and letters by axis. Raises UserError: one doesn't fit."""
    said: dict[str, tuple[str, dict[int, str]]] = {}
    for pattern, text in plan.ops.items():
        ops = graph.matching(pattern)
        if not ops:
            hint = did_you_mean(pattern, list(graph.ops))
            names = ", ".join(list(graph.ops)[:8])
            raise UserError(f"the network has no op {pattern}", where, (hint or f"choose from the ops {names} …",))
        unkept: dict[str, str] = {}
        for op in ops:
            strategy = _read(text, op, graph, plan.mesh, f"{where}, {pattern}")
            exact = len(ops) == 1 or op.name == pattern
            chosen = {axis: _known(op, letter, exact=exact) for axis, letter in strategy.items()}
            said[op.name] = (pattern, {axis: letter for axis, letter in chosen.items() if letter})
            unkept[op.name] = "".join(strategy[axis] for axis, letter in chosen.items() if not letter)
        _refuse_if_none_keeps(pattern, text, unkept, f"{where}, {pattern}")
    return said


def _refuse_if_none_keeps(pattern: str, text: str, unkept: Mapping[str, str], where: str) -> None:
    """Raises UserError for a letter that means nothing to any of the ops that a pattern names."""
    for letter in dict.fromkeys("".join(unkept.values())):
        if all(letter in letters for letters in unkept.values()):
            names = ", ".join(list(unkept)[:4])
            what = f"{pattern} can't be split as {text}: the ops {names} have no dimension {letter}"
            raise UserError(what, where, ("name one op and a dimension of that op", "see manyhands plan"))


def _read(text: str, op: Op, graph: Graph, mesh: Mesh, where: str) -> dict[int, str]:
    if not is_tuples(text):
        return parse_strategy(text, mesh, where)
    tuples = parse_tuples(text, where)
    letters = from_mindspore(op.kind, tuples, mesh, where)
    _refuse_other_pieces(op, graph, tuples, letters, mesh, where)
    return letters


def _refuse_other_pieces(
    op: Op, graph: Graph, tuples: tuple[tuple[int, ...], ...], letters: dict[int, str], mesh: Mesh, where: str
) -> None:
    """Raises UserError where the letters that tuples were read as wouldn't cut each input as the tuples say."""
    if op.module is not None and op.kind in {"linear", "conv"}:
        return  # whose own parameters the tuples name, and which have been compared with them
    if any(not isinstance(op.letters.get(letter), Loop) for letter in letters.values()):
        return  # for which there is a reason
    allowed = f"split the op by {', '.join(op.allowed())}, such as n@{mesh.names[0]}"
    read = _pieces_read(op, graph, [letters[axis] for axis in sorted(letters)], mesh)
    if len(tuples) > max(1, len(read)):
        what = f"{op.name} ({op.kind}) reads {len(read)} tensor(s), but {tuples} has {len(tuples)} tuples"
        raise UserError(what, where, ("give a tuple for each tensor that the op reads", allowed))
    for (name, pieces), wanted in zip(read, tuples, strict=False):
        if pieces != wanted:
            what = f"{op.name} ({op.kind}) can't be split as {tuples}: {name} would be split into {pieces}"
            raise UserError(what, where, (allowed,))


def _pieces_read(op: Op, graph: Graph, letters: list[str], mesh: Mesh) -> list[tuple[str, tuple[int, ...]]]:
    """Each tensor that an op reads under its letters, and into how many pieces its dimensions are cut."""
    loops = [loop for loop in (op.letters[letter] for letter in letters) if isinstance(loop, Loop)]

    def pieces(sides: list[Any], dims: int) -> tuple[int, ...]:
        cut = tuple(mesh.parts([axis for axis, side in enumerate(sides) if side == dim]) for dim in range(dims))
        return cut or (1,)

    found: list[tuple[str, tuple[int, ...]]] = []
    for place, name in enumerate(op.sources):
        taken = pieces([loop.inputs[place] for loop in loops], len(graph.ops[name].extents[0].dims))
        transposed = place == 1 and op.node is not None and op.node.target is functional.linear
        found.append((name, taken[::-1] if transposed else taken))
    for name, tensor in op.parameters().items():
        found.append((name, pieces([loop.cuts.get(name) for loop in loops], tensor.ndim)))
    return found


def _known(op: Op, letter: str, *, exact: bool) -> str:
    """The letter, or for one op of many the one that means the same to it, or none."""
    if exact or letter in op.letters:
        return letter
    return "c" if letter in {"o", "c"} and "c" in op.letters else ""


def _spread(
    said: dict[str, tuple[str, dict[int, str]]], default: dict[int, str], plan: Plan, graph: Graph, where: str
) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for ops in graph.ties().values():
        chosen: dict[int, tuple[str, Op]] = {}
        for op in ops:
            for axis, letter in said.get(op.name, ("", {}))[1].items():
                other = chosen.setdefault(axis, (letter, op))
                if other[0] != letter:
                    axis_name = plan.mesh.names[axis]
                    raise UserError(
                        f"{other[1].name} and {op.name} share a parameter or a size, but are split differently along "
                        f"{axis_name}: {other[0]} and {letter}",
                        where,
                        (f"give both ops {other[0]}@{axis_name}",),
                    )
        for op in sorted(ops, key=lambda op: op.name not in said):  # an error is about an op that the user named
            letters = [
                chosen[axis][0] if axis in chosen else _default(ops, default.get(axis, "n"))
                for axis in range(len(plan.mesh.axes))
            ]
            _check(op, tuple(letters), plan.mesh, where)
            found[op.name] = tuple(letters)
    return {name: found[name] for name in graph.ops}


def _default(ops: list[Op], letter: str) -> str:
    return letter if all(isinstance(op.letters.get(letter), Loop) for op in ops if op.letters) else "r"


def _check(op: Op, letters: tuple[str, ...], mesh: Mesh, where: str) -> None:
    reason = refusal(op, letters, mesh)
    if reason:
        fitting = [letter for letter in op.allowed() if _fits_somewhere(op, letter, mesh)]
        what = f"{op.name} ({op.kind}) can't be split as {write_strategy(letters, mesh)}: {reason}"
        raise UserError(what, f"{where}, {op.name}", (f"split the op by {', '.join(fitting or ['r'])}",))


def _fits_somewhere(op: Op, letter: str, mesh: Mesh) -> bool:
    """True where an op can take a letter along one of the axes at least."""
    return any(not refusal(op, (letter,), Mesh((axis,))) for axis in mesh.axes)


def refusal(op: Op, letters: tuple[str, ...], mesh: Mesh) -> str:
    """Why an op can't take these letters; empty if it can."""
    for letter in set(letters):
        loop = op.letters.get(letter)
        if loop is None:
            return f"the op has no dimension {letter}"
        if isinstance(loop, str):
            return loop
        parts = mesh.parts([axis for axis, one in enumerate(letters) if one == letter])
        if loop.length and loop.even and loop.length % parts:
            return f"the length {loop.length} can't be divided into {parts} equal pieces"
        if loop.length and loop.length < parts:
            return f"the length {loop.length} can't be divided into {parts} pieces"
    return ""


def parse_pins(words: tuple[str, ...], where: str = "--pin") -> dict[str, str]:
    """Reads "fc=n@dp o@tp" words. Raises UserError: a word is not of this form."""
    pins: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\S.*)", word)
        if not match:
            raise UserError(f'"{word}" is not a pin', where, ('name an op and its strategy: --pin "fc=n@dp o@tp"',))
        pins[match[1]] = match[2].strip()
    return pins


def concise(letters: Mapping[str, tuple[str, ...]], graph: Graph, mesh: Mesh) -> tuple[str, dict[str, str]]:
    """A default and as few exceptions as that needs, so that a plan stays readable.

    Only ops whose letters the default wouldn't give are written, so `resolve` gives the same letters back.
    """
    default = tuple("n" for _ in mesh.axes)
    exceptions: dict[str, str] = {}
    for ops in graph.ties().values():
        natural = tuple(_default(ops, letter) for letter in default)
        # A product is named rather than the parameter that it reads.
        first = next((op for op in ops if op.batched), ops[0])
        if letters[first.name] != natural:
            exceptions[first.name] = write_strategy(letters[first.name], mesh)
    ordered = {name: exceptions[name] for name in graph.ops if name in exceptions}
    return write_strategy(default, mesh), ordered


def plan_of(options: ParallelOptions, world_size: int) -> Plan:
    """The plan that a job's options name: a file's, with pins over it, or pins alone. Raises UserError: it is wrong."""
    pins = parse_pins(options.pin, "parallel.pin")
    plan = read_plan(Path(options.plan).expanduser()) if options.plan else Plan(Mesh((("dp", world_size),)))
    if options.mesh or not options.plan:
        mesh = parse_mesh(options.mesh) if options.mesh else plan.mesh
        plan = replace(plan, mesh=mesh, default="" if mesh.names != plan.mesh.names else plan.default, layouts=None)
    plan.mesh.check_size(world_size, "parallel.mesh" if options.mesh else options.plan)
    kept = tuple(name for name in plan.pinned if name not in pins)
    rest = {name: text for name, text in plan.ops.items() if name not in pins}
    if options.full_batch and INPUT in pins:
        hints = ("leave --parallel.full-batch out", f"or leave the pin of {INPUT} out")
        raise UserError(f"parallel.full_batch and a pin of {INPUT} can't be combined", "parallel.pin", hints)
    whole_input = {INPUT: f"r@{','.join(plan.mesh.names)}"} if options.full_batch else {}
    return replace(plan, ops={**rest, **pins, **whole_input}, pinned=(*kept, *pins))

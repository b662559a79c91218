"""A plan: which part of each op's work each process does. Short, readable, and edited by hand."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.layouts import TensorLayout, layout_from_plain
from manyhands.core.mesh import Mesh, make_mesh, parse_mesh
from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.plugins import did_you_mean
from manyhands.parallel.graph import INPUT, Graph, Loop, Op
from manyhands.parallel.options import ParallelOptions
from manyhands.parallel.strategy import from_mindspore, is_tuples, parse_strategy, parse_tuples, write_strategy

FORMAT = "plan/1"


@dataclass(frozen=True)
class Plan:
    """How the work of a network is split over a mesh.

    Attributes:
        mesh: the processes.
        ops: strategy by op, module path or glob; the last that matches wins.
        default: of ops that none matches.
        pinned: keys of `ops` that the user fixed.
        layouts: how each tensor of the network lies; filled in from the network, for tools that don't have it.
        about: whatever else the file says: predicted, measured, reason, calibration, graph.
    """

    mesh: Mesh
    ops: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    pinned: tuple[str, ...] = ()
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fallback(self) -> str:
        """The strategy of ops that nothing matches: samples, over all axes, unless the plan says otherwise."""
        return self.default or f"n@{','.join(self.mesh.names)}"

    def as_plain(self) -> dict[str, Any]:
        """As JSON data."""
        content: dict[str, Any] = {"format": FORMAT, "mesh": self.mesh.as_dict(), "default": self.fallback}
        content["ops"] = dict(self.ops)
        if self.pinned:
            content["pinned"] = list(self.pinned)
        content |= self.about
        content["layouts"] = {name: one.as_plain() for name, one in self.layouts.items() if one.cuts}
        return content


def read_plan(path: Path) -> Plan:
    """Reads a plan.json.

    Raises:
        UserError: there is none, or it is not a plan; says which field.
    """
    try:
        content = parse_json(read_bytes(path), once_each=True)
    except OSError as error:
        raise UserError(f"the plan can't be read: {error.strerror}", str(path), ("manyhands plan job.toml",)) from error
    except ValueError as error:
        raise UserError(
            f"the plan is not JSON: {error}", str(path), ("write it anew: manyhands plan job.toml",)
        ) from error
    return plan_from_plain(content, str(path))


def plan_from_plain(content: Any, where: str) -> Plan:
    """Reads what `as_plain` wrote, or a person edited.

    Raises:
        UserError: it is not a plan; says which field.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("mesh"), dict):
        raise UserError(
            f'this is no plan: "format" should be "{FORMAT}", with a "mesh"', where, ("manyhands plan job.toml",)
        )
    mesh = make_mesh(content["mesh"], f"{where}, mesh")
    ops, default = content.get("ops", {}), content.get("default", "")
    texts = isinstance(ops, dict) and all(isinstance(one, str) for one in (*ops, *ops.values(), default))
    pinned, layouts = content.get("pinned", []), content.get("layouts", {})
    if not texts or not isinstance(pinned, list) or not isinstance(layouts, dict):
        raise UserError('"ops" should be strategies by name, such as {"fc": "n@dp o@tp"}', where, ("mend it by hand",))
    known = ("format", "mesh", "ops", "default", "pinned", "layouts")
    misspelt = next((key for key in content if key not in known and did_you_mean(key, list(known))), None)
    if misspelt is not None:
        raise UserError(f'a plan has no field "{misspelt}"', where, (did_you_mean(misspelt, list(known)),))
    return Plan(
        mesh,
        ops,
        default,
        tuple(str(one) for one in pinned),
        {name: layout_from_plain(one, mesh, f"{where}, layouts, {name}") for name, one in layouts.items()},
        {key: value for key, value in content.items() if key not in known},
    )


def resolve(plan: Plan, graph: Graph, where: str = "plan") -> dict[str, tuple[str, ...]]:
    """The letters of each op of a network.

    An op that can't follow the default (it mixes samples, say) does all of its work everywhere. A pattern for several
    ops binds those that know its letters; one that names a single op must fit.

    Raises:
        UserError: a strategy doesn't fit its op or the mesh, or two ops that must agree don't.
    """
    default = parse_strategy(plan.fallback, plan.mesh, f"{where}, default")
    return _spread(strategies(plan, graph, where), default, plan, graph, where)


def strategies(plan: Plan, graph: Graph, where: str = "plan") -> dict[str, tuple[str, dict[int, str]]]:
    """What a plan says of ops by name: the pattern that says it, and the letter of each axis that it names.

    Raises:
        UserError: a pattern matches nothing, or its strategy can't be read.
    """
    said: dict[str, tuple[str, dict[int, str]]] = {}
    for pattern, text in plan.ops.items():
        ops = graph.matching(pattern)
        if not ops:
            hint = did_you_mean(pattern, list(graph.ops))
            names = ", ".join(list(graph.ops)[:8])
            raise UserError(f"the network has no op {pattern}", where, (hint or f"its ops: {names} …",))
        for op in ops:
            strategy = _read(text, op, plan.mesh, f"{where}, {pattern}")
            exact = len(ops) == 1 or op.name == pattern
            chosen = {axis: _known(op, letter, exact=exact) for axis, letter in strategy.items()}
            said[op.name] = (pattern, {axis: letter for axis, letter in chosen.items() if letter})
    return said


def _read(text: str, op: Op, mesh: Mesh, where: str) -> dict[int, str]:
    if is_tuples(text):
        return from_mindspore(op.kind, parse_tuples(text, where), mesh, where)
    return parse_strategy(text, mesh, where)


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
                        f"{other[1].name} and {op.name} share a parameter or a size, so along {axis_name} both must be "
                        f"cut alike; the plan says {other[0]} and {letter}",
                        where,
                        (f"give both {other[0]}@{axis_name}",),
                    )
        for op in ops:
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
        raise UserError(
            f"{op.name} ({op.kind}) can't be split as {write_strategy(letters, mesh)}: {reason}",
            f"{where}, {op.name}",
            (f"it can be split by {', '.join(fitting or ['r'])}",),
        )


def _fits_somewhere(op: Op, letter: str, mesh: Mesh) -> bool:
    """True where an op can take a letter along one of the axes at least."""
    return any(not refusal(op, (letter,), Mesh((axis,))) for axis in mesh.axes)


def refusal(op: Op, letters: tuple[str, ...], mesh: Mesh) -> str:
    """Why an op can't take these letters; empty if it can."""
    for letter in set(letters):
        loop = op.letters.get(letter)
        if loop is None:
            return f"{letter} means nothing to it"
        if isinstance(loop, str):
            return loop
        parts = mesh.parts([axis for axis, one in enumerate(letters) if one == letter])
        if loop.length and loop.even and loop.length % parts:
            return f"{loop.length} can't be cut into {parts} equal pieces"
        if loop.length and loop.length < parts:
            return f"{loop.length} can't be cut into {parts} pieces"
    return ""


def parse_pins(words: tuple[str, ...], where: str = "--pin") -> dict[str, str]:
    """Reads "fc=n@dp o@tp" words.

    Raises:
        UserError: a word is not of this form.
    """
    pins: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\S.*)", word)
        if not match:
            raise UserError(f'"{word}" is no pin', where, ('name an op and its strategy: --pin "fc=n@dp o@tp"',))
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
        first = ops[0]
        if letters[first.name] != natural:
            exceptions[first.name] = write_strategy(letters[first.name], mesh)
    ordered = {name: exceptions[name] for name in graph.ops if name in exceptions}
    return write_strategy(default, mesh), ordered


def plan_of(options: ParallelOptions, world_size: int) -> Plan:
    """The plan that a job's options name: a file's, with the pins over it, or the pins alone.

    Raises:
        UserError: the file or a pin is wrong, or the mesh doesn't have as many places as there are processes.
    """
    pins = parse_pins(options.pin, "parallel.pin")
    plan = read_plan(Path(options.plan).expanduser()) if options.plan else Plan(Mesh((("dp", world_size),)))
    if options.mesh or not options.plan:
        mesh = parse_mesh(options.mesh) if options.mesh else plan.mesh
        plan = replace(plan, mesh=mesh, default="" if mesh.names != plan.mesh.names else plan.default, layouts={})
    if plan.mesh.size != world_size:
        where = "parallel.mesh" if options.mesh else options.plan
        mend = (f"-n {plan.mesh.size}", f"or a mesh of {world_size}, such as --mesh dp={world_size}")
        raise UserError(f"the mesh {plan.mesh} has {plan.mesh.size} places for {world_size} process(es)", where, mend)
    kept = tuple(name for name in plan.pinned if name not in pins)
    rest = {name: text for name, text in plan.ops.items() if name not in pins}
    whole_input = {INPUT: f"r@{','.join(plan.mesh.names)}"} if options.full_batch else {}
    return replace(plan, ops={**rest, **pins, **whole_input}, pinned=(*kept, *pins))

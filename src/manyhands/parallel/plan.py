"""Plans, which say how the ops of a network are sharded over a mesh, and their file plan.json."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, parse_mesh
from manyhands.core.plan_record import FORMAT, PlanRecord, no_plan, parse_plan_record, read_plan_record
from manyhands.core.world import World
from manyhands.parallel.group.plain import broadcast_result
from manyhands.parallel.options import ParallelOptions

INPUT = "input"  # the op for the network's input


@dataclass(frozen=True)
class Plan:
    """The sharding (strategy) of each op of a network over a mesh.

    Attributes:
        mesh: the mesh of processes.
        ops: strategies by op, module path or glob; the last match applies.
        default: the strategy of ops that match no key of `ops`; empty: samples are sharded over all axes.
        pinned: the keys of `ops` that the user set.
        layouts: the layout of each tensor, for tools that read the plan without the network.
        about: other fields of plan.json, such as predicted, measured, reason and graph; see `PlanRecord`.
    """

    mesh: Mesh
    ops: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    pinned: tuple[str, ...] = ()
    layouts: Mapping[str, TensorLayout] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def default_strategy(self) -> str:
        """The strategy of ops that match no key of `ops`: `default`, or samples sharded over all axes."""
        return self.default or f"n@{','.join(self.mesh.names)}"

    def record(self) -> PlanRecord:
        split: dict[str, Any] = {"mesh": self.mesh.as_dict(), "default": self.default_strategy, "ops": dict(self.ops)}
        if self.pinned:
            split["pinned"] = list(self.pinned)
        if self.layouts is not None:
            split["layouts"] = {name: one.as_plain() for name, one in self.layouts.items() if one.cuts}
        return PlanRecord.model_validate({"format": FORMAT, **self.about, **split})

    def as_plain(self) -> dict[str, Any]:
        return self.record().as_plain()


PlanLike = Plan | str | Path | Mapping[str, str]


def to_plan(plan: PlanLike) -> Plan:
    """Converts the path of a plan.json, or a dict {"mesh": "dp=2", "fc": "o@dp", …}, to a Plan."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return read_plan(Path(plan))
    given: Any = plan
    if not isinstance(given, Mapping) or not all(
        isinstance(word, str) for word in (given.get("mesh"), *given.values())
    ):
        hints = ('pass "plan.json" or {"mesh": "dp=2", "fc": "o@dp"}',)
        raise UserError('plan must be a path, or a dict of strings with the key "mesh"', "plan", hints)
    return Plan(parse_mesh(plan["mesh"]), {name: text for name, text in plan.items() if name != "mesh"})


def read_plan(path: Path) -> Plan:
    """Reads a plan.json. Raises UserError if it doesn't exist or a field is invalid."""
    return _plan_of_record(read_plan_record(path), str(path))


def plan_from_plain(content: Any, where: str) -> Plan:
    """Creates a Plan from the result of `as_plain`. Raises UserError if a field is invalid. `where` is its origin."""
    return _plan_of_record(parse_plan_record(content, where), where)


def _plan_of_record(record: PlanRecord, where: str) -> Plan:
    if not {"format", "mesh"} <= record.model_fields_set:
        raise no_plan(where)
    mesh, layouts = record.mesh_and_layouts(where)
    known = None if record.layouts is None else layouts
    return Plan(mesh, record.ops, record.default, tuple(record.pinned), known, record.about())


def parse_pins(words: tuple[str, ...], where: str = "--pin") -> dict[str, str]:
    """Parses pins such as "fc=n@dp o@tp" into {op: strategy}. Raises UserError if a pin has another form."""
    pins: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\S.*)", word)
        if not match:
            raise UserError(f'"{word}" is not a pin', where, ('name an op and its strategy: --pin "fc=n@dp o@tp"',))
        pins[match[1]] = match[2].strip()
    return pins


def plan_from_options(options: ParallelOptions, world_size: int) -> Plan:
    """Returns a job's plan: its plan file, changed by its pins. Raises UserError if the file or a pin is invalid."""
    pins = parse_pins(options.pin, "parallel.pin")
    plan = read_plan(Path(options.plan).expanduser()) if options.plan else Plan(Mesh((("dp", world_size),)))
    if options.mesh or not options.plan:
        mesh = parse_mesh(options.mesh) if options.mesh else plan.mesh
        plan = replace(plan, mesh=mesh, default="" if mesh.names != plan.mesh.names else plan.default, layouts=None)
    plan.mesh.check_size(world_size, "parallel.mesh" if options.mesh else options.plan)
    kept = tuple(name for name in plan.pinned if name not in pins)
    rest = {name: text for name, text in plan.ops.items() if name not in pins}
    if options.full_batch and INPUT in pins:
        hints = ("remove --parallel.full-batch", f"or remove the pin for {INPUT}")
        raise UserError(f"parallel.full_batch can't be combined with a pin for {INPUT}", "parallel.pin", hints)
    whole_input = {INPUT: f"r@{','.join(plan.mesh.names)}"} if options.full_batch else {}
    return replace(plan, ops={**rest, **pins, **whole_input}, pinned=(*kept, *pins))


def broadcast_plan(options: ParallelOptions, world: World) -> Plan:
    """Returns `plan_from_options` of rank 0, because other machines may lack the plan file. A collective."""
    return plan_from_plain(broadcast_result(lambda: plan_from_options(options, world.size).as_plain(), world), "plan")

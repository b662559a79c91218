"""The plan that a job names, as rank 0 reads it: other machines may not have the file, or an older one."""

from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.options import ParallelOptions
from manyhands.parallel.plain import broadcast_plain
from manyhands.parallel.plan import Plan, plan_from_plain, plan_of


def shared_plan(options: ParallelOptions, world: World) -> Plan:
    """What `plan_of` gives on rank 0, on every process; a collective. Raises UserError as it does, on all alike."""
    content = broadcast_plain(_read(options, world.size) if world.is_main else None, world)
    if "error" in content:
        raise UserError(content["error"], content["where"], tuple(content["hints"]))
    return plan_from_plain(content["plan"], "plan")


def _read(options: ParallelOptions, size: int) -> dict[str, Any]:
    try:
        return {"plan": plan_of(options, size).as_plain()}
    except UserError as error:
        return {"error": error.message, "where": error.where, "hints": list(error.hints)}

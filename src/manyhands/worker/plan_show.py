"""Lists the ops of a plan file for display, and creates the task that verifies or times the plan."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.config.job import Job
from manyhands.config.load import announce, load_job
from manyhands.core.errors import UserError
from manyhands.data.order import equal_share_function
from manyhands.parallel.plan import Plan, read_plan
from manyhands.parallel.split.graph import Graph
from manyhands.parallel.split.strategy import parse_strategy, resolve_letters, write_strategy
from manyhands.planner.choose import DATA_PARALLEL
from manyhands.planner.collectives import GRADIENTS, STATISTICS, Collective, PlannedUpdate
from manyhands.planner.cost import largest_shard_shape, parameter_bytes
from manyhands.planner.find import graph_digest
from manyhands.worker import plan_search


@dataclass(frozen=True)
class PlanRow:
    """One op of a plan, as a row of the printed table."""

    name: str
    kind: str = ""
    strategy: str = ""  # as in plan.json
    piece: str = ""  # shape of the op's output on the last rank
    parameter_mb: float = 0.0  # of the op's parameters, on one process
    collectives: str = ""  # their count, kind and size


@dataclass(frozen=True)
class ShownPlan:
    """A plan file and its network, for display."""

    plan: Plan  # the plan as read
    rows: list[PlanRow]  # one per op
    job: Job  # the job that creates the network
    network: dict[str, Any]  # channels, size, classes and batch
    notes: list[str]  # sentences on parts that stay unsharded

    def as_plain(self) -> dict[str, Any]:
        return {**self.plan.as_plain(), "rows": [asdict(row) for row in self.rows], "notes": self.notes}

    def make_task(self, *, verify: bool) -> tuple[Job, dict[str, Any]]:
        """Returns (the job with the plan's number of processes, a task that runs the plan).

        The task compares the plan's results with one process (`verify`), or times the plan and data parallel.
        """
        content = self.plan.as_plain()
        plan = {key: content[key] for key in ("format", "mesh", "default", "ops")}  # layouts follow from these
        action, plans = (plan_search.VERIFY, {}) if verify else (plan_search.MEASURE, {DATA_PARALLEL: None})
        job = plan_search.with_processes(self.job, self.plan.mesh.size)
        return job, plan_search.plan_task(action, self.network, {**plans, "plan": plan})


def show_plan(path: Path, flags: Mapping[str, Any]) -> ShownPlan:
    """Reads a plan and rebuilds its network. `flags`: job options by dotted key, such as another model.name.

    Raises UserError if the file is not a plan, or the plan doesn't match the network.
    """
    plan = read_plan(path)
    job, network = _job_and_network(plan, flags, str(path))
    case = plan_search.make_plan_case(job, network, "cpu")
    graph = plan_search.trace_graph(case.make(), replace(case, cross_entropy=True))
    letters, notes = resolve_letters(plan, graph, str(path)), list(graph.notes)
    known = plan.about.get("graph", {})
    if isinstance(known, dict) and known.get("sha") not in {None, graph_digest(graph)}:
        notes.append("the network changed after the plan was made; the plan's strategies still apply")
    batch = network["batch"]
    share = equal_share_function(batch, case.norm_group)
    sent: dict[str, list[Collective]] = {}
    for one in PlannedUpdate(graph, letters, plan.mesh, batch, share, plan.mesh.size - 1).collectives():
        sent.setdefault(one.op or one.when, []).append(one)
    return ShownPlan(plan, _plan_rows(plan, graph, letters, batch, sent), job, network, notes)


def _job_and_network(plan: Plan, flags: Mapping[str, Any], where: str) -> tuple[Job, dict[str, Any]]:
    """Returns the job and the network description, from `flags` if they name data or a model, else from the plan."""
    given = {key: value for key, value in flags.items() if value is not None}
    if given.get("data.name") or given.get("model.name"):
        job = load_job(given).job
        return job, plan_search.network_description(job)
    about, graph = plan.about.get(plan_search.NETWORK), plan.about.get("graph")
    try:
        if not isinstance(about, dict) or not isinstance(graph, dict):
            raise TypeError("missing")
        network = {key: int(about[key]) for key in ("channels", "size", "classes")} | {"batch": int(graph["samples"])}
        model = {f"model.{key}": value for key, value in dict(about["model"]).items()}
    except (KeyError, TypeError, ValueError) as error:
        hints = ("name data and network: manyhands plan plan.json cifar10 resnet50", "or create a new plan")
        raise UserError('the plan has no valid field "network"', where, hints) from error
    if min(network.values()) < 1:
        raise UserError("a size in the plan is below 1", f"{where}, network", ("create a new plan",))
    job = load_job({**model, "train.batch": network["batch"], **given}).job
    # The digest of the graph detects changes of the code.
    announce([job.model.name], Path(where), None, "manyhands plan PLAN DATA {}", compared=False)
    return job, network


def _plan_rows(
    plan: Plan, graph: Graph, letters: Mapping[str, Any], batch: int, sent: dict[str, list[Collective]]
) -> list[PlanRow]:
    mesh, rows = plan.mesh, list[PlanRow]()
    usual = parse_strategy(plan.default_strategy, mesh, "default")
    for op in graph.ops.values():
        held = parameter_bytes(op, letters[op.name], mesh)
        special = letters[op.name] != tuple(usual.get(axis, "n") for axis in range(len(mesh.axes)))
        if held or special or op.name in sent:
            shape = " ".join(str(largest_shard_shape(op, letters[op.name], mesh, batch)).split())
            words = _label(sent.get(op.name, []))
            rows.append(PlanRow(op.name, op.kind, write_strategy(letters[op.name], mesh), shape, held / 1e6, words))
    return [*rows, *(PlanRow(when, collectives=_label(sent[when])) for when in (GRADIENTS, STATISTICS) if when in sent)]


def _label(collectives: list[Collective]) -> str:
    """Formats number and total size of each kind of collectives, such as "2 all_reduce 0.4 MB"."""
    sizes: dict[str, list[int]] = {}
    for one in collectives:
        sizes.setdefault(one.kind, []).append(one.values * one.item_bytes)
    return ", ".join(f"{len(each)} {kind} {sum(each) / 1e6:.3g} MB" for kind, each in sizes.items())

"""Shows plan files op by op, and creates the tasks that verify or time them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhands.config.job import Job
from manyhands.config.load import load_job
from manyhands.config.named_code import announce
from manyhands.core.errors import UserError
from manyhands.parallel.plan import Plan, read_plan
from manyhands.parallel.split.graph import Graph
from manyhands.parallel.split.strategy import parse_strategy, resolve, write_strategy
from manyhands.planner.choose import DATA_PARALLEL
from manyhands.planner.collectives import Collective, PlannedUpdate, collectives, shares
from manyhands.planner.cost import parameter_bytes, piece_shape
from manyhands.planner.find import digest
from manyhands.train.precision import make_network
from manyhands.worker.plan_search import NETWORK, timing, with_processes
from manyhands.worker.plan_trials import VERIFY, graph_of, network_of, norm_group, picture


@dataclass(frozen=True)
class PlanRow:
    """A row of the table: one op of a plan."""

    name: str  # its path
    kind: str  # of op
    strategy: str  # as plan.json says it
    piece: str  # the shape of what the last process gives
    parameter_mb: float  # of its parameters, on one process
    collectives: str  # in a few words


@dataclass(frozen=True)
class Shown:
    """A plan file with its network."""

    plan: Plan  # as read
    rows: tuple[PlanRow, ...]  # of its ops
    job: Job  # that makes the network
    network: dict[str, Any]  # channels, size, classes and batch
    notes: tuple[str, ...]  # sentences on parts that stay whole

    def as_plain(self) -> dict[str, Any]:
        """The plan and its ops as JSON data."""
        return {**self.plan.as_plain(), "rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}

    def verification(self) -> tuple[Job, dict[str, Any]]:
        """Returns the job on the plan's processes, and the task to verify the plan against one process."""
        return self._job_on_all(), {"task": "plan", "action": VERIFY, "network": self.network, "plans": self._plans()}

    def comparison(self) -> tuple[Job, dict[str, Any]]:
        """Returns the job, and the task to time the plan and data parallel in turns."""
        return self._job_on_all(), timing(self.network, {DATA_PARALLEL: None, **self._plans()})

    def _job_on_all(self) -> Job:
        return with_processes(self.job, self.plan.mesh.size)

    def _plans(self) -> dict[str, Any]:
        """Only what says who computes what; layouts follow from it."""
        content = self.plan.as_plain()
        return {"plan": {key: content[key] for key in ("format", "mesh", "default", "ops")}}


def show_plan(path: Path, flags: Mapping[str, Any]) -> Shown:
    """Reads a plan and its network.

    Args:
        path: the path of plan.json.
        flags: job values by dotted key; they may name other data or another network.

    Raises:
        UserError: the file is not a plan, or the plan doesn't fit the network.
    """
    plan = read_plan(path)
    job, network = _remade(plan, flags, str(path))
    model = make_network(job, network, "cpu")
    graph = graph_of(model, picture(job, network, "cpu"))
    letters = resolve(plan, graph, str(path))
    notes = list(graph.notes)
    known = plan.about.get("graph", {})
    if isinstance(known, dict) and known.get("sha") not in {None, digest(graph)}:
        notes.append("the network changed after the plan was made; the plan's strategies still apply")
    return Shown(plan, _rows(plan, graph, letters, job, network), job, network, tuple(notes))


def _remade(plan: Plan, flags: Mapping[str, Any], where: str) -> tuple[Job, dict[str, Any]]:
    """The job and the network's figures that a plan names, or those that flags name."""
    given = {key: value for key, value in flags.items() if value is not None}
    if given.get("data.name") or given.get("model.name"):
        job = load_job(given).job
        return job, network_of(job)
    about, graph = plan.about.get(NETWORK), plan.about.get("graph")
    try:
        if not isinstance(about, dict) or not isinstance(graph, dict):
            raise TypeError("missing")
        network = {key: int(about[key]) for key in ("channels", "size", "classes")} | {"batch": int(graph["samples"])}
        model = {f"model.{key}": value for key, value in dict(about["model"]).items()}
    except (KeyError, TypeError, ValueError) as error:
        hints = ("name data and network: manyhands plan plan.json cifar10 resnet50", "or create a new plan")
        raise UserError('the plan has no valid field "network"', where, hints) from error
    if min(network.values()) < 1:
        raise UserError("the plan's network has a value below 1", f"{where}, network", ("create a new plan",))
    job = load_job({**model, "train.batch": network["batch"], **given}).job
    # The digest of the graph detects changes.
    announce([job.model.name], Path(where), None, "manyhands plan PLAN DATA {}", compared=False)
    return job, network


def _rows(
    plan: Plan, graph: Graph, letters: Mapping[str, Any], job: Job, network: dict[str, Any]
) -> tuple[PlanRow, ...]:
    batch, mesh = network["batch"], plan.mesh
    share = shares(batch, norm_group(job, batch))
    sent: dict[str, list[Collective]] = {}
    for one in collectives(PlannedUpdate(graph, letters, mesh, batch, share, mesh.size - 1)):
        sent.setdefault(one.op or one.when, []).append(one)
    usual = parse_strategy(plan.fallback, mesh, "default")
    rows: list[PlanRow] = []
    for op in graph.ops.values():
        held = parameter_bytes(op, letters[op.name], mesh)
        special = letters[op.name] != tuple(usual.get(axis, "n") for axis in range(len(mesh.axes)))
        if held or special or op.name in sent:
            shape = " ".join(str(piece_shape(op, letters[op.name], mesh, batch)).split())
            words = _words(sent.get(op.name, []))
            rows.append(PlanRow(op.name, op.kind, write_strategy(letters[op.name], mesh), shape, held / 1e6, words))
    rows += [PlanRow(when, "", "", "", 0.0, _words(sent[when])) for when in ("gradients", "statistics") if when in sent]
    return tuple(rows)


def _words(sent: list[Collective]) -> str:
    """Collectives in a few words: "2 all_reduce 0.4 MB"."""
    kinds = dict.fromkeys(one.kind for one in sent)
    return ", ".join(
        f"{len(alike)} {kind} {sum(one.values * one.item_bytes for one in alike) / 1e6:.3g} MB"
        for kind in kinds
        for alike in [[one for one in sent if one.kind == kind]]
    )

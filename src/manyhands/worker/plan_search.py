"""Searches for plans for a job or a network, times them in processes of the launcher, and writes them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.config.load import load_on
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.plan_record import write_plan_record
from manyhands.core.quantities import parse_memory
from manyhands.parallel.plan import Plan, parse_pins, read_plan
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.split.graph import Graph
from manyhands.parallel.split.tracing import describe_network
from manyhands.planner.choose import DATA_PARALLEL, pick_measured
from manyhands.planner.cost import Prediction
from manyhands.planner.explain import Layer, draw_plan
from manyhands.planner.find import LinksOf, PlanCandidate, SearchRequest, SearchResult, find
from manyhands.planner.links import links_of
from manyhands.planner.timing import OpTimes, Timing
from manyhands.sync.choose import EXACT, check_method
from manyhands.sync.link_speeds import WITHIN_A_MACHINE, LinkSpeed, fitted_link, named_link
from manyhands.train.optimize import slots_of
from manyhands.worker.plan_advice import Advice, advised, plan_sync, sync_row, sync_seconds
from manyhands.worker.plan_case import Costs, case_to_plan
from manyhands.worker.plan_trials import LINKS, MEASURE, norm_group

# Has processes of a job do a task, and gives what the first of them returned: starting them is the head's affair.
RunTask = Callable[[Job, dict[str, Any]], dict[str, Any]]

# More processes than this on one machine say more of the machine than of a plan.
MOST_TIMED = 8
ROUNDS = 8
TIMES_BUDGET_S = 30.0
NETWORK = "network"


@dataclass(frozen=True)
class PlanRequest:
    """The user's request for a plan, as text."""

    world_size: int  # processes
    mesh: str = ""  # such as dp=2,tp=2; empty for all
    pins: Mapping[str, str] = field(default_factory=dict[str, str])  # strategies by op
    memory: str = ""  # such as 14GiB; empty for no limit
    link: str = ""  # such as 1gbit, between any two processes; empty for one machine's own
    fill: str = "search"  # "search" or "data", for ops without a pin
    measure: bool = True  # time ops and the best plans on this machine
    device_model: str = ""  # the processes' devices, where they aren't this machine's; nothing is measured then

    def as_search(self, job: Job, batch: int, device: str, group: int = 0) -> SearchRequest:
        """Returns the parsed request; `group`: the size of BatchNorm groups. Raises UserError: it is invalid."""
        mesh = parse_mesh(self.mesh, "--mesh") if self.mesh else None
        memory = parse_memory(self.memory) if self.memory else None
        more = {"accelerator": not device.startswith("cpu"), "fill": self.fill}
        return SearchRequest(self.world_size, batch, mesh, dict(self.pins), memory, group, slots_of(job.train), **more)

    def links(self, within: LinkSpeed | None = None, between: LinkSpeed | None = None) -> LinksOf:
        """Returns the links of each mesh: between machines if `link` is given, else within one machine.

        Args:
            within: the measured link within a machine, if any.
            between: the link between machines of one process each; by default `link`.

        Raises:
            UserError: the link speed is invalid.
        """
        far = between or (named_link(self.link) if self.link else None)
        if far is not None:
            return lambda mesh: links_of(mesh, per_machine=1, between=far)
        return lambda mesh: links_of(mesh, within=within or WITHIN_A_MACHINE)


def search(
    graph: Graph, request: SearchRequest, times: OpTimes, links: LinksOf, share: Timing | None = None
) -> SearchResult:
    """Returns the result of `find` and saves the measured times of ops."""
    try:
        return find(graph, request, times, links, share)
    finally:
        times.save()


def find_plan(  # noqa: PLR0913 - each is one wish
    model: nn.Module,
    sample: Tensor,
    *,
    job: Job | str | Path | None = None,
    world_size: int = 0,
    memory: str = "",
    pin: Mapping[str, str] | None = None,
    mesh: str | Mesh | None = None,
    link: str = "",
    batch: int = 0,
    measure: bool = False,
) -> Plan:
    """Searches for the fastest plan for a network. Returns the data-parallel plan unless another one is faster.

    Args:
        model: the network. In-place ops are replaced by out-of-place ops.
        sample: a batch [N, C, H, W] or one picture [C, H, W] with any values.
        job: a Job or the path of a job.toml; supplies the optimizer and the defaults of the arguments below.
        world_size: the number of processes; 0: the number in the job, or 8.
        memory: the memory limit of each process, such as "14GiB"; empty: no limit.
        pin: fixed strategies, by op or glob: {"fc": "n@dp o@tp"}.
        mesh: the only mesh to search, such as "dp=2,tp=4"; None: all meshes.
        link: the bandwidth between processes, such as "1gbit"; empty: all processes are on one machine.
        batch: the global batch size; 0: the size of `sample`, or 32 per process if `sample` is one picture.
        measure: benchmark the ops on this device instead of estimating their times; results are cached.

    Returns:
        The plan. `plan.about["reason"]` explains the choice.

    Raises:
        UserError: a pin doesn't apply, or no plan fits into memory.
    """
    given = load_on(job, {}).job if job is not None else Job()
    options, world_size = given.parallel, world_size or given.cluster.processes or 8
    batched = sample.ndim == 4
    samples = batch or (len(sample) if batched and len(sample) > 1 else 32 * world_size)
    samples = given.train.batch if job is not None and not batch else samples
    pins = dict(pin) if pin is not None else parse_pins(options.pin)
    memory, link = memory or options.memory, link or options.link
    request = PlanRequest(world_size, str(mesh or options.mesh), pins, memory, link, "search", measure)
    device = next((str(one.device) for one in model.parameters()), "cpu")
    training = model.training
    _, restore = group_batch_norms(model)
    try:
        graph = describe_network(model.train(), sample[0] if batched else sample)
        times = OpTimes(device, TIMES_BUDGET_S if measure else 0.0)
        return search(graph, request.as_search(given, samples, device), times, request.links()).plan
    finally:
        restore()
        model.train(training)


@dataclass(frozen=True)
class Planned:
    """The result of a search for a job."""

    found: SearchResult  # plans and the pick
    network: dict[str, Any]  # channels, size, classes, batch and samples, as plain data
    job: Job  # that it is for
    notes: tuple[str, ...] = ()  # sentences on what was left out
    # what ways of agreeing cost in the mode data, as JSON data; see `plan_advice.plan_sync`
    sync: dict[str, Any] = field(default_factory=dict[str, Any])
    fewer: tuple[PlanCandidate, ...] = ()  # data parallel on fewer processes
    advice: Advice = field(default_factory=Advice)  # what is recommended, and why

    @property
    def candidates(self) -> list[PlanCandidate]:
        """All candidates, for the table."""
        data = self.found.candidates[0]

        def priced(row: dict[str, Any]) -> Prediction:
            seconds = row["step_s"] - data.prediction.compute_seconds
            moved = {"communication_seconds": 0.0, "gradient_seconds": seconds, "sent_bytes": row["sent_mb"] * 1e6}
            return replace(data.prediction, **moved)

        methods = [
            replace(data, name=sync_row(row), prediction=priced(row), measured_seconds=None, note=row["refused"])
            for row in self.sync["methods"]
            if row["method"] != EXACT
        ]
        return [*self.found.candidates, *methods, *self.fewer]

    def plan_of(self, option: PlanCandidate) -> Plan:
        """Returns a plan as in its file, with the fields to create the network again."""
        plan = self.found.plan_of(option)
        model = self.job.model.model_dump(mode="json", exclude_defaults=True)
        own = {"model": {"name": self.job.model.name, **model}}
        data = {key: self.network[key] for key in ("channels", "size", "classes")}
        said = {
            "reason": self.advice.reason,
            "recommended": self.advice.as_plain(),
            "candidates": [one.as_plain() for one in self.candidates],
        }
        return replace(plan, about={**plan.about, **said, NETWORK: {**own, **data}, "sync": self.sync})

    def as_plain(self, files: tuple[Path, Path]) -> dict[str, Any]:
        """Returns the result as JSON data, with the names of its files."""
        return {"plan": str(files[0]), "picture": str(files[1]), **self.plan_of(self.found.chosen).as_plain()}


def search_plan(
    job: Job, requested: Mapping[str, Any], out: Path, run_task: RunTask, *, force: bool
) -> tuple[Planned, tuple[Path, Path]]:
    """Searches for the plan of a job and writes it, for `run.tasks`."""
    request = PlanRequest(**{**requested, "pins": parse_pins(requested["pins"])})
    planned = plan_job(job, request, run_task, lambda: check_free(out, force=force))
    return planned, write_plan(planned, out, force=force)


def plan_job(job: Job, request: PlanRequest, run_task: RunTask, ready: Callable[[], None] = lambda: None) -> Planned:
    """Searches for the plan of a job, and times the best ones on this machine if requested and possible.

    Args:
        job: the job.
        request: the request for the plan.
        run_task: runs tasks in processes that measure their link and time the best plans.
        ready: called after the request is parsed and before long work; it may raise an error.

    Raises:
        ManyhandsError: a request can't be satisfied, or timing failed.
    """
    check_method(job.sync.method)
    case = case_to_plan(job, request.world_size, request.link, request.device_model)
    modelled, between, network = case.modelled, case.between, case.network
    if modelled:
        request = replace(request, measure=False, memory=request.memory or str(modelled.memory_bytes))
    batch = network["batch"]
    wanted = request.as_search(job, batch, case.device, norm_group(job, batch))
    ready()
    case = case.resolved(request.world_size, measure=request.measure)
    model, graph = case.described()
    together = request.measure and between is None and 1 < request.world_size <= MOST_TIMED
    on_all = with_processes(case.job, request.world_size)
    costs = Costs(on_all, network, case.device, between, measured=request.measure)
    beside = replace(WITHIN_A_MACHINE, bytes_per_s=modelled.within) if modelled else WITHIN_A_MACHINE
    within = costs.worked(_measured_link(on_all, run_task) if together else beside)
    links = request.links(within, costs.worked(between) if between else None)
    times = OpTimes(case.here, TIMES_BUDGET_S if request.measure else 0.0, rates=case.rates)
    share = costs.share(request.world_size)
    found = search(graph, wanted, times, links, share)
    notes = (*case.said, *times.notes, *times.doubts(), *found.notes, *graph.notes)
    planned = Planned(found, network, on_all, notes)
    planned = replace(planned, fewer=costs.fewer(found))
    planned = _timed(planned, run_task) if together else planned
    link = costs.worked(between) if between else within
    data, pass_s = planned.found.options[0], costs.pass_s(model)
    sync = plan_sync(on_all, network, data, links, model=model, link=link, pass_s=pass_s)
    planned = replace(planned, sync=sync)
    if not planned.found.pick.measured_seconds and (seconds := sync_seconds(planned.sync)):
        planned = replace(planned, found=planned.found.repicked(seconds))
    return replace(planned, advice=advised(planned.found, planned.sync, planned.fewer, apart=between is not None))


def with_processes(job: Job, count: int) -> Job:
    """Returns the job with `processes` processes on this machine."""
    own = {"processes": count, "hosts": (), "hostfile": "", "file": "", "rank_table": "", "init": ""}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=own)})


def _measured_link(job: Job, run_task: RunTask) -> LinkSpeed:
    points = run_task(job, {"task": "plan", "action": LINKS})["points"]
    return fitted_link("all_reduce", job.cluster.processes, tuple((size, taken) for size, taken in points))


def _timed(planned: Planned, run_task: RunTask) -> Planned:
    """With the best plans timed in turns."""
    finalists = planned.found.finalists()
    if len(finalists) < 2:
        return planned
    plans = planned.found.plans_of(finalists)
    pick = pick_measured(run_task(planned.job, timing(planned.network, plans))["seconds"])
    if DATA_PARALLEL not in plans:
        pick = replace(pick, reason=planned.found.pick.reason)
    return replace(planned, found=replace(planned.found, pick=pick))


def timing(network: dict[str, Any], plans: dict[str, Any]) -> dict[str, Any]:
    """Returns the task to time updates under each plan in turns, by name; None stands for data parallel."""
    return {"task": "plan", "action": MEASURE, "network": network, "plans": plans, "rounds": ROUNDS}


def write_plan(planned: Planned, path: Path, *, force: bool = False) -> tuple[Path, Path]:
    """Writes the chosen plan and its picture.

    Returns:
        Both files.

    Raises:
        UserError: a file exists; with `force`, a file exists that is not a plan.
    """
    drawing = path.with_suffix(".png")
    check_free(path, force=force)
    chosen = planned.found.chosen
    plan = planned.plan_of(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_plan_record(path, plan.record())
    draw(plan.mesh, chosen.letters, planned.found.graph.ops, drawing)
    return path, drawing


def check_free(path: Path, *, force: bool) -> None:
    """Raises UserError if writing a plan would overwrite a file."""
    if path.suffix.lower() != ".json":
        raise UserError(f"the plan file must end in .json: {path.name}", "--out", ("choose --out plan.json",))
    there = [one for one in (path, path.with_suffix(".png")) if one.exists()]
    if there and not force:
        hints = ("overwrite the plan: --force", "or choose another file: --out other.json")
        raise UserError(f"{there[0]} already exists", str(there[0]), hints)
    if path.exists():
        # Even by force only a plan gives way to a plan.
        read_plan(path)


def draw(mesh: Mesh, letters: Mapping[str, tuple[str, ...]], ops: Iterable[str], file: Path) -> None:
    """Draws the sharding of a plan."""
    draw_plan([Layer(name, letters[name]) for name in ops if name in letters], mesh, file)

"""Plan searches: `find_plan()` for a network, `manyhands plan` for a job, and the search at the start of a run."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.config.load import load_job_argument
from manyhands.core.choices import module_names, unknown_choice_error
from manyhands.core.devices import require_device, resolve_device_type
from manyhands.core.errors import UserError
from manyhands.core.files import check_output_files
from manyhands.core.machine import cores
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.plan_record import write_plan_record
from manyhands.core.quantities import parse_memory
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.world import World
from manyhands.data.order import large_batch_note
from manyhands.parallel.apply import follows_plan
from manyhands.parallel.group.plain import broadcast_plain, broadcast_result
from manyhands.parallel.options import MODE_OF_SEARCHES, MODES, USUAL_MODE
from manyhands.parallel.plan import Plan, broadcast_plan, parse_pins, plan_from_options, plan_from_plain, read_plan
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.split.graph import Graph
from manyhands.parallel.split.tracing import describe_network
from manyhands.planner.choose import DATA_PARALLEL, pick_measured
from manyhands.planner.collectives import STATISTICS
from manyhands.planner.device_models import DeviceModel, load_device_model
from manyhands.planner.explain import draw_plan
from manyhands.planner.find import LinksOf, PlanCandidate, SearchRequest, SearchResult, fewer_counts, search_plans
from manyhands.planner.links import all_reduce_cpu_cost, mesh_links
from manyhands.planner.timing import OpTimes, Timing
from manyhands.planner.trial import PlanCase, time_plans, time_share, verify_plan
from manyhands.sync.choose import EXACT, check_method, choose_method
from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import WITHIN_A_MACHINE, LinkSpeed, link_through_ssh, parse_link
from manyhands.sync.measure import measure_link, pass_seconds
from manyhands.train.choose_sync import ruled_out
from manyhands.train.data_setup import open_splits, pixels_for
from manyhands.train.loss import make_loss_fn
from manyhands.train.objects import Objects
from manyhands.train.optimize import count_updates, make_optimizer, state_values_per_parameter
from manyhands.train.parts import prepare_on_device
from manyhands.train.precision import fp32_precision, make_network, network_sizes, resolve_precision
from manyhands.worker.plan_advice import Advice, choice_as_plain, recommend, sync_row, sync_seconds

RunTask = Callable[[Job, dict[str, Any]], dict[str, Any]]  # runs a task in a job's processes; returns rank 0's result
MOST_TIMED = 8  # timings of more processes on one machine depend more on the machine than on the plan
TIMES_BUDGET_S = 30.0
NETWORK = "network"
_SHARE_S, _FEWER_S = 10.0, 4.0  # seconds for timing one process's share, with the plan's number of processes, and fewer
LINKS, MEASURE, VERIFY = "links", "measure", "verify"  # actions of the task "plan"
_LINK_BUDGET_S = 5.0


def network_description(job: Job, world: World | None = None, objects: Objects | None = None) -> dict[str, Any]:
    """Returns a dict: channels, size, classes, batch, samples (in an epoch). Raises UserError without data."""
    objects = objects or Objects()
    splits = open_splits(job, world or World(), objects)
    sizes, samples = network_sizes(job, splits, pixels_for(job, splits, objects)), len(splits.train)
    return {**sizes, "batch": min(job.train.batch, samples), "samples": samples}


def trace_graph(model: nn.Module, case: PlanCase) -> Graph:
    """Converts BatchNorm layers to grouped ones, traces the model in training mode, and returns the graph of ops."""
    group_batch_norms(model)
    graph = describe_network(model, case.picture)
    if not case.cross_entropy:
        graph.refuse_sharded_classes()
    return graph


def samples_per_norm_group(job: Job, batch: int) -> int:
    """Returns the number of samples in a BatchNorm group, or 0 if each process normalizes its own samples."""
    group = job.train.norm_group
    return batch if group == "global" else group if isinstance(group, int) else 0


def make_plan_case(job: Job, network: dict[str, Any], device: str, objects: Objects | None = None) -> PlanCase:
    """Creates the `PlanCase` that times or verifies a job's plans. `network`: from `network_description`."""
    own, batch, side = objects or Objects(), network["batch"], network["size"]
    options = job.train.model_copy(update={"lr": 1e-6})
    kind = torch.float64 if job.train.precision == "fp64" else torch.float32
    return PlanCase(
        make=lambda: make_network(job, network, device),
        picture=torch.zeros(network["channels"], side, side, dtype=kind, device=device),
        classes=network["classes"],
        batch=batch,
        loss=lambda: make_loss_fn(job.train, own.loss),
        smoothing=job.train.label_smoothing,
        cross_entropy=own.loss is None and job.train.loss == "cross-entropy",
        norm_group=samples_per_norm_group(job, batch),
        precision=job.train.precision,
        micro_batch=job.train.micro_batch,
        shared_memory=job.parallel.shared_memory,
        optimizer=lambda model: make_optimizer(model, options, sharded=False, custom=own.optimizer),
    )


def parse_request(job: Job, batch: int, device: str, *, mesh: str = "", memory: str = "", **more: Any) -> SearchRequest:
    """Creates the request for a plan search. Raises UserError if `mesh` or `memory` is invalid.

    `mesh` (such as dp=2,tp=2) and `memory` per process (such as 14GiB) may be empty. `more`: fields of SearchRequest.
    """
    return SearchRequest(
        batch=batch,
        mesh=parse_mesh(mesh, "--mesh") if mesh else None,
        memory_limit_bytes=parse_memory(memory) if memory else None,
        norm_group=samples_per_norm_group(job, batch),
        slots=state_values_per_parameter(job.train),
        accelerator=not device.startswith("cpu"),
        **more,
    )


def make_links(within: LinkSpeed, between: LinkSpeed | None) -> LinksOf:
    """Returns a function that takes a mesh and returns its links. With `between`, each process has its own machine."""
    if between:
        return lambda mesh: mesh_links(mesh, per_machine=1, between=between)
    return lambda mesh: mesh_links(mesh, within=within)


@dataclass(frozen=True)
class JobCase:
    """A job to plan. The properties and methods measure it on this machine."""

    job: Job  # the job; `resolved` sets the number of processes, the precision and the layout
    network: dict[str, Any]  # see `network_description`
    device: str  # torch's device, or the name of a device model
    between: LinkSpeed | None  # the link between machines, if each process has its own machine
    modelled: DeviceModel | None  # the model of a device that isn't on this machine
    measured: bool  # False: all times are estimated
    rates: tuple[float, float] | None = None  # operations and bytes per second of a device model
    notes: tuple[str, ...] = ()  # messages about the choices

    @property
    def own_device(self) -> str:
        """The device of this machine that the network is created on."""
        return "cpu" if self.modelled else self.device

    def resolved(self, processes: int) -> "JobCase":
        """Returns a copy with precision and memory format resolved, by measurement if requested and possible."""
        smaller = large_batch_note(self.job.train.batch, self.network["samples"])
        if self.modelled:
            found = fp32_precision(self.job)
            precision = found.job.train.precision
            rates, model = self.modelled.rates(precision), self.modelled.describe_source(precision)
        else:
            world, mode = World(device=resolve_device_type(self.job.cluster.device, processes)), self.job.parallel.mode
            found = resolve_precision(self.job, NOWHERE, world, mode, Objects(), measure=self.measured)
            rates, model = None, ""
        said = (*filter(None, (*found.reasons, model, smaller)),)
        return replace(self, job=with_processes(found.job, processes), rates=rates, notes=said)

    @functools.cached_property
    def graph(self) -> Graph:
        return trace_graph(self._model, self._case)

    @functools.cached_property
    def _model(self) -> nn.Module:
        return self._case.make()

    @functools.cached_property
    def _case(self) -> PlanCase:
        return make_plan_case(self.job, self.network, self.own_device)

    def timing(self, processes: int, budget_s: float = _SHARE_S) -> Timing | None:
        """Times the share of one of `processes` processes in an update. Returns None if nothing may be measured."""
        if not self.measured:
            return None
        threads = self.job.cluster.threads or (0 if self.between else max(1, torch.get_num_threads() // processes))
        return time_share(self._case, processes, threads, budget_s)

    def predict_smaller_runs(self, found: SearchResult) -> tuple[PlanCandidate, ...]:
        """Predicts data parallelism on fewer processes. Returns () if ops are pinned or it can't be predicted."""
        # Estimates ignore that the processes of one machine share its cores.
        apart = self.between is not None or self.device != "cpu"
        if found.request.pins or not (apart or self.measured):
            return ()
        counts = fewer_counts(found.request.world_size)
        return found.predict_fewer({count: self.timing(count, _FEWER_S) for count in counts})

    def with_cpu_time(self, link: LinkSpeed) -> LinkSpeed:
        """Adds the measured CPU time of messages to a link. Returns it unchanged for accelerators or unmeasured."""
        if self.device != "cpu" or not self.measured:
            return link
        spent = all_reduce_cpu_cost(cores() / (1 if self.between else self.job.cluster.processes))
        return replace(link, work_s_per_byte=spent.work_s_per_byte, work_s_per_message=spent.work_s_per_message)

    @functools.cached_property
    def _vector_sum_s(self) -> float:
        """The seconds to add two vectors as long as all trained parameters, or 0 if nothing may be measured."""
        count = sum(one.numel() for one in self._model.parameters() if one.requires_grad)
        return pass_seconds(count, self.device) if self.measured else 0.0

    def predict_sync_costs(self, data_parallel: PlanCandidate, links: LinksOf, link: LinkSpeed) -> dict[str, Any]:
        """Predicts the cost of each sync method, as JSON data. `data_parallel`: the prediction for allreduce."""
        trained = [one for one in self._model.parameters() if one.requires_grad]
        own, predicted = links(data_parallel.mesh), data_parallel.prediction
        moved_s = sum(one.seconds(own) for one in predicted.collectives if one.when == STATISTICS)
        case = LinkCase(
            shapes=tuple(tuple(one.shape) for one in trained),
            item_bytes=max((one.element_size() for one in trained), default=4),
            buffers=sum(one.numel() for one in self._model.buffers()),
            machines=data_parallel.mesh.size,
            step_s=predicted.compute_seconds,
            backward_s=predicted.hiding_seconds,
            link=link,
            steps=count_updates(self.job.train, self.network["samples"]),
            pass_s=self._vector_sum_s,
            layers_s=max(0.0, predicted.communication_seconds - moved_s),
        )
        job = with_processes(self.job, data_parallel.mesh.size)
        return choice_as_plain(choose_method(case, job.sync, without=ruled_out(job, USUAL_MODE)), case, job.sync.method)


def case_to_plan(job: Job, requested: Mapping[str, Any]) -> JobCase:
    """Reads a job's data and link speed. Raises UserError if the data, link speed or device is missing or invalid.

    `requested` has four keys: world_size, measure (True to time ops and plans on this machine), link (between any two
    processes, such as 1gbit; "" if on one machine), device_model (of a device that isn't here; "" for this device).
    """
    check_method(job.sync.method)
    modelled = load_device_model(requested["device_model"]) if requested["device_model"] else None
    device = modelled.name if modelled else resolve_device_type(job.cluster.device, requested["world_size"])
    if not modelled:
        require_device(device, "for other devices, estimate with --device-model h100 (a100, 910b, rtx4090 …)")
    network = network_description(job)
    link, where = (requested["link"], "--link") if requested["link"] else (job.sync.link, "sync.link")
    between = parse_link(link, where) if link else None
    if between and job.cluster.through_ssh:
        between = link_through_ssh(between)
    return JobCase(job, network, device, between, modelled, requested["measure"] and not modelled)


def find_plan(  # noqa: PLR0913 - each is one request
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
        pin: how to shard some ops, by name or glob: {"fc": "n@dp o@tp"} shards the samples (n) of op fc over dp and
            its output features (o) over tp.
        mesh: search only this mesh, such as "dp=2,tp=4"; None: all meshes.
        link: the bandwidth between processes, such as "1gbit"; empty: all processes are on one machine.
        batch: the global batch size; 0: the size of `sample`, or 32 per process if `sample` is one picture.
        measure: benchmark the ops on this device instead of estimating their times; results are cached.

    Returns:
        The plan. `plan.about["reason"]` explains the choice.

    Raises:
        UserError: a pin doesn't apply, or no plan fits into memory.
    """
    given = load_job_argument(job, {}).job if job is not None else Job()
    options, world_size = given.parallel, world_size or given.cluster.processes or 8
    batched = sample.ndim == 4
    samples = batch or (len(sample) if batched and len(sample) > 1 else 32 * world_size)
    samples = given.train.batch if job is not None and not batch else samples
    pins = dict(pin) if pin is not None else parse_pins(options.pin)
    mesh, memory, link = str(mesh or options.mesh), memory or options.memory, link or options.link
    device = next((str(one.device) for one in model.parameters()), "cpu")
    request = parse_request(given, samples, device, mesh=mesh, memory=memory, world_size=world_size, pins=pins)
    request = replace(request, norm_group=0)
    training = model.training
    _, restore = group_batch_norms(model)
    try:
        graph = describe_network(model.train(), sample[0] if batched else sample)
        times = OpTimes(device, TIMES_BUDGET_S if measure else 0.0)
        links = make_links(WITHIN_A_MACHINE, parse_link(link) if link else None)
        return search_plans(graph, request, times, links).plan
    finally:
        restore()
        model.train(training)


@dataclass(frozen=True)
class PlannedJob:
    """The result of `search_plan`."""

    found: SearchResult
    case: JobCase
    notes: tuple[str, ...]  # sentences on ops that are not sharded or not timed
    sync: dict[str, Any]  # see `JobCase.predict_sync_costs`
    fewer: tuple[PlanCandidate, ...]  # data parallel on fewer processes
    advice: Advice  # the recommended plan, with the reason
    files: tuple[Path, Path]  # of the plan and of its picture

    @property
    def candidates(self) -> list[PlanCandidate]:
        data = self.found.candidates[0]

        def priced(row: dict[str, Any]) -> PlanCandidate:
            seconds = row["step_s"] - data.prediction.compute_seconds
            moved = {"communication_seconds": 0.0, "gradient_seconds": seconds, "sent_bytes": row["sent_mb"] * 1e6}
            own = {"name": sync_row(row), "note": row["refused"], "measured_seconds": None}
            return replace(data, prediction=replace(data.prediction, **moved), **own)

        methods = [priced(row) for row in self.sync["methods"] if row["method"] != EXACT]
        return [*self.found.candidates, *methods, *self.fewer]

    @property
    def plan(self) -> Plan:
        """The selected plan as in the plan file, with the fields from which the network is rebuilt."""
        plan = self.found.plan
        model = self.case.job.model
        own = {"model": {"name": model.name, **model.model_dump(mode="json", exclude_defaults=True)}}
        data = {key: self.case.network[key] for key in ("channels", "size", "classes")}
        said = {
            "reason": self.advice.reason,
            "recommended": {"plan": self.advice.name, "processes": self.advice.processes},
            "candidates": [one.as_plain() for one in self.candidates],
        }
        return replace(plan, about={**plan.about, **said, NETWORK: {**own, **data}, "sync": self.sync})

    def as_plain(self) -> dict[str, Any]:
        """Returns the plan as JSON data, with the paths of the plan file and the picture."""
        return {"plan": str(self.files[0]), "picture": str(self.files[1]), **self.plan.as_plain()}


def search_plan(job: Job, requested: Mapping[str, Any], out: Path, run_task: RunTask, *, force: bool) -> PlannedJob:
    """Finds a job's plan, times the best plans here if requested and possible, and writes the plan and a picture.

    `requested` has the keys for `case_to_plan`, and mesh, pins, memory, and fill (ops without a pin: "search" or
    "data"). Raises ManyhandsError if a request can't be satisfied, timing fails, or a file would be overwritten.
    """
    drawing = _check_output_paths(out, force=force)
    world_size, case = requested["world_size"], case_to_plan(job, requested)
    memory = requested["memory"] or (str(case.modelled.memory_bytes) if case.modelled else "")
    more: dict[str, Any] = {key: requested[key] for key in ("mesh", "world_size", "fill")}
    more |= {"memory": memory, "pins": parse_pins(requested["pins"])}
    wanted = parse_request(job, case.network["batch"], case.device, **more)
    case = case.resolved(world_size)
    apart, graph = case.between is not None, case.graph
    together = case.measured and not apart and 1 < world_size <= MOST_TIMED
    if case.between:
        link = case.between
    elif together:
        link = LinkSpeed(**run_task(case.job, {"task": "plan", "action": LINKS})["link"])
    else:
        link = replace(WITHIN_A_MACHINE, bytes_per_s=case.modelled.within) if case.modelled else WITHIN_A_MACHINE
    link = case.with_cpu_time(link)
    links = make_links(link, link if apart else None)
    times = OpTimes(case.own_device, TIMES_BUDGET_S if case.measured else 0.0, rates=case.rates)
    found = search_plans(graph, wanted, times, links, case.timing(world_size))
    notes = (*case.notes, *times.notes, *times.busy_warnings(), *found.notes, *graph.notes)
    fewer = case.predict_smaller_runs(found)
    plans = found.plans_as_plain(found.finalists())
    if together and len(plans) > 1:
        pick = pick_measured(run_task(case.job, plan_task(MEASURE, case.network, plans))["seconds"])
        found = replace(found, pick=pick if DATA_PARALLEL in plans else replace(pick, reason=found.pick.reason))
    sync = case.predict_sync_costs(found.options[0], links, link)
    if not found.pick.measured_seconds and (seconds := sync_seconds(sync)):
        found = found.reselect(seconds)
    planned = PlannedJob(found, case, notes, sync, fewer, recommend(found, sync, fewer, apart=apart), (out, drawing))
    plan, letters = planned.plan, found.chosen.letters
    _check_output_paths(out, force=force)  # another search may have ended meanwhile
    out.parent.mkdir(parents=True, exist_ok=True)
    write_plan_record(out, plan.record())
    draw_plan({name: letters[name] for name in graph.ops if name in letters}, plan.mesh, drawing)
    return planned


def with_processes(job: Job, count: int) -> Job:
    """Returns the job with `count` processes on this machine."""
    own = {"processes": count, "hosts": (), "hostfile": "", "file": "", "rank_table": "", "init": ""}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=own)})


def plan_task(action: str, network: dict[str, Any], plans: dict[str, Any]) -> dict[str, Any]:
    """Creates the task that verifies or times plans, by `action`. `plans`: by name, None for data parallel."""
    return {"task": "plan", "action": action, "network": network, "plans": plans}


def _check_output_paths(path: Path, *, force: bool) -> Path:
    """Returns the path of the plan's picture. Raises UserError if a file exists (unless `force`) or can't be a plan."""
    if path.suffix.lower() != ".json":
        raise UserError(f"the plan file must end in .json: {path.name}", "--out", ("choose --out plan.json",))
    drawing = path.with_suffix(".png")
    check_output_files(path, drawing, force=force)
    if path.exists():
        read_plan(path)
    return drawing


def select_run_plan(job: Job, world: World, folder: RunFolder, objects: Objects) -> tuple[Plan | None, dict[str, Any]]:
    """Selects the plan of a run, the same on all processes. A collective.

    A resumed run with the same number of processes and the same plan options keeps the plan. Returns the plan, None for
    data parallel, and fields for plan.json: the reason, and each candidate's times. Raises UserError on all processes
    if an option can't be satisfied.
    """
    options = job.parallel
    key = [list(options.pin), options.mesh, options.memory, options.link, options.plan, options.full_batch]
    previous = broadcast_plain(_previous_plan(folder, world.size, key) if world.is_main else None, world)
    if previous is not None:
        plan = plan_from_plain(previous, "plan.json")
        about = {name: plan.about[name] for name in ("reason", "candidates", "wish") if name in plan.about}
        mode, known = str(plan.about.get("mode", MODE_OF_SEARCHES)), module_names(MODES)
        if mode not in known:
            raise unknown_choice_error("parallel mode", mode, known, "plan.json")
        return replace(plan, layouts=None, about=about) if follows_plan(mode) else None, about
    if options.plan:
        return broadcast_plan(options, world), {}
    network = network_description(job, world, objects)
    case = make_plan_case(job, network, world.device, objects)
    if own := objects.model:
        case = replace(case, make=lambda: prepare_on_device(copy.deepcopy(own), job.train, world.device))
    link = measure_link(None, world.device, _LINK_BUDGET_S) if options.measure else WITHIN_A_MACHINE
    answer = broadcast_result(lambda: _search(job, world, case, link), world)
    plans = plans_from(answer["finalists"])
    if len(plans) > 1 and options.measure and answer["measurable"]:
        pick = pick_measured(time_plans(case, plans, world))
        answer |= {"chosen": pick.name, "reason": pick.reason}
        for row in answer["candidates"]:
            if row["name"] in pick.measured_seconds:
                row["measured_ms"] = round(pick.measured_seconds[row["name"]] * 1e3, 3)
    about = {"reason": answer["reason"], "candidates": answer["candidates"], "wish": key}
    if answer["untimed"]:
        about["untimed"] = answer["untimed"]
    plan = plans[answer["chosen"]]
    return plan and replace(plan, about={**plan.about, **about}), about


def _previous_plan(folder: RunFolder, world_size: int, key: list[Any]) -> dict[str, Any] | None:
    """Returns the plan in the run folder if it is for the same process count and plan options (`key`), else None."""
    if not folder.plan.is_file() or not folder.has_checkpoints():
        return None
    plan = read_plan(folder.plan)
    return plan.as_plain() if plan.mesh.size == world_size and plan.about.get("wish") == key else None


def _search(job: Job, world: World, case: PlanCase, link: LinkSpeed) -> dict[str, Any]:
    """Searches for the fastest plan, on rank 0 only. Returns the result as JSON data."""
    options = job.parallel
    pins = plan_from_options(options, world.size).ops if options.pin or options.full_batch else {}
    limits = {"mesh": options.mesh, "memory": options.memory}
    wanted = parse_request(job, case.batch, world.device, **limits, world_size=world.size, pins=pins)
    graph = trace_graph(case.make(), case)
    times = OpTimes(world.device, TIMES_BUDGET_S if options.measure else 0.0)
    found = search_plans(graph, wanted, times, make_links(link, parse_link(options.link) if options.link else None))
    finalists, limit = found.finalists(), wanted.memory_limit_bytes
    return {
        "finalists": found.plans_as_plain(finalists),
        "chosen": found.pick.name,
        "reason": found.pick.reason,
        "candidates": [
            {"name": one.name, "mesh": str(one.mesh), "fits": one.fits, **one.prediction.as_plain()}
            for one in found.options
        ],
        "untimed": list(found.notes),
        # All finalists are in memory at the same time while they are timed.
        "measurable": limit is None or sum(one.prediction.memory_bytes for one in finalists) <= limit,
    }


def run_plan_task(job: Job, world: World, argument: dict[str, Any]) -> dict[str, Any]:
    """Measures links, or times or verifies plans, by `argument["action"]`. A collective, with equal results."""
    if argument["action"] == LINKS:
        return {"link": asdict(measure_link(None, world.device, _LINK_BUDGET_S))}
    case = make_plan_case(job, argument["network"], world.device)
    plans = plans_from(argument["plans"])
    if argument["action"] == VERIFY:
        proofs = {name: verify_plan(case, plan, world).as_plain() for name, plan in plans.items() if plan is not None}
        return {"proofs": proofs}
    return {"seconds": time_plans(case, plans, world)}


def plans_from(plans: dict[str, Any]) -> dict[str, Plan | None]:
    """Parses the result of `SearchResult.plans_as_plain` into plans by name, with None for data parallel."""
    return {name: plan_from_plain(plan, f"plan of {name}") if plan else None for name, plan in plans.items()}

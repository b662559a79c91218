"""The mode auto, inside the processes that are about to train: they search, time the best plans in turns, and agree."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.core.choices import module_names, unknown_choice
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.quantities import parse_memory
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import follows_plan
from manyhands.parallel.graph import Graph
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.options import MODE_OF_SEARCHES, MODES
from manyhands.parallel.plain import broadcast_plain
from manyhands.parallel.plan import Plan, plan_from_plain, plan_of, read_plan, shared_plan
from manyhands.parallel.tracing import describe_network
from manyhands.planner.choose import DATA_PARALLEL, pick_measured
from manyhands.planner.find import SearchResult, find
from manyhands.planner.mesh_links import links_of
from manyhands.planner.op_times import OpTimes
from manyhands.planner.trial import PlanCase, measure
from manyhands.sync.link_speeds import fitted_link
from manyhands.train.data_setup import class_names, open_splits, pixels_for
from manyhands.train.objects import Objects
from manyhands.train.optimize import slots_of
from manyhands.worker.plan_search import ROUNDS, TIMES_BUDGET_S, PlanRequest
from manyhands.worker.plan_trials import LINKS, case_of, try_out


@dataclass(frozen=True)
class Decision:
    """What a run's processes decided."""

    plan: Plan | None  # how ops are split; None for data parallel
    # for plan.json: the reason, and each candidate's predicted and measured times
    about: dict[str, Any] = field(default_factory=dict)


def decide(job: Job, world: World, folder: RunFolder, objects: Objects) -> Decision:
    """The plan that the processes will follow, the same on all of them; a collective.

    A run that goes on with as many processes keeps the plan that it had: its choice was measured, and a second
    measurement may choose otherwise.

    Raises:
        UserError: a wish can't be fulfilled; on all processes alike.
    """
    previous = broadcast_plain(_previous(folder, world.size, search_key(job)) if world.is_main else None, world)
    if previous is not None:
        return _decision(previous)
    if job.parallel.plan:
        return Decision(shared_plan(job.parallel, world))
    case = _case(job, world, objects)
    links = try_out(job, world, {"action": LINKS})["points"] if job.parallel.measure else []
    answer = broadcast_plain(_search(job, world, case, links) if world.is_main else None, world)
    if "error" in answer:
        raise (UserError if answer["usage"] else RunError)(answer["error"], answer["where"], tuple(answer["hints"]))
    plans = {
        name: plan_from_plain(content, "plan") if content else None for name, content in answer["finalists"].items()
    }
    if len(plans) > 1 and job.parallel.measure and answer["measurable"]:
        seconds = measure(case, plans, world, ROUNDS)
        pick = pick_measured(seconds)
        answer |= {"chosen": pick.name, "reason": pick.reason}
        for row in answer["candidates"]:
            if row["name"] in pick.measured_seconds:
                row["measured_ms"] = round(pick.measured_seconds[row["name"]] * 1e3, 3)
    about = {"reason": answer["reason"], "candidates": answer["candidates"], "wish": search_key(job)}
    if answer["untimed"]:
        about["untimed"] = answer["untimed"]
    plan = plans[answer["chosen"]] if answer["chosen"] != DATA_PARALLEL else None
    return Decision(replace(plan, about={**plan.about, **about}) if plan else None, about)


def search_key(job: Job) -> list[Any]:
    """What the user asked of a plan, as JSON data."""
    options = job.parallel
    return [list(options.pin), options.mesh, options.memory, options.link, options.plan, options.full_batch]


def _previous(folder: RunFolder, world_size: int, search: list[Any]) -> dict[str, Any] | None:
    """The plan that this run folder has for as many processes and the same wishes."""
    if not folder.plan.is_file() or not folder.has_checkpoints():
        return None
    plan = read_plan(folder.plan)
    return plan.as_plain() if plan.mesh.size == world_size and plan.about.get("wish") == search else None


def _decision(content: dict[str, Any]) -> Decision:
    plan = plan_from_plain(content, "plan.json")
    about = {key: plan.about[key] for key in ("reason", "candidates", "wish") if key in plan.about}
    mode, known = str(plan.about.get("mode", MODE_OF_SEARCHES)), module_names(MODES)
    if mode not in known:
        raise unknown_choice("parallel mode", mode, known, "plan.json")
    if not follows_plan(mode):
        return Decision(None, about)
    return Decision(replace(plan, layouts=None, about=about), about)


def _case(job: Job, world: World, objects: Objects) -> PlanCase:
    splits = open_splits(job, world, objects)
    pixels = pixels_for(job, splits, objects)
    network = {
        "channels": pixels.channels,
        "size": pixels.size,
        "classes": len(class_names(job, splits)),
        "batch": min(job.train.batch, len(splits.train)),
    }
    case = case_of(job, network, world.device, objects)
    if objects.model is None:
        return case
    return replace(case, make=_copying(objects.model, case.picture))


def _copying(model: nn.Module, picture: Tensor) -> Callable[[], nn.Module]:
    """A user's own network, where its pictures are; in double precision where they are."""
    kind = torch.float64 if picture.dtype == torch.float64 else None
    return lambda: copy.deepcopy(model).to(picture.device, kind).train()


def _search(job: Job, world: World, case: PlanCase, points: list[list[float]]) -> dict[str, Any]:
    """What rank 0 finds, as plain data; a mistake of the user's too, so that all processes learn of it."""
    try:
        found = _found(job, world, case, points)
    except ManyhandsError as error:
        usage = isinstance(error, UserError)
        return {"error": error.message, "where": error.where, "hints": list(error.hints), "usage": usage}
    finalists = found.finalists()
    limit = parse_memory(job.parallel.memory) if job.parallel.memory else None
    together = sum(option.prediction.memory_bytes for option in finalists)
    return {
        "finalists": {
            option.name: None if option.name == DATA_PARALLEL else found.plan_of(option).as_plain()
            for option in finalists
        },
        "chosen": found.pick.name,
        "reason": found.pick.reason,
        "candidates": [_row(option) for option in found.options],
        "untimed": list(found.notes),
        # All finalists are in memory at once while they are timed.
        "measurable": limit is None or together <= limit,
    }


def _found(job: Job, world: World, case: PlanCase, points: list[list[float]]) -> SearchResult:
    options, slots = job.parallel, slots_of(job.train)
    previous = plan_of(options, world.size) if options.pin or options.full_batch else None
    request = PlanRequest(
        world.size, options.mesh, previous.ops if previous else {}, options.memory, options.link, "search"
    )
    search = request.as_search(case.batch, case.norm_group, slots, accelerator=not world.device.startswith("cpu"))
    links = request.links()
    if points and not options.link:
        within = fitted_link("all_reduce", world.size, tuple((size, taken) for size, taken in points))
        links = lambda mesh: links_of(mesh, within=within)  # noqa: E731 - as `PlanRequest.links` gives
    model = case.make()
    group_batch_norms(model)
    times = OpTimes(world.device, TIMES_BUDGET_S if options.measure else 0.0)
    try:
        return find(_described(model, case), search, times, links)
    finally:
        times.save()


def _described(model: nn.Module, case: PlanCase) -> Graph:
    graph = describe_network(model, case.picture)
    if not case.cross_entropy:
        graph.keep_classes()
    return graph


def _row(option: Any) -> dict[str, Any]:
    return {"name": option.name, "mesh": str(option.mesh), "fits": option.fits, **option.prediction.as_plain()}

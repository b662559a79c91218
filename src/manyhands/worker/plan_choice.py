"""The mode auto within the training processes: search for plans, time the best in turns, and select one."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from manyhands.config.job import Job
from manyhands.core.choices import module_names, unknown_choice
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import follows_plan
from manyhands.parallel.options import MODE_OF_SEARCHES, MODES
from manyhands.parallel.plain import broadcast_plain, broadcast_result
from manyhands.parallel.plan import Plan, plan_from_plain, plan_of, read_plan, shared_plan
from manyhands.planner.choose import DATA_PARALLEL, pick_measured
from manyhands.planner.timing import OpTimes
from manyhands.planner.trial import PlanCase, measure
from manyhands.sync.link_speeds import WITHIN_A_MACHINE, LinkSpeed
from manyhands.sync.measure import measure_link
from manyhands.train.objects import Objects
from manyhands.worker.plan_search import ROUNDS, TIMES_BUDGET_S, PlanRequest, links_with, search
from manyhands.worker.plan_trials import LINK_BUDGET_S, case_of, graph_of, network_of


@dataclass(frozen=True)
class Decision:
    """The decision of the processes of a run."""

    plan: Plan | None  # how ops are split; None for data parallel
    # for plan.json: the reason, and each candidate's predicted and measured times
    about: dict[str, Any] = field(default_factory=dict)


def decide(job: Job, world: World, folder: RunFolder, objects: Objects) -> Decision:
    """Selects the plan of the processes, the same on all of them; a collective.

    A run that resumes on the same number of processes keeps its plan, because another measurement might select another
    one.

    Raises:
        UserError: a request can't be satisfied; raised on all processes.
    """
    previous = broadcast_plain(_previous(folder, world.size, search_key(job)) if world.is_main else None, world)
    if previous is not None:
        return _decision(previous)
    if job.parallel.plan:
        return Decision(shared_plan(job.parallel, world))
    network = network_of(job, world, objects)
    case = case_of(job, network, world.device, objects)
    if own := objects.model:
        # A user's own network, where its pictures are; in double precision where they are.
        kind, device = torch.float64 if case.picture.dtype == torch.float64 else None, case.picture.device
        case = replace(case, make=lambda: copy.deepcopy(own).to(device, kind).train())
    link = measure_link(None, world.device, LINK_BUDGET_S) if job.parallel.measure else WITHIN_A_MACHINE
    answer = broadcast_result(lambda: _search(job, world, case, link), world)
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
    """Returns the user's requests for a plan as JSON data."""
    options = job.parallel
    return [list(options.pin), options.mesh, options.memory, options.link, options.plan, options.full_batch]


def _previous(folder: RunFolder, world_size: int, search: list[Any]) -> dict[str, Any] | None:
    """Returns the plan in this run folder for the same number of processes and the same requests."""
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


def _search(job: Job, world: World, case: PlanCase, link: LinkSpeed) -> dict[str, Any]:
    """Searches on rank 0 and returns the result as plain data. Raises ManyhandsError: a request can't be satisfied."""
    options = job.parallel
    pins = plan_of(options, world.size).ops if options.pin or options.full_batch else {}
    request = PlanRequest(world.size, options.mesh, pins, options.memory)
    wanted = request.as_search(job, case.batch, world.device, case.norm_group)
    graph = graph_of(case.make(), case.picture, cross_entropy=case.cross_entropy)
    times = OpTimes(world.device, TIMES_BUDGET_S if options.measure else 0.0)
    found = search(graph, wanted, times, links_with(options.link, link))
    finalists, limit = found.finalists(), wanted.memory_limit_bytes
    return {
        "finalists": found.plans_of(finalists),
        "chosen": found.pick.name,
        "reason": found.pick.reason,
        "candidates": [
            {"name": one.name, "mesh": str(one.mesh), "fits": one.fits, **one.prediction.as_plain()}
            for one in found.options
        ],
        "untimed": list(found.notes),
        # All finalists are in memory at once while they are timed.
        "measurable": limit is None or sum(one.prediction.memory_bytes for one in finalists) <= limit,
    }

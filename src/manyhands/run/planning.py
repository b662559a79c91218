"""Plans for a job or a network: found, written, shown, proven and timed. Imports torch only when it is used."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.links import Link, fitted_link, links_of
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.quantities import parse_bandwidth, parse_memory
from manyhands.core.records import write_json
from manyhands.run.inspect import run_by_agent

if TYPE_CHECKING:
    from manyhands.parallel.plan import Plan
    from manyhands.planner.find import Found, LinksOf, Option, Wish

# More processes than this on one machine say more of the machine than of a plan.
MOST_TIMED = 8
ROUNDS = 8
TIMES_BUDGET_S = 30.0
_LATENCY_S = 1e-4
NETWORK = "network"


@dataclass(frozen=True)
class Wanted:
    """What a user asks of a plan, as it was written.

    Attributes:
        world_size: processes.
        mesh: such as dp=2,tp=2; empty for all.
        pins: strategies by op.
        memory: such as 14GiB; empty for no limit.
        link: such as 1gbit, between any two processes; empty for one machine's own.
        fill: "search" or "data", for ops without a pin.
        measure: time ops and the best plans on this machine.
    """

    world_size: int
    mesh: str = ""
    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    memory: str = ""
    link: str = ""
    fill: str = "search"
    measure: bool = True

    def as_wish(self, batch: int, norm_group: int, slots: int, *, accelerator: bool) -> "Wish":
        """Read and checked.

        Raises:
            UserError: something can't be read.
        """
        from manyhands.planner.find import Wish

        return Wish(
            self.world_size,
            batch,
            parse_mesh(self.mesh, "--mesh") if self.mesh else None,
            dict(self.pins),
            parse_memory(self.memory) if self.memory else None,
            norm_group,
            slots,
            accelerator,
            self.fill,
        )

    def links(self, within: Link | None = None) -> "LinksOf":
        """Of each mesh: those that the user names, or those of one machine.

        Raises:
            UserError: the speed can't be read.
        """
        if self.link:
            between = Link(parse_bandwidth(self.link), _LATENCY_S)
            return lambda mesh: links_of(mesh, per_machine=1, between=between)
        return lambda mesh: links_of(mesh, within=within) if within else links_of(mesh)


def find_plan(  # noqa: PLR0913 - each is one wish
    model: Any,
    sample: Any,
    *,
    world_size: int = 8,
    memory: str = "",
    pin: Mapping[str, str] | None = None,
    mesh: str | Mesh | None = None,
    link: str = "",
    batch: int = 0,
    measure: bool = False,
) -> "Plan":
    """Finds how the work of a network is best split over processes; data parallel unless something else is better.

    Args:
        model: a network; it is left as it was, but for ops in place, which are made out of place.
        sample: a batch [N, C, H, W], or one picture [C, H, W]; its numbers don't matter.
        world_size: processes.
        memory: the most that each may take, such as "14GiB"; empty for no limit.
        pin: strategies that must be kept, by op or glob: {"fc": "n@dp o@tp"}.
        mesh: the only one to look at, such as "dp=2,tp=4"; all if None.
        link: speed between any two processes, such as "1gbit"; empty for processes of one machine.
        batch: samples in an update; 0 for the sample's, or 32 for each process.
        measure: time ops on this device (kept for the next time) instead of estimating them.

    Returns:
        The plan; `plan.about["reason"]` says why.

    Raises:
        UserError: a pin doesn't fit, or nothing fits into memory.
    """
    from manyhands.parallel.describe import describe_network
    from manyhands.parallel.norm import group_batch_norms
    from manyhands.planner.find import find
    from manyhands.planner.op_times import OpTimes

    batched = sample.ndim == 4
    samples = batch or (len(sample) if batched and len(sample) > 1 else 32 * world_size)
    wanted = Wanted(world_size, str(mesh or ""), dict(pin or {}), memory, link, "search", measure)
    device = next((str(one.device) for one in model.parameters()), "cpu")
    training = model.training
    _, restore = group_batch_norms(model)
    try:
        graph = describe_network(model.train(), sample[0] if batched else sample)
        times = OpTimes(device, TIMES_BUDGET_S if measure else 0.0)
        wish = wanted.as_wish(samples, 0, 1, accelerator=not device.startswith("cpu"))
        found = find(graph, wish, times, wanted.links())
        times.save()
        return found.plan
    finally:
        restore()
        model.train(training)


@dataclass(frozen=True)
class Planned:
    """A search's outcome for a job.

    Attributes:
        found: plans and the pick.
        network: channels, size, classes, batch and samples, as plain data.
        job: that it is for.
        notes: sentences on what was left out.
        sync: what ways of agreeing cost in the mode data, as JSON data; see `plan_sync`.
    """

    found: "Found"
    network: dict[str, Any]
    job: Job
    notes: tuple[str, ...] = ()
    sync: dict[str, Any] = field(default_factory=dict[str, Any])

    def plan_of(self, option: "Option") -> "Plan":
        """A plan, as its file says it, with what is needed to make the network again."""
        plan = self.found.plan_of(option)
        model = self.job.model.model_dump(mode="json", exclude_defaults=True)
        own = {"model": {"name": self.job.model.name, **model}}
        data = {key: self.network[key] for key in ("channels", "size", "classes")}
        return replace(plan, about={**plan.about, NETWORK: {**own, **data}, "sync": self.sync})


def network_of(job: Job) -> dict[str, Any]:
    """What the data says of a job's network: channels, size, classes, samples in an update (batch) and in an epoch.

    Raises:
        UserError: the data isn't there, or doesn't fit.
    """
    from manyhands.core.world import World
    from manyhands.train.samples import Objects, class_names, open_splits, pixels_for

    objects = Objects()
    splits = open_splits(job, World(), objects)
    pixels = pixels_for(job, splits, objects)
    return {
        "channels": pixels.channels,
        "size": pixels.size,
        "classes": len(class_names(job, splits)),
        "batch": min(job.train.batch, len(splits.train)),
        "samples": len(splits.train),
    }


def device_of(job: Job) -> str:
    """Where the job's ops run, as far as this machine can tell."""
    import torch

    if job.cluster.device != "auto":
        return job.cluster.device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"


def plan_job(job: Job, wanted: Wanted) -> Planned:
    """Finds the plan for a job, and times the best ones on this machine where that is wished and can be done.

    Raises:
        ManyhandsError: a wish can't be fulfilled, or timing failed.
    """
    from manyhands.parallel.describe import describe_network
    from manyhands.parallel.norm import group_batch_norms
    from manyhands.planner.find import find
    from manyhands.planner.op_times import OpTimes
    from manyhands.run.sync_plan import link_between, plan_sync
    from manyhands.run.trials import make_network, norm_group, picture

    network, device = network_of(job), device_of(job)
    slots = 2 if job.train.optimizer == "adamw" else 1 if job.train.momentum else 0
    wish = wanted.as_wish(
        network["batch"], norm_group(job, network["batch"]), slots, accelerator=device != "cpu"
    )  # fmt: skip
    wanted.links()
    link_between(job, wanted)
    model = make_network(job, network, device)
    group_batch_norms(model)
    graph = describe_network(model, picture(job, network, device))
    if job.train.loss != "cross-entropy":
        graph.keep_classes()
    together = wanted.measure and not wanted.link and 1 < wanted.world_size <= MOST_TIMED
    on_all = with_processes(job, wanted.world_size)
    within = _measured_link(on_all) if together else None
    times = OpTimes(device, TIMES_BUDGET_S if wanted.measure else 0.0)
    found = find(graph, wish, times, wanted.links(within))
    times.save()
    notes = (*times.notes, *found.notes, *graph.notes)
    planned = Planned(found, network, on_all, notes)
    planned = _timed(planned) if together else planned
    return replace(planned, sync=plan_sync(planned, model, wanted, within))


def with_processes(job: Job, count: int) -> Job:
    """The job on so many processes of this machine."""
    own = {"processes": count, "hosts": (), "hostfile": "", "file": "", "rank_table": "", "init": ""}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=own)})


def _measured_link(job: Job) -> Link:
    points = run_by_agent(job, {"task": "plan", "action": "links"})["points"]
    return fitted_link("all_reduce", job.cluster.processes, tuple((size, taken) for size, taken in points))


def _timed(planned: Planned) -> Planned:
    """With the best plans timed in turns."""
    from manyhands.planner.choose import DATA_PARALLEL, pick_measured

    finalists = planned.found.finalists()
    if len(finalists) < 2:
        return planned
    plans = {
        option.name: None if option.name == DATA_PARALLEL else planned.found.plan_of(option).as_plain()
        for option in finalists
    }
    pick = pick_measured(seconds_of(planned.job, planned.network, plans))
    if DATA_PARALLEL not in plans:
        pick = replace(pick, reason=planned.found.pick.reason)
    return replace(planned, found=planned.found.with_pick(pick))


def seconds_of(job: Job, network: dict[str, Any], plans: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of updates under each plan in turns, by name; None stands for data parallel."""
    argument = {"task": "plan", "action": "measure", "network": network, "plans": plans, "rounds": ROUNDS}
    return run_by_agent(job, argument)["seconds"]


def write_plan(planned: Planned, path: Path, *, force: bool = False) -> tuple[Path, Path]:
    """Writes the chosen plan and its picture.

    Returns:
        Both files.

    Raises:
        UserError: a file is there already; with `force` only if it is no plan.
    """
    drawing = path.with_suffix(".png")
    check_free(path, force=force)
    chosen = planned.found.chosen
    plan = planned.plan_of(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plan.as_plain())
    draw(plan.mesh, chosen.letters, planned.found.graph.ops, drawing)
    return path, drawing


def check_free(path: Path, *, force: bool) -> None:
    """Raises UserError where writing a plan would overwrite something."""
    from manyhands.parallel.plan import read_plan

    if path.suffix.lower() != ".json":
        raise UserError(f"a plan is written into a .json file, not {path.name}", "--out", ("--out plan.json",))
    there = [one for one in (path, path.with_suffix(".png")) if one.exists()]
    if there and not force:
        mend = ("--force writes it anew", "or another file: --out other.json")
        raise UserError(f"{there[0]} is there already", str(there[0]), mend)
    if path.exists():
        # Even by force only a plan gives way to a plan.
        read_plan(path)


def draw(mesh: Mesh, letters: Mapping[str, tuple[str, ...]], ops: Iterable[str], file: Path) -> None:
    """Draws who computes what."""
    from manyhands.planner.explain import Layer, draw_plan

    draw_plan([Layer(name, letters[name]) for name in ops if name in letters], mesh, file)


def as_object(planned: Planned, files: tuple[Path, Path]) -> str:
    """The outcome as one JSON object."""
    chosen = planned.found.chosen
    content = {"plan": str(files[0]), "picture": str(files[1]), **planned.plan_of(chosen).as_plain()}
    return json.dumps(content, ensure_ascii=False)

"""Finds plans for a network: searched ones on every mesh, hand-written ones, the user's own, and data parallel."""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.core.shares import check_batch
from manyhands.parallel.execute import Letters, parameter_layouts
from manyhands.parallel.graph import LOSS, Graph
from manyhands.parallel.options import MODE_OF_PLANS, MODE_OF_SEARCHES, SEARCH, USUAL_MODE
from manyhands.parallel.plan import Plan
from manyhands.parallel.strategy import concise, refusal, resolve, strategies
from manyhands.planner.choose import DATA_PARALLEL, Pick, pick_predicted
from manyhands.planner.collectives import data_shares, shares
from manyhands.planner.cost import Known, Prediction, Setting, predict, sketch
from manyhands.planner.explain import PlanCandidate
from manyhands.planner.mesh_links import LinkSpeeds, links_of
from manyhands.planner.op_times import OpTimes
from manyhands.planner.solve import solve_all, too_large
from manyhands.planner.timing import Timing
from manyhands.planner.work import Work

YOURS, TRICK = "yours", "one weird trick"
GAP = 0.001
MOST_AXES = 3
# Layers with fewer weights than this share of the network's gain nothing from being cut.
_LARGE = 0.05
# The share of a backward pass behind which sending hides, by whether cores compute or send, or do both.
_OVERLAP_APART, _OVERLAP_TOGETHER = 0.7, 0.3
LinksOf = Callable[[Mesh], LinkSpeeds]


@dataclass(frozen=True)
class SearchRequest:
    """What is wanted of a plan."""

    world_size: int  # processes
    batch: int  # samples in an update
    mesh: Mesh | None = None  # the only one to look at; None for all
    pins: Mapping[str, str] | None = None  # strategies by op or pattern that must be kept
    memory_limit_bytes: int | None = None  # of each process; None for no limit
    norm_group: int = 0  # samples that BatchNorm takes its statistics over; 0 where there are none
    slots: int = 1  # numbers that the optimizer keeps for each parameter
    accelerator: bool = False  # ops run on accelerators, whose kernels may add up in another order each time
    fill: str = SEARCH  # "search" for what isn't pinned, or "data" to have it data parallel
    limit_s: float = 30.0  # for the search


@dataclass(frozen=True)
class Option:
    """A plan that may be chosen."""

    name: str  # as tables say it
    mesh: Mesh  # the processes
    letters: Letters  # of each op
    prediction: Prediction  # of one update
    fits: bool = True  # whether it keeps to the limit of memory
    allowed: bool = True  # whether it keeps the user's pins

    def candidate(self, measured_seconds: float | None = None) -> PlanCandidate:
        """As the table shows it."""
        one = self.prediction
        parts = one.compute_seconds, one.communication_seconds, one.gradient_seconds, one.memory_bytes, one.sent_bytes
        return PlanCandidate(self.name, str(self.mesh), *parts, measured_seconds, fits=self.fits)


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    options: tuple[Option, ...]  # all plans looked at; data parallel first
    pick: Pick  # which one is to run, and why
    graph: Graph  # of the network
    request: SearchRequest  # what was wanted
    notes: tuple[str, ...] = ()  # sentences on ops that could not be timed
    spread: float = 0.0  # the share by which the times that predictions are made from varied
    fewer: Callable[[int], Option] | None = None  # prices data parallel on another number of processes

    @property
    def chosen(self) -> Option:
        return next(option for option in self.options if option.name == self.pick.name)

    @property
    def candidates(self) -> list[PlanCandidate]:
        return [option.candidate(self.pick.measured_seconds.get(option.name)) for option in self.options]

    @property
    def plan(self) -> Plan:
        return self.plan_of(self.chosen)

    @property
    def _mode(self) -> str:
        return MODE_OF_SEARCHES if self.request.fill == SEARCH else MODE_OF_PLANS

    def plan_of(self, option: Option) -> Plan:
        """Returns an option as the plan of a plan file."""
        default, ops = concise(option.letters, self.graph, option.mesh)
        about: dict[str, Any] = {
            "mode": USUAL_MODE if option.name == DATA_PARALLEL else self._mode,
            "reason": self.pick.reason,
            "predicted": option.prediction.as_plain(),
            "graph": {"sha": digest(self.graph), "input": list(self.graph.input_shape), "samples": self.request.batch},
        }
        measured = self.pick.measured_seconds.get(option.name)
        if measured is not None:
            about["measured"] = {"step_ms": round(measured * 1e3, 3)}
        layouts = parameter_layouts(self.graph, option.letters)
        if not option.allowed:
            return Plan(option.mesh, ops, default, (), layouts, about)
        pinned = strategies(Plan(option.mesh, self.request.pins or {}), self.graph)
        tied = {self.graph.ops[name].tied for name in pinned}
        kept = tuple(name for name in ops if self.graph.ops[name].tied in tied)
        return Plan(option.mesh, ops, default, kept, layouts, about)

    def repicked(self, seconds: float) -> "SearchResult":
        """The same where data parallel's update takes so many seconds, since processes agree in another way."""
        return replace(self, pick=_pick(self.options, self.request, self.spread, seconds))

    def finalists(self, count: int = 3) -> list[Option]:
        """Those worth timing: data parallel, the user's own, and the best predicted others, each plan once."""
        able = [option for option in self.options if option.fits and option.allowed]
        always = [option for option in able if option.name in {DATA_PARALLEL, YOURS}]
        others = sorted((one for one in able if one not in always), key=lambda one: one.prediction.seconds)
        return [*always, *others[:count]]


def digest(graph: Graph) -> str:
    """Of a network's ops and shapes, so that a plan is not run on another network unseen."""
    lines = [
        repr((op.name, op.kind, op.sources, op.extents, [tuple(one.shape) for one in op.parameters().values()]))
        for op in graph.ops.values()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def find(
    graph: Graph,
    request: SearchRequest,
    times: OpTimes | None = None,
    links: LinksOf = links_of,
    share: Timing | None = None,
) -> SearchResult:
    """The plan to run, and all that it was chosen from.

    The graph is the network's in training, whole. Without `times` ops are estimated; `share`, one process's update
    under data parallel timed whole, scales all plans' ops. Raises UserError: a pin doesn't fit, or no plan fits into
    memory.
    """
    _check(request)
    times = times or OpTimes(budget_s=0.0)
    base = _setting(graph, request, times, links)
    whole = replace(base, share=data_shares(request.batch, request.norm_group))
    data_parallel = functools.partial(_data_parallel, graph, request, whole, links)
    first = _scaled(data_parallel, request.world_size, base.work, share)
    options = [first]
    options += _by_hand(graph, request, base, links)
    least_bytes = float("inf")
    if request.fill == "search":
        found, least_bytes = _searched(graph, request, base, links)
        options += found
    options = _distinct(options)
    spread = max(times.spread, share.spread if share else 0.0)
    notes = tuple(_untimed(base.work.untimed))
    pick = _pick(options, request, spread, least_bytes=least_bytes)
    return SearchResult(tuple(options), pick, graph, request, notes, spread, data_parallel)


def price(graph: Graph, request: SearchRequest, times: OpTimes, links: LinksOf, share: Timing | None = None) -> Option:
    """Data parallel alone, on one process or more; the arguments are those of `find`."""
    setting = _setting(graph, request, times, links)
    whole = replace(setting, share=data_shares(request.batch, request.norm_group))
    data_parallel = functools.partial(_data_parallel, graph, request, whole, links)
    return _scaled(data_parallel, request.world_size, whole.work, share)


def _setting(graph: Graph, request: SearchRequest, times: OpTimes, links: LinksOf) -> Setting:
    speeds = links(_data_mesh(request.world_size))
    return Setting(
        Work(graph, request.batch, request.world_size, times),
        speeds,
        shares(request.batch, request.norm_group),
        slots=request.slots,
        overlap=_overlap(speeds, request),
        repeat=not request.accelerator,
        memory_limit_bytes=request.memory_limit_bytes,
    )


def _data_parallel(graph: Graph, request: SearchRequest, whole: Setting, links: LinksOf, processes: int) -> Option:
    return _priced(DATA_PARALLEL, graph, Plan(_data_mesh(processes)), whole, links, allowed=not request.pins)


def _scaled(priced: Callable[[int], Option], processes: int, work: Work, share: Timing | None) -> Option:
    """Data parallel, with the work scaled so that it takes what one process's share was timed to take."""
    first = priced(processes)
    if share is None or not first.prediction.compute_seconds:
        return first
    work.scale = share.seconds / first.prediction.compute_seconds
    return priced(processes)


def _untimed(reasons: Mapping[str, str]) -> list[str]:
    """A sentence for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{alike[0]}{f' and {len(alike) - 1} more' if len(alike) > 1 else ''} can't be timed; the cost is "
        f"estimated from the size ({reason})"
        for reason, alike in names.items()
    ]


def _check(request: SearchRequest) -> None:
    if request.world_size < 2:
        raise UserError("a plan needs two or more processes", "--world-size", ("set --world-size 2 or higher",))
    check_batch(request.batch, request.world_size)
    if request.mesh is not None:
        request.mesh.check_size(request.world_size, "--mesh")


def _data_mesh(world_size: int) -> Mesh:
    return Mesh((("dp", world_size),))


def _overlap(links: LinkSpeeds, request: SearchRequest) -> float:
    """Between processes of one machine without accelerators, sending takes time from computing, known or not."""
    known = all(link.work_s_per_byte for link in links.axes)
    return _OVERLAP_APART if request.accelerator or known or any(links.across) else _OVERLAP_TOGETHER


def factorisations(world_size: int, most_axes: int = 2) -> list[Mesh]:
    """Returns all meshes of `world_size` processes with axes named dp, tp and tp2, each longer than one."""
    names = ("dp", "tp", "tp2")
    divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
    found = [
        Mesh(tuple(zip(names, sizes, strict=False)))
        for count in range(1, min(most_axes, len(names)) + 1)
        for sizes in itertools.product(divisors, repeat=count)
        if math.prod(sizes) == world_size
    ]
    return found or [Mesh((("dp", 1),))]


def _meshes(request: SearchRequest) -> list[Mesh]:
    """The meshes to look at: larger axes are the major ones, and axes of equal size are alike."""
    if request.mesh is not None:
        return [request.mesh]
    return [
        mesh for mesh in factorisations(request.world_size, MOST_AXES) if list(mesh.sizes) == sorted(mesh.sizes)[::-1]
    ]


def _fitting(request: SearchRequest, graph: Graph) -> list[tuple[Mesh, dict[str, dict[int, str]]]]:
    """Meshes that the pins can be read on, with what they fix. Raises UserError: none; the last one's reason."""
    pins = dict(request.pins or {})
    found: list[tuple[Mesh, dict[str, dict[int, str]]]] = []
    refused: UserError | None = None
    for mesh in _meshes(request):
        plan = Plan(mesh, pins)
        try:
            resolve(plan, graph, "pin")
        except UserError as error:
            refused = error
            continue
        found.append((mesh, {name: letters for name, (_, letters) in strategies(plan, graph, "pin").items()}))
    if not found and refused is not None:
        raise refused
    return found


def _priced(name: str, graph: Graph, plan: Plan, base: Setting, links: LinksOf, *, allowed: bool = True) -> Option:
    return _option(name, graph, resolve(plan, graph, "pin"), replace(base, links=links(plan.mesh)), allowed=allowed)


def _option(name: str, graph: Graph, letters: Letters, setting: Setting, *, allowed: bool = True) -> Option:
    prediction = predict(graph, letters, setting)
    limit = setting.memory_limit_bytes
    return Option(name, setting.mesh, letters, prediction, limit is None or prediction.memory_bytes <= limit, allowed)


def _by_hand(graph: Graph, request: SearchRequest, base: Setting, links: LinksOf) -> list[Option]:
    """The user's pins with all else data parallel, and fully connected layers cut in turn by outputs and inputs."""
    if request.pins:
        meshes = _fitting(request, graph)
        options = [_priced(YOURS, graph, Plan(mesh, dict(request.pins)), base, links) for mesh, _ in meshes]
        return [min(options, key=lambda option: (not option.fits, option.prediction.seconds))]
    if request.mesh is not None:
        return []
    mesh = _data_mesh(request.world_size)
    letters = one_weird_trick(graph, mesh)
    return [_option(TRICK, graph, letters, replace(base, links=links(mesh)))] if letters else []


def one_weird_trick(graph: Graph, mesh: Mesh) -> dict[str, tuple[str, ...]] | None:
    """Large fully connected layers cut by outputs, inputs, outputs …, all else by samples; None if there are none.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """
    letters = resolve(Plan(mesh), graph)
    total = sum(parameter.numel() for parameter in graph.parameters.values())
    whole: dict[str, tuple[str, ...]] = {}
    cut = False
    for op in graph.ops.values():
        own = sum(tensor.numel() for tensor in op.parameters().values())
        wanted = "n"
        if op.kind == "linear" and own > _LARGE * total:
            wanted, cut = ("i", False) if cut else ("o", True)
        elif cut and "c" in op.allowed():
            wanted = "c"
        elif op.name == LOSS and cut:
            wanted = "o"
        else:
            cut = False
        taken = tuple(wanted for _ in mesh.axes)
        if wanted != "n" and op.tied == op.name and not refusal(op, taken, mesh):
            whole[op.name] = taken
    return {**letters, **whole} if whole else None


def _searched(graph: Graph, request: SearchRequest, base: Setting, links: LinksOf) -> tuple[list[Option], float]:
    """The best plan on each mesh; and the least bytes that a plan takes, where none fits."""
    settings = [(replace(base, links=links(mesh)), fixed) for mesh, fixed in _fitting(request, graph)]
    known: Known = {}
    sketches = [sketch(graph, setting, fixed, known) for setting, fixed in settings]
    answers, least_bytes = solve_all([one.problem for one in sketches], request.limit_s, GAP)
    options: list[Option] = []
    for (setting, _), one, answer in zip(settings, sketches, answers, strict=True):
        if answer is not None:
            options.append(_option("search", graph, one.letters(answer.choices), setting))
    options.sort(key=lambda option: option.prediction.seconds)
    return [replace(option, name=f"search {number}") for number, option in enumerate(options, 1)], least_bytes


def _distinct(options: Sequence[Option]) -> list[Option]:
    """Each plan once: the same letters over several axes are those over one."""
    seen: set[Any] = set()
    found: list[Option] = []
    for option in options:
        alike = all(len(set(letters)) == 1 for letters in option.letters.values())
        key = tuple((name, letters[0] if alike else letters) for name, letters in option.letters.items())
        key = (key, None if alike else option.mesh.sizes)
        if key not in seen:
            found.append(option)
            seen.add(key)
    return found


def _pick(
    options: Sequence[Option],
    request: SearchRequest,
    spread: float = 0.0,
    data_seconds: float | None = None,
    least_bytes: float = float("inf"),
) -> Pick:
    able = {one.name: one.prediction.seconds for one in options if one.fits and one.allowed}
    if data_seconds is not None and DATA_PARALLEL in able:
        able[DATA_PARALLEL] = data_seconds
    if not able:
        least_bytes = min(least_bytes, *(one.prediction.memory_bytes for one in options))
        raise too_large(request.memory_limit_bytes or 0, least_bytes)
    doubtful = {one.name: spread * one.prediction.compute_seconds for one in options}
    pick = pick_predicted(able, doubtful)
    if not options[0].allowed:
        reason = f"{pick.name} is chosen: the best plan with your pins; data parallel is listed for comparison"
        return replace(pick, reason=reason)
    return pick

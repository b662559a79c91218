"""Searches for plans of a network: data parallel, the user's pins, `one_weird_trick`, and the best on each mesh."""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.core.quantities import short_time
from manyhands.core.world import check_batch
from manyhands.data.order import equal_share_function
from manyhands.parallel.options import MODE_OF_PLANS, MODE_OF_SEARCHES, SEARCH, USUAL_MODE
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.execute import Letters, parameter_layouts
from manyhands.parallel.split.graph import LOSS, Graph
from manyhands.parallel.split.strategy import explicit_letters, refusal, resolve_letters, shorten_strategies
from manyhands.planner.choose import DATA_PARALLEL, LEAST_GAIN, LEAST_PREDICTED_GAIN, Pick, pick_predicted
from manyhands.planner.collectives import data_parallel_shares
from manyhands.planner.cost import CostInputs, Prediction, ShardedOpTimes, predict, sharding_problem
from manyhands.planner.links import MeshLinks, mesh_links
from manyhands.planner.solve import NoPlanError, solve_all
from manyhands.planner.timing import OpTimes, Timing

YOURS, TRICK = "yours", "one weird trick"
GAP = 0.001  # relative: how much slower than the optimum a solver's result may be
_LARGE = 0.05  # linear layers with less than this fraction of the network's parameters gain nothing from sharding
# Fraction of a backward pass that can hide communication: if other hardware sends, and if the computing cores send.
_OVERLAP_APART, _OVERLAP_TOGETHER = 0.7, 0.3
LinksOf = Callable[[Mesh], MeshLinks]


@dataclass(frozen=True)
class SearchRequest:
    """The parameters of a search for a plan."""

    world_size: int  # processes
    batch: int  # samples in an update
    mesh: Mesh | None = None  # the only mesh to consider; None: all meshes
    pins: Mapping[str, str] | None = None  # the user's strategies, by op name or glob
    memory_limit_bytes: int | None = None  # of each process; None: no limit
    norm_group: int = 0  # samples in a BatchNorm group; 0: no groups
    slots: int = 1  # values that the optimizer keeps for each parameter
    accelerator: bool = False  # ops run on accelerators, whose kernels may vary the order of sums
    fill: str = SEARCH  # for ops without pins: "search", or "data" for data parallel
    limit_s: float = 30.0  # time limit of the search


@dataclass(frozen=True)
class PlanCandidate:
    """A plan that a search may select, with its predicted cost."""

    name: str  # such as "data parallel", "search 1", "yours"
    mesh: Mesh  # mesh of the processes
    letters: Letters  # placements of each op
    prediction: Prediction  # of one update on one process
    fits: bool = True  # fits into the memory limit
    allowed: bool = True  # matches the user's pins
    measured_seconds: float | None = None  # of an update; None: not timed
    note: str = ""  # why the plan can't be selected; empty: it can

    def as_plain(self) -> dict[str, Any]:
        milliseconds = {
            "step_ms": self.prediction.seconds,
            "compute_ms": self.prediction.compute_seconds,
            "between_ops_ms": self.prediction.communication_seconds,
            "gradients_ms": self.prediction.gradient_seconds,
            "measured_ms": self.measured_seconds,
        }
        return {
            "name": self.name,
            "mesh": str(self.mesh),
            "fits": self.fits,
            **{key: round(value * 1e3, 3) for key, value in milliseconds.items() if value is not None},
        }


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the selected plan and all candidates."""

    options: tuple[PlanCandidate, ...]  # all candidates without measured times; data parallel first
    pick: Pick
    graph: Graph  # of the network
    request: SearchRequest
    notes: tuple[str, ...]  # messages about ops that could not be timed
    spread: float  # the relative variation of timings
    data_parallel: Callable[[int], PlanCandidate]  # predicts data parallel on another number of processes

    @property
    def chosen(self) -> PlanCandidate:
        return next(option for option in self.options if option.name == self.pick.name)

    @property
    def candidates(self) -> list[PlanCandidate]:
        seconds = self.pick.measured_seconds
        return [replace(option, measured_seconds=seconds.get(option.name)) for option in self.options]

    @property
    def plan(self) -> Plan:
        return self.candidate_plan(self.chosen)

    def candidate_plan(self, option: PlanCandidate) -> Plan:
        default, ops = shorten_strategies(option.letters, self.graph, option.mesh)
        mode = MODE_OF_SEARCHES if self.request.fill == SEARCH else MODE_OF_PLANS
        about: dict[str, Any] = {
            "mode": USUAL_MODE if option.name == DATA_PARALLEL else mode,
            "reason": self.pick.reason,
            "predicted": option.prediction.as_plain(),
        }
        shape = list(self.graph.input_shape)
        about["graph"] = {"sha": graph_digest(self.graph), "input": shape, "samples": self.request.batch}
        measured = self.pick.measured_seconds.get(option.name)
        if measured is not None:
            about["measured"] = {"step_ms": round(measured * 1e3, 3)}
        pins = self.request.pins or {} if option.allowed else {}
        tied = {self.graph.ops[name].tied for name in explicit_letters(Plan(option.mesh, pins), self.graph)}
        kept = tuple(name for name in ops if self.graph.ops[name].tied in tied)
        return Plan(option.mesh, ops, default, kept, parameter_layouts(self.graph, option.letters), about)

    def plans_as_plain(self, options: Sequence[PlanCandidate]) -> dict[str, dict[str, Any] | None]:
        """Returns {name: plan as JSON data}, for the processes that time the plans. Data parallel is None."""
        return {one.name: None if one.name == DATA_PARALLEL else self.candidate_plan(one).as_plain() for one in options}

    def reselect(self, seconds: float) -> "SearchResult":
        """Repeats the selection with `seconds` as the step time of data parallel, for a job's sync method."""
        return replace(self, pick=_select(self.options, self.request, self.spread, seconds))

    def predict_fewer(self, shares: Mapping[int, Timing | None]) -> tuple[PlanCandidate, ...]:
        """Predicts data parallel on fewer processes. `shares`: {process count: time of a share (None: estimated)}."""
        found: list[PlanCandidate] = []
        for count, share in shares.items():
            one = self.data_parallel(count)
            predicted = replace(one.prediction, compute_seconds=share.seconds) if share else one.prediction
            found.append(replace(one, name=data_parallel_name(count), prediction=predicted))
        return tuple(found)

    def finalists(self, count: int = 3) -> list[PlanCandidate]:
        """Returns the candidates to time: data parallel, the plan of the pins, and the `count` fastest others."""
        able = [option for option in self.options if option.fits and option.allowed]
        always = [option for option in able if option.name in {DATA_PARALLEL, YOURS}]
        others = sorted((one for one in able if one not in always), key=lambda one: one.prediction.seconds)
        return [*always, *others[:count]]


def graph_digest(graph: Graph) -> str:
    """Returns a digest of the ops and shapes of a network, by which a plan for another network is detected."""
    lines = [
        repr((op.name, op.kind, op.sources, op.extents, [tuple(one.shape) for one in op.parameters().values()]))
        for op in graph.ops.values()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def search_plans(
    graph: Graph,
    request: SearchRequest,
    times: OpTimes | None = None,
    links: LinksOf = mesh_links,
    share: Timing | None = None,
) -> SearchResult:
    """Finds candidate plans for a network and selects one by predicted time.

    `graph` is the unsharded network in training mode. `times` measures op times and saves them; None: op times are
    estimated. `share`: measured time of one process's data-parallel update, which scales the op times of all plans.
    Raises UserError if a pin can't be applied, or if no plan fits into memory.
    """
    if request.world_size < 2:
        raise UserError("a plan needs two or more processes", "--world-size", ("set --world-size 2 or higher",))
    check_batch(request.batch, request.world_size)
    if request.mesh is not None:
        request.mesh.check_size(request.world_size, "--mesh")
    times, least_bytes = times or OpTimes(budget_s=0.0), math.inf
    try:
        pricing = CandidatePredictor(graph, request, times, links, share)
        options = [pricing.data_parallel(request.world_size), *pricing.predict_by_hand()]
        if request.fill == SEARCH:
            found, least_bytes = pricing.search_meshes()
            options += found
    finally:
        times.save()
    options = _without_duplicates(options)
    spread = max(times.spread, share.spread if share else 0.0)
    notes = tuple(_notes_on_untimed_ops(pricing.base.work.untimed))
    pick = _select(options, request, spread, least_bytes=least_bytes)
    return SearchResult(tuple(options), pick, graph, request, notes, spread, pricing.data_parallel)


class CandidatePredictor:
    """Creates candidate plans and predicts their costs. The arguments are those of `search_plans`."""

    def __init__(
        self, graph: Graph, request: SearchRequest, times: OpTimes, links: LinksOf, share: Timing | None
    ) -> None:
        self._graph, self._request, self._links = graph, request, links
        speeds = links(_data_mesh(request.world_size))
        # Within a machine without accelerators, sending takes time from computing, even if the amount is unknown.
        known = all(link.work_s_per_byte for link in speeds.axes)
        apart = request.accelerator or known or any(speeds.across)
        self.base = CostInputs(
            ShardedOpTimes(graph, request.batch, request.world_size, times),
            speeds,
            equal_share_function(request.batch, request.norm_group),
            slots=request.slots,
            overlap=_OVERLAP_APART if apart else _OVERLAP_TOGETHER,
            repeat=not request.accelerator,
            memory_limit_bytes=request.memory_limit_bytes,
        )
        if share is not None and (compute_s := self.data_parallel(request.world_size).prediction.compute_seconds):
            self.base = replace(self.base, scale=share.seconds / compute_s, known={})

    def data_parallel(self, processes: int) -> PlanCandidate:
        """Predicts data parallel on `processes` processes, which divide the batch as in training."""
        plan, share = Plan(_data_mesh(processes)), data_parallel_shares(self._request.batch, self._request.norm_group)
        setting = replace(self._cost_inputs(plan.mesh), share=share, known={})
        letters = resolve_letters(plan, self._graph, "pin")
        return self._predict(DATA_PARALLEL, letters, setting, allowed=not self._request.pins)

    def _cost_inputs(self, mesh: Mesh) -> CostInputs:
        return replace(self.base, links=self._links(mesh))

    def _predict(self, name: str, letters: Letters, setting: CostInputs, *, allowed: bool = True) -> PlanCandidate:
        prediction, limit = predict(self._graph, letters, setting), setting.memory_limit_bytes
        fits = limit is None or prediction.memory_bytes <= limit
        return PlanCandidate(name, setting.mesh, letters, prediction, fits, allowed)

    def predict_by_hand(self) -> list[PlanCandidate]:
        """Predicts the plan of the user's pins, with all other ops data parallel. Without pins: `one_weird_trick`."""
        if self._request.pins:
            options: list[PlanCandidate] = []
            for mesh, _ in self._meshes_for_pins():
                letters = resolve_letters(Plan(mesh, self._request.pins), self._graph, "pin")
                options.append(self._predict(YOURS, letters, self._cost_inputs(mesh)))
            return [min(options, key=lambda option: (not option.fits, option.prediction.seconds))]
        mesh = _data_mesh(self._request.world_size)
        letters = one_weird_trick(self._graph, mesh) if self._request.mesh is None else None
        return [self._predict(TRICK, letters, self._cost_inputs(mesh))] if letters else []

    def search_meshes(self) -> tuple[list[PlanCandidate], float]:
        """Returns (best plan on each mesh, bytes of memory of the smallest plan if none fits)."""
        settings = [(self._cost_inputs(mesh), fixed) for mesh, fixed in self._meshes_for_pins()]
        labelled = [sharding_problem(self._graph, setting, fixed) for setting, fixed in settings]
        answers, least_bytes = solve_all([one.problem for one in labelled], self._request.limit_s, GAP)
        options = [
            self._predict("search", one.letters(answer.choices), setting)
            for (setting, _), one, answer in zip(settings, labelled, answers, strict=True)
            if answer is not None
        ]
        options.sort(key=lambda option: option.prediction.seconds)
        return [replace(option, name=f"search {number}") for number, option in enumerate(options, 1)], least_bytes

    def _meshes_for_pins(self) -> list[tuple[Mesh, dict[str, dict[int, str]]]]:
        """Returns (mesh, {op: {axis index: letter}}) of the meshes on which pins are valid. Raises UserError: none."""
        request, graph, pins = self._request, self._graph, self._request.pins or {}
        # Larger axes come first; axes of equal size are interchangeable.
        meshes = factorizations(request.world_size)
        meshes = [mesh for mesh in meshes if list(mesh.sizes) == sorted(mesh.sizes)[::-1]]
        found: list[tuple[Mesh, dict[str, dict[int, str]]]] = []
        refused: UserError | None = None
        for mesh in [request.mesh] if request.mesh else meshes:
            plan = Plan(mesh, pins)
            try:
                resolve_letters(plan, graph, "pin")
            except UserError as error:
                refused = error
            else:
                pinned = explicit_letters(plan, graph, "pin").items()
                found.append((mesh, {name: letters for name, (_, letters) in pinned}))
        if not found and refused is not None:
            raise refused
        return found


def _notes_on_untimed_ops(reasons: Mapping[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{alike[0]}{f' and {len(alike) - 1} more' if len(alike) > 1 else ''} can't be timed; the cost is "
        f"estimated from the size ({reason})"
        for reason, alike in names.items()
    ]


def _data_mesh(world_size: int) -> Mesh:
    return Mesh((("dp", world_size),))


def factorizations(world_size: int) -> list[Mesh]:
    """Returns all meshes of `world_size` processes with one to three axes (dp, tp, tp2), each longer than one."""
    names = ("dp", "tp", "tp2")
    divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
    found = [
        Mesh(tuple(zip(names, sizes, strict=False)))
        for count in range(1, len(names) + 1)
        for sizes in itertools.product(divisors, repeat=count)
        if math.prod(sizes) == world_size
    ]
    return found or [Mesh((("dp", 1),))]


def one_weird_trick(graph: Graph, mesh: Mesh) -> dict[str, tuple[str, ...]] | None:
    """Returns letters that shard large linear layers by outputs and inputs in turn, or None without such layers.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """
    total = sum(parameter.numel() for parameter in graph.parameters.values())
    whole, cut = dict[str, tuple[str, ...]](), False
    for op in graph.ops.values():
        own = sum(tensor.numel() for tensor in op.parameters().values())
        wanted = "n"
        if op.kind == "linear" and own > _LARGE * total:
            wanted, cut = ("i", False) if cut else ("o", True)
        elif cut and "c" in op.allowed_letters():
            wanted = "c"
        elif op.name == LOSS and cut:
            wanted = "o"
        else:
            cut = False
        taken = tuple(wanted for _ in mesh.axes)
        if wanted != "n" and op.tied == op.name and not refusal(op, taken, mesh):
            whole[op.name] = taken
    return {**resolve_letters(Plan(mesh), graph), **whole} if whole else None


def _without_duplicates(options: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Returns the plans without duplicates. A plan with equal letters on all axes is a plan on a single axis."""
    found: dict[Any, PlanCandidate] = {}
    for option in options:
        alike = all(len(set(letters)) == 1 for letters in option.letters.values())
        key = tuple((name, letters[0] if alike else letters) for name, letters in option.letters.items())
        found.setdefault((key, None if alike else option.mesh.sizes), option)
    return [*found.values()]


def _select(
    options: Sequence[PlanCandidate],
    request: SearchRequest,
    spread: float = 0.0,
    data_seconds: float | None = None,
    least_bytes: float = math.inf,
) -> Pick:
    able = {one.name: one.prediction.seconds for one in options if one.fits and one.allowed}
    if data_seconds is not None and DATA_PARALLEL in able:
        able[DATA_PARALLEL] = data_seconds
    if not able:
        least_bytes = min(least_bytes, *(one.prediction.memory_bytes for one in options))
        raise NoPlanError(request.memory_limit_bytes or 0, least_bytes)
    doubtful = {one.name: spread * one.prediction.compute_seconds for one in options}
    pick = pick_predicted(able, doubtful)
    if not options[0].allowed:
        reason = f"{pick.name} is chosen: the best plan with your pins; data parallel is listed for comparison"
        return replace(pick, reason=reason)
    return pick


_FEW = 4  # up to this process count, all smaller counts are considered; above it, only repeated halves


def fewer_counts(processes: int) -> list[int]:
    """Returns the process counts below `processes` for which data parallel is predicted, ascending."""
    if processes <= _FEW:
        return list(range(1, processes))
    return [processes >> power for power in range(processes.bit_length() - 1, 0, -1)]


def data_parallel_name(processes: int) -> str:
    return "one process" if processes == 1 else f"{DATA_PARALLEL} on {processes}"


def needed_count(found: SearchResult, fewer: Sequence[PlanCandidate], seconds: float, spread: float) -> tuple[int, str]:
    """Returns (smallest process count that is as fast as all processes, reason), or (0, "") if all are needed.

    A larger count is returned if its prediction is clearly faster than that of the smallest. `fewer`: predictions of
    data parallel on fewer processes. `seconds`: time of an update with the selected plan on all processes. `spread`:
    relative variation of timings, which is added to predicted times.
    """
    sizes, every = enumerate(found.chosen.mesh.sizes), found.chosen.letters.values()
    # processes that don't repeat the computation of others
    repeating = math.prod(size for axis, size in sizes if any(letters[axis] != "r" for letters in every))
    if repeating < found.request.world_size:
        copies = found.request.world_size // repeating
        return repeating, f"{found.chosen.name} repeats every computation on {copies} processes"

    def slowest(option: PlanCandidate) -> float:
        return option.prediction.seconds + spread * option.prediction.compute_seconds

    doing = [one for one in fewer if one.fits and slowest(one) <= seconds * LEAST_GAIN]
    if not doing:
        return 0, ""
    limit = LEAST_PREDICTED_GAIN * min(map(slowest, doing))
    option = min((one for one in doing if one.prediction.seconds <= limit), key=lambda one: one.mesh.size)
    least, whole = short_time(option.prediction.seconds), f"{found.pick.name} on {found.request.world_size}"
    return option.mesh.size, f"{option.name} takes {least} per step, while {whole} takes {short_time(seconds)}"

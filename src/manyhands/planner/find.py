"""Finds plans for a network: searched ones on every mesh, hand-written ones, the user's own, and data parallel."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.links import Links, links_of
from manyhands.core.mesh import Mesh, factorisations
from manyhands.parallel.execute import Letters, parameter_layouts
from manyhands.parallel.graph import LOSS, Graph
from manyhands.parallel.plan import Plan, concise, refusal, resolve, strategies
from manyhands.planner.choose import DATA_PARALLEL, Pick, pick_predicted
from manyhands.planner.collectives import data_shares, shares
from manyhands.planner.cost import Known, Prediction, Setting, predict, sketch
from manyhands.planner.explain import Candidate
from manyhands.planner.op_times import OpTimes
from manyhands.planner.problem import NoPlanError, SearchStoppedError
from manyhands.planner.solve import solve_all
from manyhands.planner.work import Work

YOURS, TRICK = "yours", "one weird trick"
GAP = 0.01
MOST_AXES = 3
_GIB = 1 << 30
# Layers with fewer weights than this share of the network's gain nothing from being cut.
_LARGE = 0.05
# The share of a backward pass behind which sending hides, by whether cores compute or send, or do both.
_OVERLAP_APART, _OVERLAP_TOGETHER = 0.7, 0.3
LinksOf = Callable[[Mesh], Links]


@dataclass(frozen=True)
class Wish:
    """What is wanted of a plan.

    Attributes:
        world_size: processes.
        batch: samples in an update.
        mesh: the only one to look at; None for all.
        pins: strategies by op or pattern that must be kept.
        memory_limit_bytes: of each process; None for no limit.
        norm_group: samples that BatchNorm takes its statistics over; 0 where there are none.
        slots: numbers that the optimizer keeps for each parameter.
        accelerator: ops run on accelerators, whose kernels may add up in another order each time.
        fill: "search" for what isn't pinned, or "data" to have it data parallel.
        limit_s: for the search.
    """

    world_size: int
    batch: int
    mesh: Mesh | None = None
    pins: Mapping[str, str] | None = None
    memory_limit_bytes: int | None = None
    norm_group: int = 0
    slots: int = 1
    accelerator: bool = False
    fill: str = "search"
    limit_s: float = 30.0


@dataclass(frozen=True)
class Option:
    """A plan that may be chosen.

    Attributes:
        name: as tables say it.
        mesh: the processes.
        letters: of each op.
        prediction: of one update.
        fits: whether it keeps to the limit of memory.
        allowed: whether it keeps the user's pins.
    """

    name: str
    mesh: Mesh
    letters: Letters
    prediction: Prediction
    fits: bool = True
    allowed: bool = True

    def candidate(self, measured_seconds: float | None = None) -> Candidate:
        """As the table shows it."""
        one = self.prediction
        parts = one.compute_seconds, one.communication_seconds, one.gradient_seconds, one.memory_bytes, one.sent_bytes
        return Candidate(self.name, str(self.mesh), *parts, measured_seconds, fits=self.fits)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        options: all plans looked at; data parallel first.
        pick: which one is to run, and why.
        graph: of the network.
        wish: what was wanted.
        notes: sentences on ops that could not be timed.
    """

    options: tuple[Option, ...]
    pick: Pick
    graph: Graph
    wish: Wish
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Option:
        """The plan to run."""
        return next(option for option in self.options if option.name == self.pick.name)

    @property
    def candidates(self) -> list[Candidate]:
        """For the table."""
        return [option.candidate(self.pick.measured_seconds.get(option.name)) for option in self.options]

    @property
    def plan(self) -> Plan:
        """The plan to run, as its file says it."""
        return self.plan_of(self.chosen)

    def plan_of(self, option: Option) -> Plan:
        """Any of the plans, as its file says it."""
        default, ops = concise(option.letters, self.graph, option.mesh)
        about: dict[str, Any] = {
            "mode": "data" if option.name == DATA_PARALLEL else "semi" if self.wish.fill == "data" else "auto",
            "reason": self.pick.reason,
            "predicted": option.prediction.as_plain(),
            "graph": {"sha": digest(self.graph), "input": list(self.graph.input_shape), "samples": self.wish.batch},
        }
        measured = self.pick.measured_seconds.get(option.name)
        if measured is not None:
            about["measured"] = {"step_ms": round(measured * 1e3, 3)}
        layouts = parameter_layouts(self.graph, option.letters)
        if not option.allowed:
            return Plan(option.mesh, ops, default, (), layouts, about)
        pinned = strategies(Plan(option.mesh, self.wish.pins or {}), self.graph)
        return Plan(option.mesh, ops, default, tuple(name for name in pinned if name in ops), layouts, about)

    def with_pick(self, pick: Pick) -> "Found":
        """The same after plans have been timed."""
        return replace(self, pick=pick)

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


def find(graph: Graph, wish: Wish, times: OpTimes | None = None, links: LinksOf = links_of) -> Found:
    """The plan to run, and all that it was chosen from.

    Args:
        graph: of the network in training, whole.
        wish: what is wanted.
        times: of ops on this device; estimated if None.
        links: of each mesh.

    Raises:
        UserError: a pin doesn't fit, or no plan fits into memory.
    """
    _check(wish)
    work = Work(graph, wish.batch, wish.world_size, times or OpTimes(budget_s=0.0))
    base = Setting(
        work,
        links(_data_mesh(wish.world_size)),
        shares(wish.batch, wish.norm_group),
        slots=wish.slots,
        repeat=not wish.accelerator,
        memory_limit_bytes=wish.memory_limit_bytes,
    )
    base = replace(base, overlap=_overlap(base.links, wish))
    pins = dict(wish.pins or {})
    whole = replace(base, share=data_shares(wish.batch, wish.norm_group))
    options = [_priced(DATA_PARALLEL, graph, Plan(_data_mesh(wish.world_size)), whole, links, allowed=not pins)]
    options += _by_hand(graph, wish, base, links)
    if wish.fill == "search":
        options += _searched(graph, wish, base, links)
    options = _distinct(options)
    return Found(tuple(options), _pick(options, wish), graph, wish, tuple(_untimed(work.untimed)))


def _untimed(reasons: Mapping[str, str]) -> list[str]:
    """A sentence for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{alike[0]}{f' and {len(alike) - 1} more' if len(alike) > 1 else ''} can't be timed by itself, so it is "
        f"priced by its size ({reason})"
        for reason, alike in names.items()
    ]


def _check(wish: Wish) -> None:
    if wish.world_size < 2:
        raise UserError("a plan is for two processes or more", "--world-size", ("--world-size 2",))
    if wish.batch < wish.world_size:
        what = f"an update has {wish.batch} samples, and {wish.world_size} processes are to share it"
        raise UserError(what, "train.batch", (f"--batch {wish.world_size} or more", "fewer processes"))
    if wish.mesh is not None and wish.mesh.size != wish.world_size:
        what = f"the mesh {wish.mesh} has {wish.mesh.size} processes, and there are {wish.world_size}"
        raise UserError(what, "--mesh", (f"a mesh of {wish.world_size} processes",))


def _data_mesh(world_size: int) -> Mesh:
    return Mesh((("dp", world_size),))


def _overlap(links: Links, wish: Wish) -> float:
    """Between processes of one machine without accelerators, sending takes time from computing."""
    return _OVERLAP_APART if wish.accelerator or any(links.across) else _OVERLAP_TOGETHER


def _meshes(wish: Wish) -> list[Mesh]:
    """The meshes to look at: larger axes are the major ones, and axes of equal size are alike."""
    if wish.mesh is not None:
        return [wish.mesh]
    return [mesh for mesh in factorisations(wish.world_size, MOST_AXES) if list(mesh.sizes) == sorted(mesh.sizes)[::-1]]


def _fitting(wish: Wish, graph: Graph) -> list[tuple[Mesh, dict[str, dict[int, str]]]]:
    """Meshes that the pins can be read on, with what they fix.

    Raises:
        UserError: there is none; the last mesh's reason.
    """
    pins = dict(wish.pins or {})
    found: list[tuple[Mesh, dict[str, dict[int, str]]]] = []
    refused: UserError | None = None
    for mesh in _meshes(wish):
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


def _by_hand(graph: Graph, wish: Wish, base: Setting, links: LinksOf) -> list[Option]:
    """The user's pins with all else data parallel, and fully connected layers cut in turn by outputs and inputs."""
    if wish.pins:
        meshes = _fitting(wish, graph)
        options = [_priced(YOURS, graph, Plan(mesh, dict(wish.pins)), base, links) for mesh, _ in meshes]
        return [min(options, key=lambda option: (not option.fits, option.prediction.seconds))]
    if wish.mesh is not None:
        return []
    mesh = _data_mesh(wish.world_size)
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


def _searched(graph: Graph, wish: Wish, base: Setting, links: LinksOf) -> list[Option]:
    """The best plan on each mesh."""
    settings = [(replace(base, links=links(mesh)), fixed) for mesh, fixed in _fitting(wish, graph)]
    known: Known = {}
    sketches = [sketch(graph, setting, fixed, known) for setting, fixed in settings]
    answers = solve_all([one.problem for one in sketches], wish.limit_s, GAP)
    options: list[Option] = []
    for (setting, _), one, answer in zip(settings, sketches, answers, strict=True):
        if not isinstance(answer, NoPlanError | SearchStoppedError):
            options.append(_option("search", graph, one.letters(answer.choices), setting))
    options.sort(key=lambda option: option.prediction.seconds)
    return [replace(option, name=f"search {number}") for number, option in enumerate(options, 1)]


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


def _pick(options: Sequence[Option], wish: Wish) -> Pick:
    able = {one.name: one.prediction.seconds for one in options if one.fits and one.allowed}
    if not able:
        least = min(one.prediction.memory_bytes for one in options) / _GIB
        limit = (wish.memory_limit_bytes or 0) / _GIB
        what = f"no plan that was found fits into {limit:.4g} GiB on each process; the smallest takes {least:.4g} GiB"
        raise NoPlanError(what, "--memory", ("allow more memory", "use more processes", "make the batch smaller"))
    pick = pick_predicted(able)
    if not options[0].allowed:
        reason = f"{pick.name} is chosen: the best that keeps your pins; data parallel is shown to compare with"
        return replace(pick, reason=reason)
    return pick

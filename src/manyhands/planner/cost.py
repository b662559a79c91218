"""Converts a network to the planner's problem, and a sharding of its ops to a prediction."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.core.mesh import Mesh
from manyhands.parallel.mesh.placement import Layout, steps_between
from manyhands.parallel.mesh.reduce import BUCKET_BYTES
from manyhands.parallel.split.execute import Letters, batch_axes, input_layouts, loops_of, output_layouts
from manyhands.parallel.split.graph import LOSS, Graph, Op
from manyhands.parallel.split.strategy import refusal
from manyhands.planner.collectives import (
    FORWARD,
    GRADIENTS,
    Collective,
    PlannedUpdate,
    ShareOf,
    collectives,
    norms_of,
    real_axes,
)
from manyhands.planner.links import LinkSpeeds
from manyhands.planner.problem import Edge, Matrix, OpChoice, Problem
from manyhands.planner.work import Work, parameter_part, part


@dataclass(frozen=True)
class Setting:
    """The inputs of costs besides the sharding."""

    work: Work  # seconds of ops
    links: LinkSpeeds  # seconds of collectives, on a mesh
    share: ShareOf  # who has what of the update
    slots: int = 1  # numbers that the optimizer keeps for each parameter
    overlap: float = 0.3  # the share of the backward pass that gradients' collectives hide behind
    # whether ops with parameters may be computed alike on several processes; where kernels may add up in another order
    # from time to time, the copies would drift apart
    repeat: bool = True
    memory_limit_bytes: float | None = None  # of a process

    @property
    def mesh(self) -> Mesh:
        return self.links.mesh


@dataclass(frozen=True)
class Prediction:
    """The cost of one update for a process; see `explain.PlanCandidate`."""

    compute_seconds: float  # forward, backward and the optimizer
    communication_seconds: float  # collectives that ops wait for
    gradient_seconds: float  # gradients' collectives, as far as nothing hides them
    memory_bytes: float  # the most that a process holds
    collectives: tuple[Collective, ...]  # all of them
    sent_bytes: float  # by a process
    hiding_seconds: float = 0.0  # of computing, behind which gradients' collectives can hide

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.gradient_seconds

    def as_plain(self) -> dict[str, Any]:
        return {
            "step_ms": round(self.seconds * 1e3, 3),
            "memory_gib": round(self.memory_bytes / (1 << 30), 4),
            "sent_mb": round(self.sent_bytes / 1e6, 3),
            "collectives": len(self.collectives),
        }


def op_cost(op: Op, letters: tuple[str, ...], setting: Setting) -> OpChoice:
    """Returns the cost of an op on one process, without the conversions to its neighbours."""
    mesh, work = setting.mesh, setting.work
    forward, backward = work.seconds(op, letters, mesh)
    held, sent, (gradient, working) = _parameters(op, letters, setting)
    saved = 0.0
    if op.trains:
        share = part([loop.output for loop in loops_of(op, letters)], mesh)
        saved = share * op.item_bytes * sum(extent.values(work.batch) for extent in op.extents)
    compute = forward + backward + work.update_seconds(held * (3 + 2 * setting.slots))
    return OpChoice(
        seconds=compute + _norm_seconds(op, letters, setting) + working,
        gradient_seconds=gradient - working,
        hideable_seconds=backward,
        memory_bytes=held * (2 + setting.slots) + sent + saved,
        compute_seconds=compute,
    )


def _parameters(op: Op, letters: tuple[str, ...], setting: Setting) -> tuple[float, float, tuple[float, float]]:
    """Bytes of its parameters and of the gradients that are sent; the seconds of sending these, and cores' of them."""
    mesh, loops = setting.mesh, loops_of(op, letters)
    held = sent = seconds = working = 0.0
    for name, tensor in setting.work.parameters(op).items():
        if tensor.requires_grad:
            size = parameter_part(op, name, letters, mesh) * tensor.numel() * tensor.element_size()
            axes = real_axes([axis for axis, loop in enumerate(loops) if name in loop.partial], mesh)
            held += size
            sent += size if axes else 0.0
            buckets = size / BUCKET_BYTES if axes else 0.0
            seconds += buckets * setting.links.seconds("all_reduce", axes, BUCKET_BYTES)
            working += buckets * setting.links.work_seconds("all_reduce", axes, BUCKET_BYTES)
    return held, sent, (seconds, working)


def _norm_seconds(op: Op, letters: tuple[str, ...], setting: Setting) -> float:
    layers = norms_of(op)
    axes = real_axes(batch_axes(letters), setting.mesh)
    shared = setting.share(setting.mesh.parts(axes), 0).shared_groups if axes and layers else ()
    sizes = [16.0 * len(shared) * layer.num_features for layer in layers]
    return sum(2 * setting.links.seconds("all_reduce", axes, size) for size in sizes) if shared else 0.0


def predict(graph: Graph, letters: Letters, setting: Setting) -> Prediction:
    """Predicts the cost of one update with this sharding for the process with the most work."""
    mesh, links = setting.mesh, setting.links
    sent = collectives(PlannedUpdate(graph, letters, mesh, setting.work.batch, setting.share, mesh.size - 1))
    known: Known = {}
    owns = [_own(op, letters[op.name], setting, known) for op in graph.ops.values()]
    gradients = sum(one.seconds(links) for one in sent if one.when == GRADIENTS)
    working = sum(one.work_seconds(links) for one in sent if one.when == GRADIENTS)
    hiding = setting.overlap * sum(own.hideable_seconds for own in owns)
    moved = [one for one in sent if one.when == FORWARD and one.kind != "all_reduce" and one.op != LOSS]
    return Prediction(
        compute_seconds=sum(own.compute_seconds for own in owns),
        communication_seconds=sum(one.seconds(links) for one in sent if one.when != GRADIENTS),
        gradient_seconds=working + max(0.0, gradients - working - hiding),
        memory_bytes=sum(own.memory_bytes for own in owns) + sum(one.values * one.item_bytes for one in moved),
        collectives=tuple(sent),
        sent_bytes=sum(links.sent_bytes(one.kind, one.axes, one.whole_bytes(mesh)) for one in sent),
        hiding_seconds=hiding,
    )


@dataclass(frozen=True)
class Sketch:
    """A problem, and the meaning of its choices."""

    problem: Problem  # as plain numbers
    groups: list[list[Op]]  # the ops of each node, which take the same letters
    choices: list[list[tuple[str, ...]]]  # the letters that each choice of a node stands for

    def letters(self, chosen: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
        """The letters of each op under an assignment."""
        return {op.name: self.choices[node][choice] for node, choice in enumerate(chosen) for op in self.groups[node]}

    def chosen(self, letters: Letters) -> list[int]:
        """The assignment that stands for letters; each must be among the choices."""
        return [choices.index(letters[ops[0].name]) for ops, choices in zip(self.groups, self.choices, strict=True)]


# Between these bytes and twice as many the line is drawn on which a conversion's seconds lie.
_FEW_BYTES = float(1 << 20)
Both = tuple[Layout, Layout]
Known = dict[Any, Any]
Fixed = Mapping[str, Mapping[int, str]]


def sketch(graph: Graph, setting: Setting, fixed: Fixed | None = None, known: Known | None = None) -> Sketch:
    """Creates the problem of sharding a network over a mesh.

    A conversion for several readers of an op is sent once, but counted here for each reader, because costs are between
    pairs; predictions count it once. `fixed` letters, by op and axis, are kept; `known` costs of ops are shared by a
    search's sketches.
    """
    groups = list(graph.ties().values())
    known = {} if known is None else known
    made: Known = {}
    rows = [_row(ops, setting, fixed or {}, known, made) for ops in groups]
    choices, nodes = [taken for taken, _ in rows], [costs for _, costs in rows]
    number = {op.name: node for node, ops in enumerate(groups) for op in ops}
    prices = _Conversions(setting)
    edges = [
        Edge(number[giver.name], number[reader.name], *prices.between(giver, reader, place, taken))
        for giver, reader, place in graph.edges()
        if giver.extents
        for taken in [(choices[number[giver.name]], choices[number[reader.name]])]
    ]
    names = [ops[0].name for ops in groups]
    problem = Problem(nodes, edges, setting.memory_limit_bytes, setting.overlap, names)
    return Sketch(problem, groups, choices)


def _row(
    ops: list[Op], setting: Setting, fixed: Fixed, known: Known, made: Known
) -> tuple[list[tuple[str, ...]], list[OpChoice]]:
    """The choices of ops that take the same letters, and their costs; computed once for all that are alike (`made`)."""
    pinned = [(place, *own) for place, op in enumerate(ops) for own in fixed.get(op.name, {}).items()]
    key = tuple((setting.work.signature(op), op.name == LOSS) for op in ops), tuple(pinned)
    if key not in made:
        taken = _choices(ops, setting, fixed, known)
        made[key] = taken, [_choice(ops, letters, setting, known) for letters in taken]
    return made[key]


def _own(op: Op, letters: tuple[str, ...], setting: Setting, known: Known) -> OpChoice:
    key = "own", setting.work.signature(op), _alike(letters, setting)
    if key not in known:
        known[key] = op_cost(op, letters, setting)
    return known[key]


def _choices(ops: list[Op], setting: Setting, fixed: Fixed, known: Known) -> list[tuple[str, ...]]:
    mesh = setting.mesh
    letters = [letter for letter in ops[0].allowed() if all(letter in op.allowed() for op in ops)]
    pinned = {axis: letter for op in ops for axis, letter in fixed.get(op.name, {}).items()}
    ways = [[pinned[axis]] if axis in pinned else letters for axis in range(len(mesh.axes))]
    return [taken for taken in itertools.product(*ways) if all(_may(op, taken, setting, known) for op in ops)]


def _alike(letters: tuple[str, ...], setting: Setting) -> Any:
    """Equal for letters, on whatever mesh, under which an op costs the same: where all links are alike, parts count."""
    if not setting.links.alike:
        return setting.mesh.sizes, letters
    parts: dict[str, int] = {}
    for letter, size in zip(letters, setting.mesh.sizes, strict=True):
        parts[letter] = parts.get(letter, 1) * size
    return tuple(sorted(parts.items()))


def _may(op: Op, letters: tuple[str, ...], setting: Setting, known: Known) -> bool:
    key = "may", setting.work.signature(op), _alike(letters, setting)
    if key not in known:
        mesh = setting.mesh
        idle = mesh.parts(batch_axes(letters)) > setting.work.batch
        repeats = any(letter == "r" and mesh.sizes[axis] > 1 for axis, letter in enumerate(letters))
        learns = any(tensor.requires_grad for tensor in setting.work.parameters(op).values())
        must = not op.batchwise or op.allowed() == ["r"]
        drifts = repeats and learns and not setting.repeat and not must
        known[key] = not idle and not drifts and not refusal(op, letters, mesh)
    return known[key]


def _choice(ops: list[Op], letters: tuple[str, ...], setting: Setting, known: Known) -> OpChoice:
    owns = [_own(op, letters, setting, known) for op in ops]
    loss = sum(_loss_seconds(letters, setting) for op in ops if op.name == LOSS)
    return OpChoice(
        seconds=loss + sum(own.seconds for own in owns),
        gradient_seconds=sum(own.gradient_seconds for own in owns),
        hideable_seconds=sum(own.hideable_seconds for own in owns),
        memory_bytes=sum(own.memory_bytes for own in owns),
    )


def _loss_seconds(letters: tuple[str, ...], setting: Setting) -> float:
    mesh = setting.mesh
    axes = real_axes([axis for axis, letter in enumerate(letters) if letter == "o"], mesh)
    rows = setting.work.batch / mesh.parts(batch_axes(letters))
    return sum(setting.links.seconds("all_reduce", axes, 4.0 * count * rows) for count in (1, 3)) if axes else 0.0


class _Conversions:
    """Seconds and bytes of conversions between all choices of two ops, each distinct matrix computed once."""

    def __init__(self, setting: Setting) -> None:
        self._setting, mesh = setting, setting.mesh
        self._path = functools.cache(lambda source, target: traffic(source, target, mesh))
        self._link_seconds = functools.cache(setting.links.seconds)
        self._known_matrices = functools.cache(self._matrices)
        self._known_line = functools.cache(self._line)
        self._layouts: dict[Any, tuple[Both, ...]] = {}

    def between(
        self, giver: Op, reader: Op, place: int, taken: tuple[list[tuple[str, ...]], list[tuple[str, ...]]]
    ) -> tuple[Matrix, Matrix | None]:
        """Seconds of both directions and bytes of the conversion, [choice of giver, choice of reader]."""
        size = float(giver.item_bytes * sum(extent.values(self._setting.work.batch) for extent in giver.extents))
        given = self._sides(giver, taken[0], lambda letters: output_layouts(giver, letters), "given")
        wanted = self._sides(reader, taken[1], lambda letters: input_layouts(reader, letters, place), place)
        return self._known_matrices(given, wanted, size, giver.trains and bool(reader.extents or reader.name == LOSS))

    def _sides(
        self, op: Op, taken: list[tuple[str, ...]], layouts: Callable[[tuple[str, ...]], Both], what: Any
    ) -> tuple[Both, ...]:
        """The layouts of all choices; ops that are alike share the list of these, which stays where it is."""
        key = self._setting.work.signature(op), op.name == LOSS, id(taken), what
        if key not in self._layouts:
            self._layouts[key] = tuple(layouts(letters) for letters in taken)
        return self._layouts[key]

    def _matrices(
        self, given: tuple[Both, ...], wanted: tuple[Both, ...], size: float, trains: bool
    ) -> tuple[Matrix, Matrix | None]:
        values = tuple(one[0] for one in given), tuple(one[0] for one in wanted)
        seconds = self._seconds(*values, size)
        if trains:
            back = tuple(one[1] for one in wanted), tuple(one[1] for one in given)
            seconds = seconds + self._seconds(*back, size).T
        if self._setting.memory_limit_bytes is None:
            return seconds, None
        return seconds, _spread(*values, lambda source, target: self._copied_bytes(source, target, size))

    def _seconds(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], size: float) -> Matrix:
        """Of all conversions; where links are formulas, and all alike, on a line over the bytes."""
        if not self._setting.links.alike or not size:
            return self._at(sources, targets, size)
        start, slope = self._known_line(sources, targets)
        return start + slope * size

    def _line(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> tuple[Matrix, Matrix]:
        few, many = self._at(sources, targets, _FEW_BYTES), self._at(sources, targets, 2 * _FEW_BYTES)
        return np.maximum(2 * few - many, 0.0), (many - few) / _FEW_BYTES

    def _at(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], size: float) -> Matrix:
        def price(source: Layout, target: Layout) -> float:
            steps = (step for step in self._path(source, target) if step[0] != "slice")
            return sum((self._link_seconds(kind, axes, share * size) for kind, axes, share in steps), 0.0)

        return _spread(sources, targets, price)

    def _copied_bytes(self, source: Layout, target: Layout, size: float) -> float:
        """Of a conversion, counted as `predict` counts them: the inputs of its collectives but all-reduces."""
        return sum(
            share * size / (self._setting.mesh.parts(axes) if kind == "all_gather" else 1)
            for kind, axes, share in self._path(source, target)
            if kind not in {"slice", "all_reduce"}
        )


def traffic(source: Layout, target: Layout, mesh: Mesh) -> list[tuple[str, tuple[int, ...], float]]:
    """(kind, axes, share of the whole tensor's bytes that it is about) of each step; "slice" sends nothing."""
    share = 1.0 / mesh.parts([axis for axis, here in enumerate(source) if isinstance(here, int)])
    found: list[tuple[str, tuple[int, ...], float]] = []
    for step in steps_between(source, target):
        group = mesh.parts(step.axes)
        share *= group if step.kind in {"all_gather", "pad"} else 1
        found.append((step.kind if step.communicates else "slice", step.axes, share))
        share /= group if step.kind in {"slice", "reduce_scatter"} else 1
    return found


def _spread(rows: Sequence[Layout], columns: Sequence[Layout], price: Callable[[Layout, Layout], float]) -> Matrix:
    """A matrix of prices, each distinct pair asked once."""
    some_rows, some_columns = list(dict.fromkeys(rows)), list(dict.fromkeys(columns))
    small = np.array([[price(row, column) for column in some_columns] for row in some_rows], dtype=float)
    small = small.reshape(len(some_rows), len(some_columns))
    row_numbers = {row: number for number, row in enumerate(some_rows)}
    column_numbers = {column: number for number, column in enumerate(some_columns)}
    return small[np.ix_([row_numbers[row] for row in rows], [column_numbers[column] for column in columns])]

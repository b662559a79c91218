"""Cost model of plans: op times under any sharding, the problem for the solver, and predicted step times.

Each op is timed once, on a data-parallel share of the batch. For another sharding, that time is scaled by the
operations and bytes per process.
"""

import copy
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx

from manyhands.core.mesh import Mesh
from manyhands.core.world import Share
from manyhands.parallel.mesh.placement import Layout, Side, conversion_steps
from manyhands.parallel.mesh.reduce import BUCKET_BYTES
from manyhands.parallel.split.execute import Letters, batch_axes, input_layouts, op_shardings, output_layouts
from manyhands.parallel.split.graph import LOSS, Graph, Op, Sharding, attribute_tensor
from manyhands.parallel.split.strategy import refusal
from manyhands.planner.collectives import FORWARD, GRADIENTS, Collective, PlannedUpdate, grouped_norm_layers, long_axes
from manyhands.planner.links import MeshLinks
from manyhands.planner.solve import Edge, Matrix, OpCost, Problem
from manyhands.planner.timing import OpTimes
from manyhands.sync.link_speeds import sent_bytes

T = TypeVar("T")
_BACKWARD = 2.0  # a backward pass computes the gradients of the inputs and of the parameters
_LEAST_FACTOR, _MOST_FACTOR = 0.02, 50.0


def local_share(sides: Sequence[Side], mesh: Mesh) -> float:
    """Returns the fraction of a tensor on one process. `sides`: the tensor's placement along each mesh axis."""
    return 1.0 / mesh.shard_count([axis for axis, side in enumerate(sides) if isinstance(side, int)])


def output_size(op: Op, batch: int) -> float:
    """Returns the number of values in the unsharded output of an op."""
    return sum(extent.values(batch) for extent in op.extents)


def parameter_share(op: Op, name: str, letters: tuple[str, ...], mesh: Mesh) -> float:
    return 1.0 / mesh.shard_count([axis for axis, one in enumerate(op_shardings(op, letters)) if name in one.cuts])


def parameter_bytes(op: Op, letters: tuple[str, ...], mesh: Mesh) -> float:
    """Returns the bytes of an op's parameters and buffers on one process."""
    return sum(
        parameter_share(op, name, letters, mesh) * tensor.numel() * tensor.element_size()
        for name, tensor in op.parameters().items()
    )


def forward_flops(op: Op, sources: list[Op], batch: int) -> float:
    """Returns the additions and multiplications in the forward pass of an unsharded op on `batch` samples."""
    if not op.extents:
        return 0.0
    given = output_size(op, batch)
    weights = [tensor for tensor in op.parameters().values() if tensor.ndim > 1]
    if op.kind in {"conv", "linear"} and weights:
        return 2.0 * given * math.prod(weights[0].shape[1:])
    summed = op.letters.get("i")
    if op.kind == "matmul" and isinstance(summed, Sharding):
        return 2.0 * given * summed.length
    if op.kind == "attention" and sources:
        tokens, width = sources[0].extent.dims[-2:]
        return given * (8.0 * width + 4.0 * tokens)
    # An op of unknown structure counts as a fully connected layer over all of its parameters.
    return given + 2.0 * batch * sum(tensor.numel() for tensor in weights) if op.kind == Op.kind else float(given)


class ShardedOpTimes:
    """Computes op times under any sharding. Updates have `batch` samples, divided among `processes` processes."""

    def __init__(self, graph: Graph, batch: int, processes: int, times: OpTimes) -> None:
        self.batch, self.estimate = batch, times.estimate
        self._graph, self._times, self._share_size = graph, times, max(1, batch // processes)
        self._factors: dict[str, float] = {}  # measured time divided by the estimate, by signature
        self._of_kind: dict[str, list[float]] = {}
        # by op: why the op can't run outside the network; the cost of such an op is estimated from its size
        self.untimed: dict[str, str] = {}
        # By name, because ops aren't hashable.
        self.parameters = functools.cache(lambda name: graph.ops[name].parameters())
        self.signature = functools.cache(self._signature)

    def _sources(self, op: Op) -> list[Op]:
        return [self._graph.ops[name] for name in op.sources]

    def _signature(self, name: str) -> str:
        """Returns a key that is equal for ops with equal costs under the same sharding."""
        op = self._graph.ops[name]
        reads = [(one.extents, one.trains) for one in self._sources(op)]
        learns = [tensor.requires_grad for tensor in op.parameters().values()]
        return repr((self._op_key(op), reads, learns, op.batchwise, op.letters))

    def _op_key(self, op: Op) -> str:
        """Returns a description of the op for cache keys, without memory addresses, which differ between processes."""
        target = getattr(op.node, "target", "")
        name = repr(op.module) if op.module is not None else getattr(target, "__name__", str(target))
        shapes = [tuple(tensor.shape) for tensor in op.parameters().values()]
        reads = [tuple(extent.dims for extent in one.extents) for one in self._sources(op)]
        return f"{op.kind} {name} {shapes} {reads} {op.dtype}"

    def seconds(self, op: Op, letters: tuple[str, ...], mesh: Mesh) -> tuple[float, float]:
        """Returns (forward seconds, backward seconds) of an op in one update on one process."""
        if not op.extents or not op.sources:
            return 0.0, 0.0
        chosen = op_shardings(op, letters)
        cut = mesh.shard_count([axis for axis, letter in enumerate(letters) if letter != "r"])
        read = 0.0
        for place, source in enumerate(self._sources(op)):
            size_bytes = output_size(source, self.batch) * source.item_bytes
            read += local_share([one.inputs[place] for one in chosen], mesh) * size_bytes
        given = local_share([one.output for one in chosen], mesh) * output_size(op, self.batch)
        moved = read + given * op.item_bytes + parameter_bytes(op, letters, mesh)
        # Measure the op before any estimate, because the rates follow from measurements.
        if (key := self.signature(op.name)) not in self._factors:
            self._factors[key] = self._measured_ratio(op)
        work = forward_flops(op, self._sources(op), self.batch) / cut
        forward = self._factors[key] * self.estimate(work, moved)
        return forward, forward * self._backward_factor(op)

    def _backward_factor(self, op: Op) -> float:
        if not op.trains:
            return 0.0
        return _BACKWARD if any(one.trains for one in self._sources(op)) else _BACKWARD / 2

    def _measured_ratio(self, op: Op) -> float:
        """Returns the measured time of an op divided by its estimate, or if untimed the median ratio of its kind."""
        runs = _op_runner(op, self._graph, self._share_size)
        known = self._of_kind.setdefault(op.kind, [])
        usual = statistics.median(known) if known else 1.0
        if runs is None:
            return usual
        sources, directions = self._sources(op), 1 + self._backward_factor(op)
        work = forward_flops(op, sources, self._share_size)
        held = sum(tensor.numel() * tensor.element_size() for tensor in op.parameters().values())
        passed = sum(output_size(one, self.batch) * one.item_bytes for one in [op, *sources])
        moved = held + self._share_size / self.batch * passed
        before = self._times.measured
        key = f"{self._share_size} samples, {self._backward_factor(op):.0f} backward: {self._op_key(op)}"
        taken = self._times.seconds(key, runs, work * directions, moved * directions)
        if key in self._times.failed:
            self.untimed[op.name] = self._times.failed[key]
        estimate = self.estimate(work, moved) * directions
        if self._times.measured == before and taken == estimate:
            return usual
        known.append(min(_MOST_FACTOR, max(_LEAST_FACTOR, taken / max(estimate, 1e-12))))
        return known[-1]


def _op_runner(op: Op, graph: Graph, batch: int) -> Callable[[], Callable[[], object]] | None:
    """Returns a factory of functions that run forward and backward of an op, or None if the op can't run alone."""
    node = op.node
    if node is None or node.op not in {"call_module", "call_function", "call_method"} or op.name == LOSS:
        return None
    givers = {one.node: one for one in graph.ops.values() if one.node is not None}
    reads = [givers.get(source, graph.ops[next(iter(graph.ops))]) for source in node.all_input_nodes]
    if any(len(one.extents) != 1 for one in reads):
        return None
    device = next((tensor.device for tensor in graph.parameters.values()), torch.device("cpu"))

    def make() -> Callable[[], object]:
        module = copy.deepcopy(op.module)
        tensors = {source: _input(one, batch, device) for source, one in zip(node.all_input_nodes, reads, strict=True)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: tensors[source])
        return lambda: _run_once(module, node, args, kwargs, [*tensors.values()])

    return make


def _input(source: Op, batch: int, device: torch.device) -> Tensor:
    """Creates the output of op `source` as input of another op: its parameter, or random floats, or zero integers."""
    if source.reads_attribute:
        own = attribute_tensor(source.node).detach()
        return own.requires_grad_() if source.trains and own.is_floating_point() else own
    extent = source.extent
    dims = (batch * extent.rows, *extent.dims[1:]) if extent.rows else extent.dims
    if not source.dtype.is_floating_point:
        return torch.zeros(dims, dtype=source.dtype, device=device)
    return torch.randn(dims, dtype=source.dtype, device=device, requires_grad=source.trains)


def _run_once(module: Any, node: fx.Node, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
    with torch.random.fork_rng(devices=[]):
        if module is not None:
            result = module(*args, **kwargs)
        elif node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            function: Any = node.target
            result = function(*args, **kwargs)
    result = result[0] if isinstance(result, tuple) else result
    wanted = [one for one in inputs if one.requires_grad]
    wanted += [one for one in module.parameters() if one.requires_grad] if module is not None else []
    if wanted and isinstance(result, Tensor) and result.requires_grad:
        torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)


def largest_shard_shape(op: Op, letters: tuple[str, ...], mesh: Mesh, batch: int) -> list[int]:
    """Returns the shape of an op's output on the last rank, whose shard is largest. Returns [] without a tensor."""
    if not op.extents:
        return []
    sides = [one.output for one in op_shardings(op, letters)]
    cuts = [[axis for axis, side in enumerate(sides) if side == dim] for dim in range(len(op.extent.dims))]
    edges = [op.extent.edges(dim, mesh.shard_count(axes), batch) for dim, axes in enumerate(cuts)]
    return [one[-1] - one[-2] for one in edges]


@dataclass(frozen=True)
class CostInputs:
    """The inputs of the cost model, apart from the sharding."""

    work: ShardedOpTimes  # seconds of ops
    links: MeshLinks  # seconds of collectives, on a mesh
    share: Callable[[int, int], Share]  # see `PlannedUpdate.share`
    slots: int = 1  # values that the optimizer keeps for each parameter
    overlap: float = 0.3  # fraction of the backward pass that can hide gradient collectives
    # allow replicated ops with parameters; False if kernels sum in varying order, because replicas would diverge
    repeat: bool = True
    memory_limit_bytes: float | None = None  # per process
    scale: float = 1.0  # measured seconds of an update divided by the sum over ops; 1: no update was timed
    # results of `cached`, shared by settings that differ only in the mesh
    known: dict[Any, Any] = field(default_factory=dict[Any, Any], compare=False, repr=False)

    @property
    def mesh(self) -> Mesh:
        return self.links.mesh

    def cached(self, function: "Callable[[Op, tuple[str, ...], CostInputs], T]", op: Op, letters: tuple[str, ...]) -> T:
        """Returns `function(op, letters, self)`, cached by the op's signature. Axes with equal links count as equal."""
        alike: Any = self.mesh.sizes, letters
        if self.links.alike:
            parts: dict[str, int] = {}
            for letter, size in zip(letters, self.mesh.sizes, strict=True):
                parts[letter] = parts.get(letter, 1) * size
            alike = tuple(sorted(parts.items()))
        key = function, self.work.signature(op.name), alike
        if key not in self.known:
            self.known[key] = function(op, letters, self)
        return self.known[key]


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one update on one process."""

    compute_seconds: float  # forward, backward and the optimizer
    communication_seconds: float  # collectives that ops wait for
    gradient_seconds: float  # gradient collectives that computation doesn't hide
    memory_bytes: float  # peak of a process
    collectives: tuple[Collective, ...]
    sent_bytes: float  # per process
    hiding_seconds: float = 0.0  # computation that can hide gradient collectives

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


def _op_cost(op: Op, letters: tuple[str, ...], setting: CostInputs) -> OpCost:
    """Returns the cost of an op on one process, without conversions of its inputs' layouts."""
    mesh, work, links, shardings = setting.mesh, setting.work, setting.links, op_shardings(op, letters)
    forward, backward = work.seconds(op, letters, mesh)
    held = sent = sending = working = 0.0  # parameter bytes, sent gradient bytes; seconds of sending, and of busy cores
    for name, tensor in work.parameters(op.name).items():
        if tensor.requires_grad:
            size = parameter_share(op, name, letters, mesh) * tensor.numel() * tensor.element_size()
            held += size
            if axes := long_axes([axis for axis, one in enumerate(shardings) if name in one.partial], mesh):
                sent += size
                sending += size / BUCKET_BYTES * links.seconds("all_reduce", axes, BUCKET_BYTES)
                working += size / BUCKET_BYTES * links.work_seconds("all_reduce", axes, BUCKET_BYTES)
    saved = op.item_bytes * output_size(op, work.batch) if op.trains else 0.0
    saved *= local_share([one.output for one in shardings], mesh)
    layers, axes = grouped_norm_layers(op), long_axes(batch_axes(letters), mesh)
    shared = len(setting.share(mesh.shard_count(axes), 0).shared_groups) if axes and layers else 0
    norms = sum(2 * links.seconds("all_reduce", axes, 16.0 * shared * layer.num_features) for layer in layers)
    compute = setting.scale * (forward + backward + work.estimate(0.0, held * (3 + 2 * setting.slots)))
    return OpCost(
        seconds=compute + norms + working,
        gradient_seconds=sending - working,
        hideable_seconds=setting.scale * backward,
        memory_bytes=held * (2 + setting.slots) + sent + saved,
        compute_seconds=compute,
    )


def predict(graph: Graph, letters: Letters, setting: CostInputs) -> Prediction:
    """Predicts the cost of one update of a network sharded by `letters`, on the process with the largest shards."""
    mesh, links = setting.mesh, setting.links
    sent = PlannedUpdate(graph, letters, mesh, setting.work.batch, setting.share, mesh.size - 1).collectives()
    owns = [setting.cached(_op_cost, op, letters[op.name]) for op in graph.ops.values()]
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
        sent_bytes=sum(sent_bytes(one.kind, mesh.shard_count(one.axes), one.whole_bytes(mesh)) for one in sent),
        hiding_seconds=hiding,
    )


Choices = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LabelledProblem:
    """A problem for the solver, with the ops that its nodes stand for and the shardings that choices stand for."""

    problem: Problem  # numbers only
    groups: list[list[Op]]  # tied ops of each node; tied ops share their letters
    choices: list[Choices]  # letters of each choice of each node

    def letters(self, chosen: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
        """Returns {op: letters}. `chosen` has the index of each node's choice."""
        return {op.name: self.choices[node][choice] for node, choice in enumerate(chosen) for op in self.groups[node]}


# The seconds of a conversion are modeled as linear in the bytes, fitted at this size and at twice this size.
_FEW_BYTES = float(1 << 20)
LayoutPair = tuple[Layout, Layout]
Fixed = Mapping[str, Mapping[int, str]]


def sharding_problem(graph: Graph, setting: CostInputs, fixed: Fixed | None = None) -> LabelledProblem:
    """Creates the solver's problem of sharding a network over a mesh. `fixed`: {op: {axis index: required letter}}.

    If several ops read the same tensor, the problem counts a conversion for each of them, because an edge connects two
    ops; `predict` counts equal conversions once.
    """
    groups = list(graph.ops_by_tie().values())
    rows: dict[Any, tuple[Choices, list[OpCost]]] = {}  # by the ops' signatures
    choices, nodes = list[Choices](), list[list[OpCost]]()
    for ops in groups:
        pinned = {(place, *own) for place, op in enumerate(ops) for own in (fixed or {}).get(op.name, {}).items()}
        key = tuple((setting.work.signature(op.name), op.name == LOSS) for op in ops), frozenset(pinned)
        if key not in rows:
            taken = _valid_choices(ops, setting, {axis: letter for _, axis, letter in pinned})
            rows[key] = taken, [_choice_cost(ops, letters, setting) for letters in taken]
        choices.append(rows[key][0])
        nodes.append(rows[key][1])
    number = {op.name: node for node, ops in enumerate(groups) for op in ops}
    prices, edges = _Conversions(setting), list[Edge]()
    for giver, reader, place in graph.edges():
        if giver.extents:
            a, b = number[giver.name], number[reader.name]
            edges.append(Edge(a, b, *prices.cost_matrices(giver, reader, place, choices[a], choices[b])))
    names = [ops[0].name for ops in groups]
    problem = Problem(nodes, edges, setting.memory_limit_bytes, setting.overlap, names)
    return LabelledProblem(problem, groups, choices)


def _valid_choices(ops: list[Op], setting: CostInputs, pinned: Mapping[int, str]) -> Choices:
    letters = [letter for letter in ops[0].allowed_letters() if all(letter in op.allowed_letters() for op in ops)]
    ways = [[pinned[axis]] if axis in pinned else letters for axis in range(len(setting.mesh.axes))]
    return tuple(taken for taken in itertools.product(*ways) if all(setting.cached(_is_valid, op, taken) for op in ops))


def _is_valid(op: Op, letters: tuple[str, ...], setting: CostInputs) -> bool:
    mesh = setting.mesh
    idle = mesh.shard_count(batch_axes(letters)) > setting.work.batch
    repeats = any(letter == "r" and mesh.sizes[axis] > 1 for axis, letter in enumerate(letters))
    learns = any(tensor.requires_grad for tensor in setting.work.parameters(op.name).values())
    must = not op.batchwise or op.allowed_letters() == ["r"]
    drifts = repeats and learns and not setting.repeat and not must
    return not idle and not drifts and not refusal(op, letters, mesh)


def _choice_cost(ops: list[Op], letters: tuple[str, ...], setting: CostInputs) -> OpCost:
    """Returns the total cost of tied ops, with the all-reduces of the loss if classes are sharded."""
    mesh, loss = setting.mesh, 0.0
    axes = long_axes([axis for axis, letter in enumerate(letters) if letter == "o"], mesh)
    if axes and any(op.name == LOSS for op in ops):
        rows = setting.work.batch / mesh.shard_count(batch_axes(letters))
        loss = sum(setting.links.seconds("all_reduce", axes, 4.0 * count * rows) for count in (1, 3))
    return sum((setting.cached(_op_cost, op, letters) for op in ops), OpCost(loss))


class _Conversions:
    """Computes and caches the cost of converting layouts, for each pair of sharding choices of two connected ops."""

    def __init__(self, setting: CostInputs) -> None:
        self._setting, mesh = setting, setting.mesh
        self._path = functools.cache(lambda source, target: conversion_traffic(source, target, mesh))
        self._link_seconds = functools.cache(setting.links.seconds)
        self._known_matrices = functools.cache(self._matrices)
        self._known_line = functools.cache(self._fit_line)
        self._layouts: dict[Any, tuple[LayoutPair, ...]] = {}

    def cost_matrices(
        self, giver: Op, reader: Op, place: int, gives: Choices, reads: Choices
    ) -> tuple[Matrix, Matrix | None]:
        """Returns matrices [giver choice, reader choice]: seconds of both passes, and bytes (None without a limit)."""
        given, wanted = self._layouts_of(giver, gives), self._layouts_of(reader, reads, place)
        size = float(giver.item_bytes * output_size(giver, self._setting.work.batch))
        return self._known_matrices(given, wanted, size, giver.trains and bool(reader.extents or reader.name == LOSS))

    def _layouts_of(self, op: Op, taken: Choices, place: int | None = None) -> tuple[LayoutPair, ...]:
        """Returns (value layout, gradient layout) of an op's output, or of input `place`, for each choice."""
        key = self._setting.work.signature(op.name), op.name == LOSS, taken, place
        if key not in self._layouts:
            self._layouts[key] = tuple(
                output_layouts(op, letters) if place is None else input_layouts(op, letters, place) for letters in taken
            )
        return self._layouts[key]

    def _matrices(
        self, given: tuple[LayoutPair, ...], wanted: tuple[LayoutPair, ...], size: float, trains: bool
    ) -> tuple[Matrix, Matrix | None]:
        values = tuple(one[0] for one in given), tuple(one[0] for one in wanted)
        seconds = self._seconds(*values, size)
        if trains:
            back = tuple(one[1] for one in wanted), tuple(one[1] for one in given)
            seconds = seconds + self._seconds(*back, size).T
        if self._setting.memory_limit_bytes is None:
            return seconds, None
        return seconds, _pairwise(*values, lambda source, target: self._copied_bytes(source, target, size))

    def _seconds(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], size: float) -> Matrix:
        """Returns the seconds of conversions [source, target]. If all links are equal, they are linear in `size`."""
        if not self._setting.links.alike or not size:
            return self._seconds_at(sources, targets, size)
        start, slope = self._known_line(sources, targets)
        return start + slope * size

    def _fit_line(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> tuple[Matrix, Matrix]:
        few, many = self._seconds_at(sources, targets, _FEW_BYTES), self._seconds_at(sources, targets, 2 * _FEW_BYTES)
        return np.maximum(2 * few - many, 0.0), (many - few) / _FEW_BYTES

    def _seconds_at(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], size: float) -> Matrix:
        def price(source: Layout, target: Layout) -> float:
            steps = (step for step in self._path(source, target) if step[0] != "slice")
            return sum((self._link_seconds(kind, axes, share * size) for kind, axes, share in steps), 0.0)

        return _pairwise(sources, targets, price)

    def _copied_bytes(self, source: Layout, target: Layout, size: float) -> float:
        """Returns the memory that a conversion needs in bytes: the inputs of its collectives except all-reduces."""
        return sum(
            share * size / (self._setting.mesh.shard_count(axes) if kind == "all_gather" else 1)
            for kind, axes, share in self._path(source, target)
            if kind not in {"slice", "all_reduce"}
        )


def conversion_traffic(source: Layout, target: Layout, mesh: Mesh) -> list[tuple[str, tuple[int, ...], float]]:
    """Returns (kind, axes, fraction of the unsharded tensor) of each step of a conversion. "slice" sends nothing."""
    share = 1.0 / mesh.shard_count([axis for axis, here in enumerate(source) if isinstance(here, int)])
    found: list[tuple[str, tuple[int, ...], float]] = []
    for step in conversion_steps(source, target):
        group = mesh.shard_count(step.axes)
        share *= group if step.kind in {"all_gather", "pad"} else 1
        found.append((step.kind if step.communicates else "slice", step.axes, share))
        share /= group if step.kind in {"slice", "reduce_scatter"} else 1
    return found


def _pairwise(rows: Sequence[Layout], columns: Sequence[Layout], price: Callable[[Layout, Layout], float]) -> Matrix:
    """Returns the matrix of `price(row, column)`. Computes the price of equal pairs once."""
    some_rows, some_columns = list(dict.fromkeys(rows)), list(dict.fromkeys(columns))
    small = np.array([[price(row, column) for column in some_columns] for row in some_rows], dtype=float)
    small = small.reshape(len(some_rows), len(some_columns))
    row_numbers = {row: number for number, row in enumerate(some_rows)}
    column_numbers = {column: number for number, column in enumerate(some_columns)}
    return small[np.ix_([row_numbers[row] for row in rows], [column_numbers[column] for column in columns])]

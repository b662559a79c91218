"""Predicts the time of an op on a process's shard: from operations and bytes, scaled by a measurement of the op.

Each op is measured once, with its data-parallel shard, and all other shardings are scaled by the operations and bytes
of a process. So all choices of an op are based on the same measurement, and a network of 50 layers needs 50
measurements, whatever the mesh.
"""

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from manyhands.core.mesh import Mesh
from manyhands.parallel.mesh.placement import Side
from manyhands.parallel.split.execute import loops_of
from manyhands.parallel.split.graph import LOSS, Graph, Loop, Op, attribute
from manyhands.planner.timing import OpTimes

# A backward pass computes the gradient of what was read and that of the parameters.
_BACKWARD = 2.0
_LEAST_FACTOR, _MOST_FACTOR = 0.02, 50.0


def part(sides: Sequence[Side], mesh: Mesh) -> float:
    """Returns the fraction of a tensor's values on a process."""
    return 1.0 / mesh.parts([axis for axis, side in enumerate(sides) if isinstance(side, int)])


def parameter_part(op: Op, name: str, letters: tuple[str, ...], mesh: Mesh) -> float:
    """Returns the fraction of a parameter's values on a process."""
    return 1.0 / mesh.parts([axis for axis, loop in enumerate(loops_of(op, letters)) if name in loop.cuts])


def operations(op: Op, sources: list[Op], batch: int) -> float:
    """Returns the additions and multiplications of the unsharded op in forward."""
    if not op.extents:
        return 0.0
    values = sum(extent.values(batch) for extent in op.extents)
    weights = [tensor for tensor in op.parameters().values() if tensor.ndim > 1]
    if op.kind in {"conv", "linear"} and weights:
        return 2.0 * values * math.prod(weights[0].shape[1:])
    summed = op.letters.get("i")
    if op.kind == "matmul" and isinstance(summed, Loop):
        return 2.0 * values * summed.length
    if op.kind == "attention" and sources:
        tokens, width = sources[0].extent.dims[-2:]
        return values * (8.0 * width + 4.0 * tokens)
    # A part that nobody looks into is taken for a fully connected layer over all of its parameters.
    return values + 2.0 * batch * sum(tensor.numel() for tensor in weights) if op.kind == Op.kind else float(values)


class Work:
    """Seconds of a network's ops under any sharding, in an update of `batch` samples divided among `processes`."""

    def __init__(self, graph: Graph, batch: int, processes: int, times: OpTimes) -> None:
        self._graph, self._batch, self._times = graph, batch, times
        self._piece = max(1, batch // processes)
        self._factors: dict[str, float] = {}
        self._signatures: dict[str, str] = {}
        self._parameters: dict[str, dict[str, Tensor]] = {}
        self._operations: dict[str, float] = {}
        self._of_kind: dict[str, list[float]] = {}
        # ops that failed when they ran by themselves, and so are priced by their size, with the reason
        self.untimed: dict[str, str] = {}
        self.scale = 1.0  # how many times as long as the sum of its ops an update takes, where one was timed whole

    def parameters(self, op: Op) -> dict[str, Tensor]:
        if op.name not in self._parameters:
            self._parameters[op.name] = op.parameters()
        return self._parameters[op.name]

    @property
    def batch(self) -> int:
        return self._batch

    def sources(self, op: Op) -> list[Op]:
        return [self._graph.ops[name] for name in op.sources]

    def signature(self, op: Op) -> str:
        """Returns a value that is equal for ops with the same cost under the same sharding."""
        if op.name not in self._signatures:
            reads = [(one.extents, one.trains) for one in self.sources(op)]
            learns = [tensor.requires_grad for tensor in op.parameters().values()]
            said = repr((self._kernel(op), reads, learns, op.batchwise, op.letters))
            self._signatures[op.name] = said
        return self._signatures[op.name]

    def _kernel(self, op: Op) -> str:
        """What is computed, for files that outlive this process: no addresses in it."""
        target = getattr(op.node, "target", "")
        name = repr(op.module) if op.module is not None else getattr(target, "__name__", str(target))
        shapes = [tuple(tensor.shape) for tensor in op.parameters().values()]
        reads = [tuple(extent.dims for extent in one.extents) for one in self.sources(op)]
        return f"{op.kind} {name} {shapes} {reads} {op.dtype}"

    def seconds(self, op: Op, letters: tuple[str, ...], mesh: Mesh) -> tuple[float, float]:
        """Returns seconds of an op's forward and backward on one process in one update."""
        if not op.extents or not op.sources:
            return 0.0, 0.0
        loops = loops_of(op, letters)
        cut = mesh.parts([axis for axis, letter in enumerate(letters) if letter != "r"])
        read = 0.0
        for place, source in enumerate(self.sources(op)):
            share = part([loop.inputs[place] for loop in loops], mesh)
            read += share * sum(extent.values(self._batch) for extent in source.extents) * source.item_bytes
        given = part([loop.output for loop in loops], mesh) * sum(extent.values(self._batch) for extent in op.extents)
        held = sum(
            parameter_part(op, name, letters, mesh) * tensor.numel() * tensor.element_size()
            for name, tensor in self.parameters(op).items()
        )
        if op.name not in self._operations:
            self._operations[op.name] = operations(op, self.sources(op), self._batch)
        moved = read + given * op.item_bytes + held
        # An op is measured before anything is estimated, since rates follow from what was measured.
        factor = self.factor(op)
        forward = self.scale * factor * self._times.estimate(self._operations[op.name] / cut, moved)
        return forward, forward * self._backward(op)

    def update_seconds(self, moved_bytes: float) -> float:
        """Returns seconds of the optimizer, which reads and writes this many bytes."""
        return self.scale * self._times.estimate(0.0, moved_bytes)

    def _backward(self, op: Op) -> float:
        if not op.trains:
            return 0.0
        return _BACKWARD if any(one.trains for one in self.sources(op)) else _BACKWARD / 2

    def factor(self, op: Op) -> float:
        """Returns the ratio of an op's measured time to the estimate; if it can't be timed, that of its kind."""
        key = self.signature(op)
        if key not in self._factors:
            self._factors[key] = self._measured(op)
        return self._factors[key]

    def _measured(self, op: Op) -> float:
        runs = _runner(op, self._graph, self._piece)
        known = self._of_kind.setdefault(op.kind, [])
        usual = statistics.median(known) if known else 1.0
        if runs is None:
            return usual
        share = self._piece / self._batch
        sources = self.sources(op)
        work = operations(op, sources, self._piece)
        held = sum(tensor.numel() * tensor.element_size() for tensor in op.parameters().values())
        moved = held + share * sum(
            extent.values(self._batch) * one.item_bytes for one in [op, *sources] for extent in one.extents
        )
        directions = 1 + self._backward(op)
        before = self._times.measured
        key = f"{self._piece} samples, {self._backward(op):.0f} backward: {self._kernel(op)}"
        taken = self._times.seconds(key, runs, work * directions, moved * directions)
        if key in self._times.failed:
            self.untimed[op.name] = self._times.failed[key]
        estimate = self._times.estimate(work, moved) * directions
        if self._times.measured == before and taken == estimate:
            return usual
        factor = min(_MOST_FACTOR, max(_LEAST_FACTOR, taken / max(estimate, 1e-12)))
        known.append(factor)
        return factor


def _runner(op: Op, graph: Graph, batch: int) -> Callable[[], Callable[[], object]] | None:
    """What makes a function that runs the op and its backward pass once; None where it can't run by itself."""
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
        tensors = {source: _tensor(one, batch, device) for source, one in zip(node.all_input_nodes, reads, strict=True)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: tensors[source])
        return lambda: _once(module, node, args, kwargs, [*tensors.values()])

    return make


def _tensor(source: Op, batch: int, device: torch.device) -> Tensor:
    """What an op may read: the network's own parameter or buffer, random numbers, or zeros, which index anything."""
    if source.reads_attribute:
        own = attribute(source.node).detach()
        return own.requires_grad_() if source.trains and own.is_floating_point() else own
    extent = source.extent
    dims = (batch * extent.rows, *extent.dims[1:]) if extent.rows else extent.dims
    if not source.dtype.is_floating_point:
        return torch.zeros(dims, dtype=source.dtype, device=device)
    return torch.randn(dims, dtype=source.dtype, device=device, requires_grad=source.trains)


def _once(module: Any, node: fx.Node, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
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


def piece_shape(op: Op, letters: tuple[str, ...], mesh: Mesh, batch: int) -> list[int]:
    """Returns the shape of an op's output on the last process, which has the largest shards; [] if it is no tensor."""
    if not op.extents:
        return []
    sides = [loop.output for loop in loops_of(op, letters)]
    shape: list[int] = []
    for dim in range(len(op.extent.dims)):
        edges = op.extent.edges(dim, mesh.parts([axis for axis, side in enumerate(sides) if side == dim]), batch)
        shape.append(edges[-1] - edges[-2])
    return shape

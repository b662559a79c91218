"""Predicts the time of an op on a process's shard: from operations and bytes, scaled by a measurement of the op.

Each op is measured once, with its data-parallel shard, and all other shardings are scaled by the operations and bytes
of a process. So all choices of an op are based on the same measurement, and a network of 50 layers needs 50
measurements, whatever the mesh.
"""

import copy
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from manyhands.core.mesh import Mesh
from manyhands.parallel.execute import loops_of
from manyhands.parallel.graph import LOSS, Graph, Loop, Op, attribute
from manyhands.parallel.placement import Side
from manyhands.planner.timing import OpTimes

# A backward pass computes the gradient of what was read and that of the parameters.
_BACKWARD = 2.0
_LEAST_FACTOR, _MOST_FACTOR = 0.02, 50.0


def part(sides: Sequence[Side], mesh: Mesh) -> float:
    """Returns the fraction of a tensor's values on a process."""
    return 1.0 / mesh.parts([axis for axis, side in enumerate(sides) if isinstance(side, int)])


def values(op: Op, batch: int) -> float:
    """Returns the values of an unsharded op's output."""
    return sum(extent.values(batch) for extent in op.extents)


def parameter_part(op: Op, name: str, letters: tuple[str, ...], mesh: Mesh) -> float:
    """Returns the fraction of a parameter's values on a process."""
    return 1.0 / mesh.parts([axis for axis, loop in enumerate(loops_of(op, letters)) if name in loop.cuts])


def parameter_bytes(op: Op, letters: tuple[str, ...], mesh: Mesh) -> float:
    """Returns the bytes of an op's parameters and buffers on a process."""
    return sum(
        parameter_part(op, name, letters, mesh) * tensor.numel() * tensor.element_size()
        for name, tensor in op.parameters().items()
    )


def operations(op: Op, sources: list[Op], batch: int) -> float:
    """Returns the additions and multiplications of the unsharded op in forward."""
    if not op.extents:
        return 0.0
    given = values(op, batch)
    weights = [tensor for tensor in op.parameters().values() if tensor.ndim > 1]
    if op.kind in {"conv", "linear"} and weights:
        return 2.0 * given * math.prod(weights[0].shape[1:])
    summed = op.letters.get("i")
    if op.kind == "matmul" and isinstance(summed, Loop):
        return 2.0 * given * summed.length
    if op.kind == "attention" and sources:
        tokens, width = sources[0].extent.dims[-2:]
        return given * (8.0 * width + 4.0 * tokens)
    # A part that nobody looks into is taken for a fully connected layer over all of its parameters.
    return given + 2.0 * batch * sum(tensor.numel() for tensor in weights) if op.kind == Op.kind else float(given)


class Work:
    """Seconds of a network's ops under any sharding, in an update of `batch` samples divided among `processes`."""

    def __init__(self, graph: Graph, batch: int, processes: int, times: OpTimes) -> None:
        self.batch, self.estimate = batch, times.estimate
        self._graph, self._times, self._piece = graph, times, max(1, batch // processes)
        self._factors: dict[str, float] = {}  # by signature
        self._of_kind: dict[str, list[float]] = {}
        # ops that failed when they ran by themselves, and so are priced by their size, with the reason
        self.untimed: dict[str, str] = {}
        # By name, since ops aren't hashable.
        self.parameters = functools.cache(lambda name: graph.ops[name].parameters())
        self.signature = functools.cache(self._signature)
        self._operations = functools.cache(
            lambda name: operations(graph.ops[name], self._sources(graph.ops[name]), batch)
        )

    def _sources(self, op: Op) -> list[Op]:
        return [self._graph.ops[name] for name in op.sources]

    def _signature(self, name: str) -> str:
        """Returns a value that is equal for ops with the same cost under the same sharding."""
        op = self._graph.ops[name]
        reads = [(one.extents, one.trains) for one in self._sources(op)]
        learns = [tensor.requires_grad for tensor in op.parameters().values()]
        return repr((self._kernel(op), reads, learns, op.batchwise, op.letters))

    def _kernel(self, op: Op) -> str:
        """What is computed, for files that outlive this process: no addresses in it."""
        target = getattr(op.node, "target", "")
        name = repr(op.module) if op.module is not None else getattr(target, "__name__", str(target))
        shapes = [tuple(tensor.shape) for tensor in op.parameters().values()]
        reads = [tuple(extent.dims for extent in one.extents) for one in self._sources(op)]
        return f"{op.kind} {name} {shapes} {reads} {op.dtype}"

    def seconds(self, op: Op, letters: tuple[str, ...], mesh: Mesh) -> tuple[float, float]:
        """Returns seconds of an op's forward and backward on one process in one update."""
        if not op.extents or not op.sources:
            return 0.0, 0.0
        loops = loops_of(op, letters)
        cut = mesh.parts([axis for axis, letter in enumerate(letters) if letter != "r"])
        read = 0.0
        for place, source in enumerate(self._sources(op)):
            read += part([loop.inputs[place] for loop in loops], mesh) * values(source, self.batch) * source.item_bytes
        given = part([loop.output for loop in loops], mesh) * values(op, self.batch)
        moved = read + given * op.item_bytes + parameter_bytes(op, letters, mesh)
        # An op is measured before anything is estimated, since rates follow from what was measured.
        factor = self._factor(op)
        forward = factor * self.estimate(self._operations(op.name) / cut, moved)
        return forward, forward * self._backward(op)

    def _backward(self, op: Op) -> float:
        if not op.trains:
            return 0.0
        return _BACKWARD if any(one.trains for one in self._sources(op)) else _BACKWARD / 2

    def _factor(self, op: Op) -> float:
        """Returns the ratio of an op's measured time to the estimate; if it can't be timed, that of its kind."""
        key = self.signature(op.name)
        if key not in self._factors:
            self._factors[key] = self._measured(op)
        return self._factors[key]

    def _measured(self, op: Op) -> float:
        runs = _runner(op, self._graph, self._piece)
        known = self._of_kind.setdefault(op.kind, [])
        usual = statistics.median(known) if known else 1.0
        if runs is None:
            return usual
        sources, directions = self._sources(op), 1 + self._backward(op)
        work = operations(op, sources, self._piece)
        held = sum(tensor.numel() * tensor.element_size() for tensor in op.parameters().values())
        moved = held + self._piece / self.batch * sum(
            values(one, self.batch) * one.item_bytes for one in [op, *sources]
        )
        before = self._times.measured
        key = f"{self._piece} samples, {self._backward(op):.0f} backward: {self._kernel(op)}"
        taken = self._times.seconds(key, runs, work * directions, moved * directions)
        if key in self._times.failed:
            self.untimed[op.name] = self._times.failed[key]
        estimate = self.estimate(work, moved) * directions
        if self._times.measured == before and taken == estimate:
            return usual
        known.append(min(_MOST_FACTOR, max(_LEAST_FACTOR, taken / max(estimate, 1e-12))))
        return known[-1]


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
    cuts = [[axis for axis, side in enumerate(sides) if side == dim] for dim in range(len(op.extent.dims))]
    edges = [op.extent.edges(dim, mesh.parts(axes), batch) for dim, axes in enumerate(cuts)]
    return [one[-1] - one[-2] for one in edges]

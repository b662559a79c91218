"""Executes a network under a plan: shards its parameters, and converts tensors between differently sharded ops."""

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, shard_boundaries, unsharded_layout
from manyhands.core.seeds import mix
from manyhands.parallel.mesh import placement
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.network import MicroBatchShape
from manyhands.parallel.replicas.batch_norm import GroupedNorm, NormGroups
from manyhands.parallel.split.graph import INPUT, LOSS, Graph, Op, Sharding
from manyhands.parallel.split.tracing import find_rule

Letters = Mapping[str, tuple[str, ...]]
_DEPTH = "stochastic_depth"  # torchvision's function, which drops all channels of a sample or none


def op_shardings(op: Op, letters: tuple[str, ...]) -> list[Sharding]:
    return [cast(Sharding, op.letters[letter]) for letter in letters]


def input_layouts(op: Op, letters: tuple[str, ...], number: int) -> tuple[placement.Layout, placement.Layout]:
    """Returns (value layout, gradient layout) of input `number` of an op. `letters`: see strategy.py, one per axis."""
    sides: list[placement.Side] = [sharding.inputs[number] for sharding in op_shardings(op, letters)]
    return placement.value_layout(sides), placement.gradient_layout(sides)


def output_layouts(op: Op, letters: tuple[str, ...]) -> tuple[placement.Layout, placement.Layout]:
    sides: list[placement.Side] = [sharding.output for sharding in op_shardings(op, letters)]
    return placement.value_layout(sides), placement.gradient_layout(sides)


def batch_axes(letters: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(axis for axis, letter in enumerate(letters) if letter == "n")


def parameter_layouts(graph: Graph, letters: Letters) -> dict[str, TensorLayout]:
    """Returns {name: layout} of all parameters and buffers. Raises UserError if two ops shard a tensor differently."""
    found: dict[str, TensorLayout] = {}
    users: dict[int, tuple[str, TensorLayout]] = {}
    for op in graph.ops.values():
        node = op.node
        for name, tensor in op.parameters().items():
            path = f"{node.target}.{name}".removesuffix(".") if node is not None else name
            layout = _parameter_layout(op, name, tensor, letters)
            found[path.removeprefix("whole.") if "whole" in graph.ops else path] = layout
            first, other = users.setdefault(id(tensor), (op.name, layout))
            if other != layout:
                hints = ("pin both ops to the same split of the parameter, or to n (samples) or r (replicated)",)
                raise UserError(f"{first} and {op.name} share {name}, but split it differently", "plan", hints)
    return found


def _parameter_layout(op: Op, name: str, tensor: Tensor, letters: Letters) -> TensorLayout:
    shape, shardings = tuple(tensor.shape), list(enumerate(op_shardings(op, letters[op.name])))
    dims = sorted({sharding.cuts[name] for _, sharding in shardings if name in sharding.cuts})
    cuts = tuple((dim, tuple(axis for axis, sharding in shardings if sharding.cuts.get(name) == dim)) for dim in dims)
    partial = tuple(axis for axis, sharding in shardings if name in sharding.partial)
    return TensorLayout(shape, op.views.get(name, shape), cuts, partial)


def shard_tensor(tensor: Tensor, layout: TensorLayout, mesh: Mesh, rank: int) -> Tensor:
    """Returns a copy of the shard of `tensor` that `rank` holds."""
    piece = tensor if layout.view == layout.shape else tensor.reshape(layout.view)
    for dim, (start, stop) in enumerate(layout.region(mesh, rank)):
        piece = piece.narrow(dim, start, stop - start)
    local = piece.reshape(layout.local_shape(mesh, rank))
    # A view would keep the full tensor; fused optimizers need the memory format of the gradients.
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return local.clone(memory_format=torch.channels_last if last else torch.contiguous_format)


def shard_in_place(model: nn.Module, layouts: Mapping[str, TensorLayout], grid: Grid) -> None:
    """Replaces the data of parameters and buffers by this process's shards. The Parameter objects stay the same."""
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            layout = layouts.get(name)
            # A shared tensor has several names.
            if layout is not None and layout.cuts and id(tensor) not in done:
                tensor.data = shard_tensor(tensor.data, layout, grid.mesh, grid.world.rank)
                done.add(id(tensor))


class ConvertLayout(nn.Module):
    """Converts the output of an op to the layout in which another op reads it. Returns other values unchanged."""

    def __init__(
        self,
        values: tuple[placement.Layout, placement.Layout],
        gradients: tuple[placement.Layout, placement.Layout],
        extents: tuple[placement.Extent, ...],
        grid: Grid,
    ) -> None:
        super().__init__()
        self.values, self.gradients, self.extents, self.grid = values, gradients, extents, grid

    def forward(self, value: Any) -> Any:
        extents = iter(self.extents)

        def converted(tensor: Tensor) -> Tensor:
            if torch.is_grad_enabled() and tensor.requires_grad:
                return placement.convert_with_grad(tensor, self.values, self.gradients, next(extents), self.grid)
            return placement.convert(tensor, *self.values, next(extents), self.grid)

        return pytree.tree_map_only(Tensor, converted, value)


class SeedGenerators(nn.Module):
    """Seeds the random number generators for the next op. Processes with the same samples get the same seed."""

    def __init__(self, number: int, place: int, grid: Grid) -> None:
        super().__init__()
        self._number, self._grid = mix((number << 20) + place), grid

    def forward(self) -> None:
        seed = mix(self._grid.seed ^ self._number)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


def _is_random_op(op: Op) -> bool:
    if op.module is not None:
        return any(map(_is_random, op.module.modules()))
    if op.node is None or not ("dropout" in _target_name(op) or _target_name(op) == _DEPTH):
        return False
    share: Any = op.node.kwargs.get("p", op.node.args[1] if len(op.node.args) > 1 else None)
    return bool(share != 0)


def _is_random(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    share = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    return isinstance(share, float) and share > 0


def _target_name(op: Op) -> str:
    return getattr(op.node.target, "__name__", str(op.node.target)) if op.node is not None else ""


class GraphBuilder:
    """Builds the graph that a process runs: the traced graph, with conversions where layouts differ."""

    def __init__(self, graph: Graph, letters: Letters, grid: Grid, local: dict[int, nn.Module | None]) -> None:
        self._traced, self._ops, self._letters, self._grid = graph.traced, graph.ops, letters, grid
        self._local = local  # modules that compute ops on shards, by the id of the op's module or node
        self._names = {op.node: op.name for op in graph.ops.values() if op.node is not None}
        self._graph = fx.Graph()
        self._copied: dict[fx.Node, fx.Node] = {}
        self._made: dict[Any, fx.Node] = {}
        self._root = fx.GraphModule(graph.traced, fx.Graph())
        for kind in ("_modules", "_parameters", "_buffers"):
            getattr(self._root, kind).update(getattr(graph.traced, kind))

    def build(self, *, training: bool) -> fx.GraphModule:
        """Builds the graph. Its output has the layout that the loss reads, or is gathered if `training` is False."""
        loss = self._ops[LOSS]
        for number, node in enumerate(self._traced.graph.nodes):
            if node.op == "placeholder":
                self._copied[node] = self._graph.placeholder(node.name)
            elif node.op == "output":
                outputs = fx.map_arg(node.args[0], lambda n: self._converted_source(n, loss, whole_output=not training))
                self._graph.output(outputs)
            else:
                self._copied[node] = self._copy(node, number, training=training)
        return fx.GraphModule(self._root, self._graph)

    def _copy(self, node: fx.Node, number: int, *, training: bool) -> fx.Node:
        op = self._ops[self._names[node]]
        letters = self._letters[op.name]
        args = fx.map_arg(node.args, lambda source: self._converted_source(source, op))
        kwargs = fx.map_arg(node.kwargs, lambda source: self._converted_source(source, op))
        if training and (_is_random_op(op) or (op.kind == "opaque" and bool(op.extents) and not op.reads_attribute)):
            alike = {"r", "c"} if _target_name(op) == _DEPTH else {"r"}
            axes = tuple(axis for axis, letter in enumerate(letters) if letter not in alike)
            self._call(f"draws_{number}", SeedGenerators(number, self._grid.place(axes), self._grid), ())
        local = self._local_module(op, letters) if node.op.startswith("call_") else None
        if local is not None:
            return self._call(f"local_{number}", local, args, kwargs)
        return self._graph.create_node(node.op, node.target, args, kwargs)

    def _local_module(self, op: Op, letters: tuple[str, ...]) -> nn.Module | None:
        key = id(op.module if op.module is not None else op.node)
        if key not in self._local:
            rule = find_rule(op)
            # The op may have a user's rule although a built-in rule matches too.
            built_in = op.kind == rule.kind and rule.local is not None
            self._local[key] = rule.local(op, letters, self._grid) if built_in and rule.local else None
        return self._local[key]

    def _call(self, name: str, module: nn.Module, args: Any, kwargs: Any = None) -> fx.Node:
        self._root.add_module(name, module)
        return self._graph.call_module(name, args, kwargs or {})

    def _converted_source(self, source: fx.Node, reader: Op, *, whole_output: bool = False) -> fx.Node:
        """Returns the node of `source`, or of its conversion to the reader's layout. Readers share conversions."""
        giver = self._ops[self._names.get(source, INPUT)]
        if not giver.extents:
            return self._copied[source]
        value, gradient = output_layouts(giver, self._letters[giver.name])
        if whole_output:
            everywhere: placement.Layout = tuple("R" for _ in value)
            wanted = everywhere, everywhere
        else:
            wanted = input_layouts(reader, self._letters[reader.name], reader.sources.index(giver.name))
        moves = placement.conversion_steps(value, wanted[0])
        back = giver.trains and placement.conversion_steps(wanted[1], gradient)
        if not moves and not back:
            return self._copied[source]
        key = (source, *wanted)
        if key not in self._made:
            turn = ConvertLayout((value, wanted[0]), (gradient, wanted[1]), giver.extents, self._grid)
            self._made[key] = self._call(f"convert_{len(self._made)}", turn, (self._copied[source],))
        return self._made[key]


class SplitNetwork(nn.Module):
    """A module that runs a network whose ops are sharded by a plan. forward is a collective."""

    def __init__(self, model: nn.Module, train: Graph, evaluate: Graph, letters: Letters, grid: Grid) -> None:
        super().__init__()
        self.grid, self.letters = grid, letters
        self._whole = (model,)
        dims = train.ops[train.ops[LOSS].sources[0]].extent.dims
        self.classes = dims[-1] if len(dims) > 1 else 0  # number of classes in the network's output
        self.draws = any(_is_random_op(op) for op in train.ops.values())  # in training
        self.layouts = parameter_layouts(train, letters)  # by parameter and buffer
        tensors = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
        # The graph reads a shared tensor under only one of its names.
        of = {id(tensors[name]): layout for name, layout in self.layouts.items() if name in tensors}
        for name, tensor in tensors.items():
            self.layouts.setdefault(name, of.get(id(tensor), unsharded_layout(tuple(tensor.shape))))
        self.norms = _assign_norms(train, letters, grid)  # groups by the axes that shard the samples
        shard_in_place(model, self.layouts, grid)
        local: dict[int, nn.Module | None] = {}
        self.training_graph = GraphBuilder(train, letters, grid, local).build(training=True)
        self.evaluation_graph = GraphBuilder(evaluate, letters, grid, local).build(training=False)

    @property
    def inner(self) -> nn.Module:
        return self._whole[0]

    def train(self, mode: bool = True) -> "SplitNetwork":
        super().train(mode)
        self.inner.train(mode)
        return self

    def forward(self, pictures: Tensor) -> Any:
        """Returns the outputs: in training the shard that the loss reads, in evaluation all of them."""
        return (self.training_graph if self.training else self.evaluation_graph)(pictures)

    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        self.grid.batch, self.grid.seed = shape.samples, shape.seed
        torch.manual_seed(shape.seed)  # equal on all processes, for ops that aren't known to draw random numbers
        for axes, groups in self.norms.items():
            share = shape.share(self.grid.parts(axes), self.grid.place(axes))
            groups.begin_micro_batch(share.spans, share.shared_groups, share.count, shape.batch)

    def finish_update(self) -> None:
        for axes, groups in self.norms.items():
            groups.finish_update(self.grid.parts(axes))


def _assign_norms(graph: Graph, letters: Letters, grid: Grid) -> dict[tuple[int, ...], NormGroups]:
    families: dict[tuple[int, ...], NormGroups] = {}
    seen: set[int] = set()
    for op in graph.ops.values():
        if isinstance(op.module, GroupedNorm):
            channels = [axis for axis, letter in enumerate(letters[op.name]) if letter == "c"]
            edges, place = shard_boundaries(op.extent.dims[1], grid.parts(channels)), grid.place(channels)
            op.module.num_features = edges[place + 1] - edges[place]
        for module in op.module.modules() if op.module is not None else ():
            if isinstance(module, GroupedNorm) and id(module) not in seen:
                seen.add(id(module))
                axes = tuple(axis for axis in batch_axes(letters[op.name]) if grid.mesh.sizes[axis] > 1)
                family = families.setdefault(axes, NormGroups(processes=grid.group(axes) if axes else None))
                module.groups = family
                if module is op.module:
                    # Tracing has found the rows per sample; after ops that mix samples, statistics are local (0).
                    module.rows_per_sample = graph.ops[op.sources[0]].extent.rows if op.batchwise else 0
                family.layers.append(module)
    return families

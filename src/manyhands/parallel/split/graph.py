"""A network as a graph of ops that can be sharded."""

import fnmatch
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from manyhands.parallel.mesh.placement import SPREAD, WHOLE, Extent, Side
from manyhands.parallel.plan import INPUT

LOSS = "loss"


@dataclass(frozen=True)
class Sharding:
    """The dimensions in which an op's tensors are sharded along a mesh axis, for one letter of strategy.py."""

    inputs: tuple[Side, ...]  # of each input tensor, in the order of `Op.sources`
    output: Side
    # by parameter or buffer: the sharded dimension (of its view in `Op.views`, if it has one)
    cuts: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()  # parameters whose gradient is a term of a sum
    length: int = 0  # length of the sharded dimension, which limits the number of processes; 0: no limit
    even: bool = False  # the length must be divisible by the number of processes


@dataclass
class Op:
    """A traced op of a network: a module, a function call, or a parameter or buffer that forward reads."""

    name: str  # the module's path, or the path of the module it lies in and the function's name: "layer1.0.add"
    kind: str = "opaque"  # the rule's name: "conv", "linear", "elementwise" …; "opaque" where there is none
    module: nn.Module | None = None  # for ops that are modules
    node: fx.Node | None = None  # its node in the traced graph; None for input and loss
    sources: tuple[str, ...] = ()  # names of the ops whose outputs it reads
    extents: tuple[Extent, ...] = ()  # of the output tensors, for `SAMPLES` samples; empty if the output has no tensor
    dtype: torch.dtype = torch.float32  # of the first output tensor
    batched: bool = False  # the output grows with the number of samples
    batchwise: bool = True  # the rows of a sample in the output depend on that sample alone
    trains: bool = False  # a gradient passes through the op
    feature: int | None = None  # the output's dimension that holds channels or features; None if unknown
    tied: str = ""  # ops with equal `tied` must have equal letters
    letters: dict[str, Sharding | str] = field(default_factory=dict)  # by letter: its placement, or why it is refused
    # by parameter: the shape in which it is sharded, if that isn't its own shape
    views: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def extent(self) -> Extent:
        return self.extents[0]

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def reads_attribute(self) -> bool:
        """True if the op is a parameter, buffer or constant that the network's forward reads."""
        return self.node is not None and self.node.op == "get_attr"

    @property
    def forward(self) -> Any:
        return getattr(type(self.module), "forward", None)

    def parameters(self) -> dict[str, Tensor]:
        """Returns {name: tensor} of the op's parameters and buffers; {"": tensor} if the op is a tensor itself."""
        if self.module is None:
            return {"": attribute_tensor(self.node)} if self.reads_attribute else {}
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def allowed_letters(self) -> list[str]:
        return [letter for letter, sharding in self.letters.items() if isinstance(sharding, Sharding)]


@dataclass
class Graph:
    """All ops of a network in execution order, from the op "input" to the op "loss"."""

    ops: dict[str, Op]  # by name
    traced: fx.GraphModule  # the traced network
    samples: int  # the number of samples in the extents
    input_shape: tuple[int, ...]  # of one sample
    notes: list[str] = field(default_factory=list)  # sentences on ops that aren't sharded
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)  # of the network, by name, in the network's order

    def ops_matching(self, pattern: str) -> list[Op]:
        """Returns the ops whose name matches the glob `pattern`, and the ops within the module `pattern`."""
        return [
            op for op in self.ops.values() if fnmatch.fnmatchcase(op.name, pattern) or op.name.startswith(pattern + ".")
        ]

    def refuse_sharded_classes(self, reason: str = "the search splits classes only for cross-entropy") -> None:
        self.ops[LOSS].letters["o"] = reason

    def edges(self) -> Iterator[tuple[Op, Op, int]]:
        """Yields each edge of the graph: (source op, op that reads its output, index in the reader's `sources`)."""
        for op in self.ops.values():
            for place, name in enumerate(op.sources):
                yield self.ops[name], op, place

    def ops_by_tie(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in self.ops.values():
            found.setdefault(op.tied, []).append(op)
        return found


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple | dict):  # subclasses too, which torch's pytree doesn't know
        return [tensor for one in (value.values() if isinstance(value, dict) else value) for tensor in tensors_in(one)]
    return []


class _Tracer(fx.Tracer):
    """Traces into all modules except torch's own. A module that can't be traced becomes a single op."""

    def __init__(self, leaves: Callable[[nn.Module], bool], inputs: tuple[str, ...]) -> None:
        super().__init__()
        self._leaves, self._inputs = leaves, inputs
        self.whole: dict[str, str] = {}

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: ARG002 - as fx calls it
        concrete_args: Any = None,  # noqa: ARG002
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Calls forward with the named inputs only. Its other arguments keep their defaults, as in training."""
        given = [self.create_proxy("placeholder", name, (), {}) for name in self._inputs]
        return lambda model, *inputs: root_fn(model, *inputs), [self.root, *given]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaves(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known, stack = set(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a user's forward does with a stand-in for a tensor
            self.module_stack = stack  # without the modules that fx had entered, so that only this module stays one op
            for node in reversed(list(self.graph.nodes)):
                if node not in known:
                    self.graph.erase_node(node)
            name = self.path_of_module(m)
            self.whole[name] = str(error).partition("\n")[0]
            return self.create_proxy("call_module", name, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["scope"] = self.scope.module_path
        return node


def trace(
    model: nn.Module, leaves: Callable[[nn.Module], bool], inputs: tuple[str, ...] = ("x",)
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Traces a network in its current mode. Returns (graph, {path of a module that can't be traced: reason})."""
    tracer = _Tracer(leaves, inputs)
    try:
        graph = tracer.trace(model)
    except Exception as error:  # noqa: BLE001 - the network's own forward can't be traced: it is one op
        return _single_op_graph(model, str(error))
    try:
        graph.lint()
        traced = fx.GraphModule(model, graph)
        make_out_of_place(traced)
        graph.eliminate_dead_code()
        traced.recompile()
    except Exception as error:  # noqa: BLE001 - such as values of an earlier trace, kept in the network itself
        return _single_op_graph(model, str(error))
    return traced, tracer.whole


def _single_op_graph(model: nn.Module, reason: str) -> tuple[fx.GraphModule, dict[str, str]]:
    graph = fx.Graph()
    graph.output(graph.call_module("whole", (graph.placeholder("x"),)))
    root = nn.Module()
    root.add_module("whole", model)
    return fx.GraphModule(root, graph), {"whole": reason.partition("\n")[0]}


def make_out_of_place(traced: fx.GraphModule) -> None:
    """Replaces ops that change their input in place by others. Later readers of that input read the result instead."""
    place = {node: number for number, node in enumerate(traced.graph.nodes)}
    for node in traced.graph.nodes:
        if _changes_its_input(traced, node) and isinstance(node.args[0], fx.Node):
            for later in [user for user in node.args[0].users if place[user] > place[node]]:
                later.replace_input_with(node.args[0], node)
        if node.op == "call_module":
            for module in traced.get_submodule(str(node.target)).modules():
                if getattr(module, "inplace", False):
                    setattr(module, "inplace", False)  # noqa: B010 - not every module has it
        if node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        node.target = _IN_PLACE.get(node.target, node.target)
    traced.recompile()


def _changes_its_input(traced: fx.GraphModule, node: fx.Node) -> bool:
    if not node.args:
        return False
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    named = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    return bool(node.kwargs.get("inplace")) or named or node.target in _IN_PLACE


_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    "add_": "add",
    "mul_": "mul",
    "sub_": "sub",
    "div_": "div",
    "relu_": "relu",
}


def name_nodes(traced: fx.GraphModule) -> dict[fx.Node, str]:
    """Returns a unique name for each node, such as "layer1.0.add". Training and evaluation use the same names."""
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            name = INPUT
        elif node.op in {"call_module", "get_attr"}:
            name = str(node.target)
        else:
            word = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "function")
            name = ".".join(part for part in (node.meta.get("scope", ""), word.strip("_")) if part)
        names[node], number = name, 1
        while names[node] in taken:
            number += 1
            names[node] = f"{name}#{number}"
        taken.add(names[node])
    return names


def attribute_tensor(node: fx.Node | None) -> Tensor:
    assert node is not None
    found: Any = node.graph.owning_module
    for word in str(node.target).split("."):
        found = getattr(found, word)
    return found


def tie_ops(ops: Mapping[str, Op], pairs: Iterable[tuple[str, str]]) -> None:
    """Ties the ops of each pair, and the ops that are already tied to them. Tied ops must have equal letters."""
    for first, second in pairs:
        old, new = ops[second].tied, ops[first].tied
        if old != new:
            for op in ops.values():
                if op.tied == old:
                    op.tied = new


def whole_or_batch(op: Op, inputs: list[Op]) -> dict[str, Sharding | str]:
    """Returns an op's sharding for r (replicated) and n (by samples), or instead of n's the reason why it has none."""
    parameters = frozenset(op.parameters())
    together = Sharding(tuple(WHOLE for _ in inputs), WHOLE)
    if not op.batchwise:
        return {"n": "the op mixes samples (or has no samples in dimension 0)", "r": together}
    sides: tuple[Side, ...] = tuple(0 if one.batched else SPREAD for one in inputs)  # SPREAD: partial gradients
    return {"n": Sharding(sides, 0 if op.batched else SPREAD, partial=parameters), "r": together}

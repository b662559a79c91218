"""Builds a network's graph: traces it, finds ops that mix samples by runs with 3 and 2 samples, and applies rules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.core.errors import UserError
from manyhands.parallel.mesh.placement import SPREAD, SUM, WHOLE, Extent, Side
from manyhands.parallel.split.graph import INPUT, LOSS, Graph, Op, Sharding, name_nodes, tensors_in, tie_ops, trace
from manyhands.parallel.split.rules import OPAQUE, RULES, Describe, Rule, functions
from manyhands.parallel.split.rules import layers as _layers  # noqa: F401 - registers its rules

SAMPLES, FEWER = 3, 2
SAME = 1e-3  # relative tolerance: kernels for other batch sizes may sum in another order

_user_rules: dict[type[nn.Module], Describe] = {}


def register_rule(kind: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Registers a function that declares how modules of a class can be sharded.

    The function receives the op and the ops that compute its inputs, and sets two attributes. `op.feature` is the
    dimension of the output that holds the channels or features. `op.letters` maps the letters that a plan may use for
    this op (n samples, o outputs, i inputs, c channels, h heads, v rows, r replicated) to a `Sharding`: the sharded
    dimension of each input, of the output and of each parameter, and the dimension's length. `whole_or_batch` returns
    the `Sharding` of r and, unless the op mixes samples, of n:

        @manyhands.register_rule(Scale)  # multiplies each channel (dimension 1) by its parameter `weight` [C]
        def scale(op, inputs):
            op.feature = 1
            op.letters = whole_or_batch(op, inputs)
            op.letters["c"] = Sharding(inputs=(1,), output=1, cuts={"weight": 0}, length=op.extent.dims[1])
    """

    def register(describe: Describe) -> Describe:
        _user_rules[kind] = describe
        return describe

    return register


def find_rule(op: Op) -> Rule:
    return next((rule for rule in RULES if rule.matches(op)), OPAQUE)


def describe_network(model: nn.Module, picture: Tensor) -> Graph:
    """Returns the graph of a network in its current mode (training or evaluation). Replaces ops that work in place.

    `picture` is one sample, whose values don't matter. Raises UserError if the network fails on samples of its shape.
    """
    traced, unseen = trace(model, lambda module: type(module) in _user_rules or isinstance(module, _BatchNorm))
    names = name_nodes(traced)
    many, few = _run_network(traced, model, picture)
    ops, ties = describe_ops(traced, names, many, few)
    graph = Graph(ops, traced, SAMPLES, tuple(picture.shape))
    _add_loss(graph, traced, names)
    ties += allow_sharded_operands(ops)
    shared = pairs_with_shared_tensors(ops)
    tie_ops(ops, [*ties, *shared])
    refuse_conflicting_letters(ops)
    graph.notes = _sharding_notes(graph, unseen)
    graph.parameters = dict(model.named_parameters())
    return graph


def describe_ops(
    traced: fx.GraphModule,
    names: Mapping[fx.Node, str],
    many: Mapping[fx.Node, Any],
    few: Mapping[fx.Node, Any],
    begin: Callable[[Op], None] | None = None,
) -> tuple[dict[str, Op], list[tuple[str, str]]]:
    """Returns ({name: op} of a traced network or loss, pairs of ops that must have equal letters).

    `many`, `few`: the nodes' values for `SAMPLES` and `FEWER` samples. `begin` sets letters of inputs; None: n and r.
    """
    ops: dict[str, Op] = {INPUT: Op(INPUT, tied=INPUT)}
    ties: list[tuple[str, str]] = []
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        op = _describe_node(node, names, many[node], few[node])
        reads = [ops[names[source]] for source in node.all_input_nodes]
        op.sources = tuple(one.name for one in reads if one.extents)
        op.trains = any(one.trains for one in reads) or any(one.requires_grad for one in op.parameters().values())
        ops[op.name] = op
        # Ops that read a batch size or a tuple must be sharded like the op that returns it.
        ties += [(one.name, op.name) for one in reads if len(one.extents) > 1 or (one.batched and not one.extents)]
        if node.op == "placeholder":
            (begin or _describe_input)(op)
        else:
            _set_strategy_letters(op, [ops[name] for name in op.sources])
    return ops, ties


def _describe_input(samples: Op) -> None:
    samples.letters = {"n": Sharding((), 0), "r": Sharding((), WHOLE)}


# Layers of torch that compute each row separately, and the number of dimensions of their input.
_ROW_BY_ROW: dict[type[nn.Module], int] = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5, nn.Linear: 2}


class _NodeRunner(fx.Interpreter):
    """Runs single nodes of a graph, without dropout."""

    _noise = torch.empty(0)

    def noise(self, shape: Tensor, device: torch.device) -> Tensor:
        """Returns random numbers with the shape of the tensor `shape`. They differ between nodes."""
        start, count = len(self.env), shape.numel()
        if len(self._noise) < start + count or self._noise.device != device:
            self._noise = torch.randn(start + 2 * count, device=device)
        return self._noise[start : start + count].view(shape.shape).to(shape.dtype)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "__name__", "") in {"dropout", "dropout2d", "stochastic_depth"}:
            return args[0]
        return super().call_function(target, args, kwargs)


def _run_network(
    traced: fx.GraphModule, model: nn.Module, picture: Tensor
) -> tuple[dict[fx.Node, Any], dict[fx.Node, Any]]:
    modes = {module: module.training for module in model.modules()}
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(SAMPLES, *picture.shape, generator=generator).to(picture)
    try:
        model.eval()
        return run_two_sizes(traced, (samples,))
    except Exception as error:
        what = f"the network fails on {FEWER} or {SAMPLES} samples of shape {list(picture.shape)}: {error}"
        raise UserError(what.partition("\n")[0], "model.name", ("use one process: --parallel single",)) from error
    finally:
        for module, training in modes.items():
            module.training = training


def run_two_sizes(traced: fx.GraphModule, inputs: tuple[Tensor, ...]) -> tuple[dict[fx.Node, Any], dict[fx.Node, Any]]:
    """Returns {node: value} for `SAMPLES` samples and for the last `FEWER`. Equal values are views of the former."""
    many, few = _NodeRunner(traced), _NodeRunner(traced)
    many.args_iter, few.args_iter = iter(inputs), iter([_last(one, 1) for one in inputs])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in traced.graph.nodes:
            result = _value_by_rows(node, many, few)
            if result is not None:
                many.env[node], few.env[node] = result, _last(result, len(result) // SAMPLES)
                continue
            many.env[node], few.env[node] = result, fewer = many.run_node(node), few.run_node(node)
            if isinstance(result, Tensor) and isinstance(fewer, Tensor):
                last = _last(result, _rows_per_sample(result, fewer)) if result.ndim else result
                few.env[node] = last if _almost_equal(last, fewer) else fewer
    return many.env, few.env


def _value_by_rows(node: fx.Node, many: _NodeRunner, few: _NodeRunner) -> Tensor | None:
    """Returns the value for `SAMPLES` samples of a node that treats each row separately, or None for other nodes.

    For convolutions, linear layers and BatchNorm, returns random numbers of the right shape. They also reveal whether
    later nodes mix samples, and don't vanish or explode over many layers.
    """
    reads = [(many.env[one], few.env[one]) for one in node.all_input_nodes]
    if not reads or not all(_is_view_of_last(*one) for one in reads):
        return None
    first: Tensor = reads[0][0]
    module = many.fetch_attr(str(node.target)) if node.op == "call_module" else None
    if module is None:
        alone = node.op == "call_function" and node.target in functions.FUNCTIONS
        return many.run_node(node) if alone and len({one.ndim for one, _ in reads}) == 1 else None
    if isinstance(module, _BatchNorm):
        return many.noise(first, first.device)
    if len(reads) > 1 or module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in functions.MODULES:
        return many.run_node(node)
    dims = _ROW_BY_ROW.get(type(module), first.ndim + 1)
    if first.ndim != dims and not (type(module) is nn.Linear and first.ndim > dims):
        return None
    weights = {name: one.to("meta") for name, one in module.named_parameters()}
    return many.noise(functional_call(module, weights, first.to("meta")), first.device)


def _describe_node(node: fx.Node, names: Mapping[fx.Node, str], many: Any, few: Any) -> Op:
    name = names[node]
    graph_module = node.graph.owning_module
    module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" and graph_module else None
    tensors, fewer = tensors_in(many), tensors_in(few)
    op = Op(name, module=module, node=node, tied=name)
    if not tensors:
        op.batched = isinstance(many, int | float | tuple | list) and bool(many != few)
        return op
    grown = [_rows_per_sample(one, other) for one, other in zip(tensors, fewer, strict=True)]
    op.batched = any(grown) or any(one.shape != other.shape for one, other in zip(tensors, fewer, strict=True))
    op.batchwise = not op.batched or all(
        rows and _almost_equal(_last(one, rows), other) for rows, one, other in zip(grown, tensors, fewer, strict=True)
    )
    op.extents = tuple(Extent(tuple(one.shape), rows) for one, rows in zip(tensors, grown, strict=True))
    op.dtype = tensors[0].dtype
    return op


def _rows_per_sample(many: Tensor, few: Tensor) -> int:
    """Returns the number of rows (dimension 0) per sample, or 0 if it doesn't grow with the number of samples."""
    if not many.ndim or many.shape[1:] != few.shape[1:] or many.shape[0] == few.shape[0]:
        return 0
    rows = many.shape[0] // SAMPLES
    return rows if many.shape[0] == rows * SAMPLES and few.shape[0] == rows * FEWER else 0


def _last(many: Tensor, rows: int) -> Tensor:
    """Returns the rows of the last `FEWER` samples. In a cumulative sum, the first rows wouldn't show any mixing."""
    return many[len(many) - rows * FEWER :]


def _is_view_of_last(many: Any, few: Any) -> bool:
    if not isinstance(many, Tensor) or not isinstance(few, Tensor) or not many.ndim or not few.numel():
        return False
    last = many[len(many) - len(few) :]
    alike = last.shape == few.shape and last.data_ptr() == few.data_ptr() and last.stride() == few.stride()
    return alike and len(many) * FEWER == len(few) * SAMPLES


def _almost_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max()) <= SAME * float(other.abs().max()) if one.numel() else True


def _set_strategy_letters(op: Op, inputs: list[Op]) -> None:
    if op.reads_attribute:
        op.letters = {"n": Sharding((), SPREAD, partial=frozenset({""})), "r": Sharding((), WHOLE)}
        return
    if any(one.batched and one.extents for one in inputs) and op.extents and not op.batched:
        op.batchwise = False
    if any(not one.batchwise for one in inputs if one.batched):
        # After an op that mixes samples, no row belongs to a single sample.
        op.batchwise = op.batchwise and not op.batched
    if op.module is not None and type(op.module) in _user_rules:
        op.kind = type(op.module).__name__
        _user_rules[type(op.module)](op, inputs)
        return
    rule = find_rule(op) if len(op.extents) == 1 else OPAQUE
    op.kind = rule.kind
    rule.describe(op, inputs)
    _refuse_hidden(op)


def _refuse_hidden(op: Op) -> None:
    """Disallows sharding of modules with hooks, and of parameters that are computed from other tensors."""
    module = op.module
    if module is None:
        return
    own = op.parameters()
    for letter, sharding in op.letters.items():
        if letter in {"n", "r"} or isinstance(sharding, str):
            continue
        made = [name for name in sharding.cuts if name not in own and getattr(module, name, None) is not None]
        if made:
            op.letters[letter] = f"the parameter {made[0]} is computed from other tensors"
        elif module._forward_hooks or module._forward_pre_hooks:
            op.letters[letter] = "the module has hooks, which would see only a shard"


def _add_loss(graph: Graph, traced: fx.GraphModule, names: dict[fx.Node, str]) -> None:
    """Adds the loss, which reads all outputs. Classes (o) can be sharded if there is a single output [N, classes]."""
    output = next(node for node in traced.graph.nodes if node.op == "output")
    reads = [graph.ops[names[node]] for node in output.all_input_nodes]
    sources = [op for op in reads if op.extents]
    loss = Op(LOSS, LOSS, sources=tuple(op.name for op in sources), tied=LOSS, trains=True)
    if not sources or not all(op.batched for op in sources):
        raise UserError("the network's output doesn't have one row per sample", "model.name")
    sides: tuple[Side, ...] = tuple(0 for _ in sources)
    loss.letters = {"n": Sharding(sides, SPREAD), "r": Sharding(tuple(WHOLE for _ in sources), WHOLE)}
    dims = sources[0].extent.dims
    if len(sources) == 1 and len(sources[0].extents) == 1 and len(dims) == 2:
        loss.letters["o"] = Sharding((1,), WHOLE, length=dims[1])
    else:
        loss.letters["o"] = "classes are split only if the network returns one output [N, classes]"
    if not all(op.batchwise for op in sources):
        loss.letters["n"] = "the network mixes samples"
    graph.ops[LOSS] = loss


def _sharding_notes(graph: Graph, unseen: dict[str, str]) -> list[str]:
    notes = [f"{name} is not split: tracing fails ({reason})" for name, reason in unseen.items()]
    mixing = [op.name for op in graph.ops.values() if op.extents and not op.batchwise]
    if mixing:
        more = f" and {len(mixing) - 3} more" if len(mixing) > 3 else ""
        shown = ", ".join(mixing[:3])
        notes.append(f"{shown}{more}: computed on all samples in every process (samples mixed, or not in dimension 0)")
    plain = [op for op in graph.ops.values() if op.kind == Op.kind and op.name != INPUT and op.batched and op.extents]
    words = sorted({_type_name(op) for op in plain if op.batchwise})
    if words:
        notes.append(f"ops without a sharding rule shard only the batch: {', '.join(words)}")
    return notes


def _type_name(op: Op) -> str:
    target: Any = op.node.target if op.node is not None else op.name
    return type(op.module).__name__ if op.module is not None else getattr(target, "__name__", str(target))


# A parameter that several ops read has one layout, which must fit all these ops.


def pairs_with_shared_tensors(ops: dict[str, Op]) -> list[tuple[str, str]]:
    """Returns pairs of ops that read the same parameter or buffer, and so must have equal letters."""
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for op in ops.values():
        for tensor in op.parameters().values():
            owner = first.setdefault(id(tensor), op.name)
            if owner != op.name:
                pairs.append((owner, op.name))
    return pairs


def allow_sharded_operands(ops: dict[str, Op]) -> list[tuple[str, str]]:
    """Lets parameters be sharded that matrix products read, also transposed. Returns pairs of ops to shard alike."""
    ties: list[tuple[str, str]] = []
    readers: dict[str, list[tuple[Op, int]]] = {}
    for op in ops.values():
        for place, name in enumerate(op.sources):
            readers.setdefault(name, []).append((op, place))
    for op in reversed(list(ops.values())):
        reading = readers.get(op.name, [])
        if not _is_parameter(op, ops) or not all(_can_read_shards(reader) for reader, _ in reading) or not reading:
            continue
        for letter in ("o", "i"):
            op.letters[letter] = _placement_for_readers(op, letter, reading)
        ties += [(op.name, reader.name) for reader, _ in reading]
    return ties


def _is_parameter(op: Op, ops: dict[str, Op]) -> bool:
    if op.reads_attribute:
        return isinstance(op.parameters()[""], nn.Parameter)
    source = ops[op.sources[0]] if len(op.sources) == 1 else None
    return source is not None and source.reads_attribute and _permutation(op) is not None and _is_parameter(source, ops)


def _permutation(op: Op) -> list[int] | None:
    """Returns the permutation of dimensions, if the op transposes a matrix. Returns None for other ops."""
    node, dims = op.node, len(op.extents[0].dims) if len(op.extents) == 1 else 0
    if node is None or dims != 2:
        return None
    if node.op == "call_method" and node.target == "t":
        return [1, 0]
    swaps = node.op == "call_method" and node.target in {"transpose", "swapaxes"}
    if swaps and all(isinstance(one, int) for one in node.args[1:]):
        return [1, 0] if {int(str(one)) % 2 for one in node.args[1:]} == {0, 1} else [0, 1]
    return [1, 0] if node.target is getattr and node.args[1:] in {("T",), ("mT",)} else None


def _can_read_shards(reader: Op) -> bool:
    """Returns True if the op is a shardable matrix product, or a transposed parameter that such a product reads."""
    offered = {"o", "i"} & set(reader.letters)
    return bool(offered) and (reader.kind == "matmul" or _permutation(reader) is not None)


def _placement_for_readers(op: Op, letter: str, reading: list[tuple[Op, int]]) -> Sharding | str:
    """Returns the sharding of a parameter by `letter` that fits all readers, or the reason (a text) why none fits."""
    sides: set[Side] = set()
    for reader, place in reading:
        sharding = reader.letters.get(letter, f"the op has no dimension {letter}")
        if isinstance(sharding, str):
            return f"{reader.name} reads the parameter, and {sharding}"
        sides.add(sharding.inputs[place])
    if len(sides) > 1:
        return f"{' and '.join(reader.name for reader, _ in reading)} would split the parameter differently"
    side = sides.pop()
    order = None if op.reads_attribute else _permutation(op)
    inputs: tuple[Side, ...] = () if op.reads_attribute else (order[side] if order and isinstance(side, int) else side,)
    if isinstance(side, int):
        cuts = {"": side} if op.reads_attribute else {}
        return Sharding(inputs, side, cuts, length=op.extent.dims[side])
    # A reader takes its term of a sum from the full parameter, whose gradient is then complete.
    return Sharding(
        inputs if side != SUM else tuple(WHOLE for _ in inputs),
        WHOLE if side == SUM else SPREAD,
        partial=frozenset({""} if op.reads_attribute and side == SPREAD else ()),
    )


def refuse_conflicting_letters(ops: dict[str, Op]) -> None:
    """Disallows letters under which two ops would shard a shared parameter differently."""
    users: dict[int, list[tuple[Op, str]]] = {}
    for op in ops.values():
        for name, tensor in op.parameters().items():
            users.setdefault(id(tensor), []).append((op, name))
    for sharing_it in users.values():
        first, own = sharing_it[0]
        for other, name in sharing_it[1:]:
            for letter in {*first.letters, *other.letters}:
                if _sharding_of(first, own, letter) != _sharding_of(other, name, letter):
                    reason = f"{first.name} and {other.name} share a parameter, but would split differently"
                    first.letters[letter] = other.letters[letter] = reason
    for op in ops.values():
        if op.reads_attribute:
            refused = {letter: reason for letter, reason in op.letters.items() if isinstance(reason, str)}
            for other in [one for one in ops.values() if refused and one.tied == op.tied]:
                other.letters.update({letter: reason for letter, reason in refused.items() if letter in other.letters})


def _sharding_of(op: Op, name: str, letter: str) -> Any:
    """Returns how an op sharded by `letter` shards a parameter: (dimension, view, True if gradients are summed)."""
    sharding = op.letters.get(letter)
    if not isinstance(sharding, Sharding):
        return None
    return sharding.cuts.get(name), op.views.get(name), name in sharding.partial


def refuse_training_only_letters(training: dict[str, Op], evaluation: dict[str, Op]) -> None:
    """Disallows letters in training under which the graph of evaluation couldn't read a parameter."""
    for name, op in evaluation.items():
        if op.reads_attribute and name in training:
            for letter, one in training[name].letters.items():
                if isinstance(one, Sharding) and one.cuts and not isinstance(op.letters.get(letter), Sharding):
                    training[name].letters[letter] = "evaluation reads the parameter differently"

"""Sharding rules of functions and of layers without parameters. strategy.py explains the letters, such as n."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, fx, nn

from manyhands.core.mesh import shard_boundaries
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import SPREAD, SUM, WHOLE, Side
from manyhands.parallel.split.graph import Op, Sharding, whole_or_batch
from manyhands.parallel.split.rules import rule


def _target(op: Op) -> Any:
    """Returns the function, or the name of the method, that an op calls. Returns None for other ops."""
    return op.node.target if op.node is not None and op.node.op in {"call_function", "call_method"} else None


@rule("concat", lambda op: _target(op) in {torch.cat, torch.concat, torch.stack})
def concat(op: Op, inputs: list[Op]) -> None:
    """Lets a concatenation be sharded by samples (n) only: shards of channels wouldn't form a shard of the result."""
    op.letters = whole_or_batch(op, inputs)
    op.feature = inputs[0].feature


MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity,
    nn.Dropout, nn.AlphaDropout,
)  # fmt: skip
FUNCTIONS: set[Any] = {
    torch.relu, F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    torch.sigmoid, F.sigmoid, torch.tanh, F.tanh, F.softplus, F.dropout, torch.exp, torch.log, torch.sqrt, torch.abs,
    operator.neg, operator.add, operator.sub, operator.mul, operator.truediv, operator.pow,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.square, torch.neg,
}  # fmt: skip
METHODS = {
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "add", "sub", "mul", "div", "pow", "square",
    "contiguous", "clone", "float", "double", "clamp",
}  # fmt: skip


def _is_elementwise(op: Op) -> bool:
    if op.module is not None:
        return isinstance(op.module, MODULES) and op.forward in {kind.forward for kind in MODULES}
    target = _target(op)
    # torchvision's stochastic depth drops entire samples or batches, with all their channels.
    return target in FUNCTIONS or target in METHODS or getattr(target, "__name__", "") == "stochastic_depth"


@rule("elementwise", _is_elementwise)
def elementwise(op: Op, inputs: list[Op]) -> None:
    """Lets an elementwise op be sharded by samples (n) and by channels or features (c)."""
    op.letters = whole_or_batch(op, inputs)
    dims = len(op.extent.dims)
    known = [one.feature for one in inputs if len(one.extent.dims) == dims and one.feature is not None]
    # Several rows per sample change dimension 0 only.
    if not known or known[0] == 0 or any(feature != known[0] for feature in known):
        return
    op.feature = known[0]
    sides: list[Side] = [_feature_side(one, op, op.feature) for one in inputs]
    op.letters["c"] = Sharding(tuple(sides), op.feature, length=op.extent.dims[op.feature])


def _feature_side(source: Op, op: Op, feature: int) -> Side:
    """Returns the dimension of `source` that becomes dimension `feature` of `op`; SPREAD if missing or broadcast."""
    dim = feature - (len(op.extent.dims) - len(source.extent.dims))
    if dim < 0 or (source.extent.dims[dim] == 1 and op.extent.dims[feature] > 1):
        return SPREAD
    return dim


def _num_classes(op: Op) -> int:
    given: Any = None
    if op.node is not None:
        given = op.node.kwargs.get("num_classes", op.node.args[1] if len(op.node.args) > 1 else -1)
    return given if isinstance(given, int) else -1


class ShardedOneHot(nn.Module):
    """Computes consecutive columns of a one-hot encoding, this process's shard: int64 [n, …] to int64 [n, …, count]."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self._first, self._count = first, count

    def forward(self, numbers: Tensor, *_: Any, **__: Any) -> Tensor:
        own = torch.arange(self._first, self._first + self._count, device=numbers.device)
        return (numbers[..., None] == own).long()


def _local_one_hot(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = [axis for axis, letter in enumerate(letters) if letter == "c"]
    if not cut:
        return None
    edges, place = shard_boundaries(_num_classes(op), grid.parts(cut)), grid.place(cut)
    return ShardedOneHot(edges[place], edges[place + 1] - edges[place])


@rule("one_hot", lambda op: _target(op) is F.one_hot and _num_classes(op) > 0, _local_one_hot)
def one_hot(op: Op, inputs: list[Op]) -> None:
    """Lets a one-hot encoding be sharded by samples (n) and by classes (c)."""
    op.letters = whole_or_batch(op, inputs)
    op.feature = len(op.extent.dims) - 1
    op.letters["c"] = Sharding((WHOLE,), op.feature, length=_num_classes(op))


POOLS: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Flatten, nn.Upsample, nn.ZeroPad2d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
POOLING: set[Any] = {
    F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.flatten,
    F.interpolate, F.dropout2d, "flatten",
}  # fmt: skip


@rule("pool", lambda op: op.forward in {kind.forward for kind in POOLS} or _target(op) in POOLING)
def pool(op: Op, inputs: list[Op]) -> None:
    """Lets pooling and similar ops be sharded by samples (n) and by channels (c)."""
    op.letters = whole_or_batch(op, inputs)
    source, result = inputs[0].extent.dims, op.extent.dims
    if inputs[0].feature != 1 or len(source) < 3 or len(result) < 2 or result[1] % source[1]:
        return
    op.feature = 1
    flattened = result[1] != source[1]
    # A flattened channel is several features, so only equal shards of channels are shards of features.
    op.letters["c"] = Sharding((1,), 1, length=source[1], even=flattened)


# Matrix products. One operand or both depend on the samples.
PRODUCTS: set[Any] = {operator.matmul, torch.matmul, torch.mm, torch.bmm, "matmul", "mm", "bmm", "__matmul__"}
WITH_BIAS: set[Any] = {torch.addmm, "addmm"}


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Returns the nodes of a product: (left operand [..., k], right operand [..., k, m] or [k], bias [..., m] or None).

    The right operand of `F.linear` is [m, k]. Returns None for arguments of another form.
    """
    words = {"input": 0, "weight": 1, "bias": 2, "other": 1, "mat2": 1} if node.target not in WITH_BIAS else {}
    given: dict[int, Any] = dict(enumerate(node.args))
    for word, value in node.kwargs.items():
        if word not in words:
            return None
        given[words[word]] = value
    if node.target in WITH_BIAS:
        given = {0: given.get(1), 1: given.get(2), 2: given.get(0)}
    left, right, bias = given.get(0), given.get(1), given.get(2)
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias in {left, right}):
        return None
    return left, right, bias


def _is_product(op: Op) -> bool:
    known = _target(op) in PRODUCTS | WITH_BIAS or _target(op) is F.linear
    return known and op.node is not None and _operands(op.node) is not None


@rule("matmul", _is_product)
def product(op: Op, inputs: list[Op]) -> None:
    """Lets a matrix product be sharded by samples (n), summed dimension (i), and a dimension without samples (o)."""
    op.letters = whole_or_batch(op, inputs)
    found = _operands(op.node) if op.node is not None else None
    by_node = {one.node: one for one in inputs}
    if op.node is None or found is None or not op.batchwise or not set(found[:2]) <= set(by_node):
        return
    left, right, bias = by_node[found[0]], by_node[found[1]], by_node.get(found[2])
    summed, columns = _dims_of_right(op.node.target, right)
    last = len(op.extent.dims) - 1
    if left.batched:
        if len(left.extent.dims) < 2 or (right.batched and len(right.extent.dims) < 3):
            return
        rows, outputs = len(left.extent.dims) - 1, {right.name: columns}
    else:
        # Only the right operand has samples, so the rows of the left operand are the outputs.
        if len(left.extent.dims) != 2 or len(right.extent.dims) < 3 or bias is not None:
            return
        rows, columns, outputs, last = 1, 0, {left.name: 0}, last - 1
    terms: dict[str, Side] = {left.name: rows, right.name: summed}
    if bias is not None:
        terms[bias.name] = SUM  # the bias is a term of the sum: complete on one process, zeros on the others
        outputs[bias.name] = len(bias.extent.dims) - 1
    op.letters["i"] = Sharding(_sides(inputs, terms), SUM, length=left.extent.dims[rows])
    if columns is None or last < 1 or (bias is not None and bias.extent.dims[-1:] != op.extent.dims[-1:]):
        return
    op.feature = last
    op.letters["o"] = Sharding(_sides(inputs, outputs), last, length=op.extent.dims[last])


def _dims_of_right(target: Any, right: Op) -> tuple[int, int | None]:
    """Returns the right operand's (summed dimension, dimension that becomes the result's columns, or None)."""
    dims = len(right.extent.dims)
    if target is F.linear:  # the weight has its outputs first
        return dims - 1, 0 if dims == 2 else None
    return (dims - 2, dims - 1) if dims > 1 else (0, None)


def _sides(inputs: list[Op], cut: Mapping[str, Side | None]) -> tuple[Side, ...]:
    """Returns `cut[name]` of each input in order, or SPREAD for an input without an entry."""
    sides: list[Side | None] = [cut.get(one.name) for one in inputs]
    return tuple(SPREAD if side is None else side for side in sides)


SUMS: set[Any] = {torch.sum, "sum"}
MEANS: set[Any] = {torch.mean, "mean"}


def max_values(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Returns the maxima over a dimension, without indices. Of equal values, only one gets the gradient."""
    return values.max(dim, keepdim).values


MAXIMA: set[Any] = {max_values}


class ShardedMean(nn.Module):
    """Computes this process's term of a mean over a sharded dimension: its shard's mean times the shard's fraction."""

    def __init__(self, target: Any, dim: int, length: int) -> None:
        super().__init__()
        self._target, self._dim, self._length = target, dim, length

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        values: Tensor = args[0] if args else kwargs["input"]
        function = getattr(torch.Tensor, self._target) if isinstance(self._target, str) else self._target
        mean: Tensor = function(*args, **kwargs)
        return mean * (values.shape[self._dim] / self._length)


class ShardedMaximum(nn.Module):
    """Computes a maximum over a sharded dimension. A collective. Of equal values, only one gets the gradient."""

    def __init__(self, group: Any, place: int, parts: int) -> None:
        super().__init__()
        self._group, self._place, self._parts = group, place, parts

    def forward(self, values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        found: Any = _MaximumOverShards.apply(values, dim, self._group, self._place, self._parts)
        return found if keepdim else found.squeeze(dim)


class _MaximumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: Any, place: int, parts: int) -> Tensor:
        mine, index = values.max(dim, keepdim=True)
        everybody = mine.new_empty(parts, *mine.shape)
        dist.all_gather_into_tensor(everybody.view(-1), mine.contiguous().view(-1), group=group)
        found = everybody.max(0)
        ctx.save_for_backward(index, found.indices == place)
        ctx.shape, ctx.dim = values.shape, dim
        return found.values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, here = ctx.saved_tensors
        back = gradients[0].new_zeros(ctx.shape).scatter(ctx.dim, index, gradients[0] * here)
        return back, None, None, None, None


def _local_reduction(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = [axis for axis, letter in enumerate(letters) if letter == "i"]
    sharding = op.letters.get("i")
    if grid.parts(cut) == 1 or op.node is None or not isinstance(sharding, Sharding) or op.node.target in SUMS:
        return None
    if op.node.target in MAXIMA:
        return ShardedMaximum(grid.group(cut), grid.place(cut), grid.parts(cut))
    return ShardedMean(op.node.target, int(sharding.inputs[0]), sharding.length)


_REDUCTIONS = SUMS | MEANS | MAXIMA | {torch.amax, torch.amin, "amax", "amin"}


@rule("reduce", lambda op: _target(op) in _REDUCTIONS, _local_reduction)
def reduction(op: Op, inputs: list[Op]) -> None:
    """Lets a reduction be sharded by samples (n), by unreduced channels (c), and by the reduced dimension (i)."""
    op.letters = whole_or_batch(op, inputs)
    if len(inputs) != 1 or op.node is None:
        return
    source, dims = inputs[0], reduced_dims(op, len(inputs[0].extent.dims))
    feature, whole = source.feature, source.extent.dims
    if not feature or dims is None:
        return
    if feature in dims:
        if op.node.target in SUMS | MEANS:
            op.letters["i"] = Sharding((feature,), SUM, length=whole[feature])
        else:
            op.letters["i"] = "a maximum over a split dimension is supported only in a loss"
    elif 0 not in dims:
        kept = len(op.extent.dims) == len(whole)
        op.feature = feature if kept else feature - sum(dim < feature for dim in dims)
        op.letters["c"] = Sharding((feature,), op.feature, length=whole[feature])


def reduced_dims(op: Op, dims: int) -> set[int] | None:
    """Returns the dimensions that `op` reduces, of a tensor with `dims` dimensions; None if they aren't constant."""
    if op.node is None:
        return None
    given: Any = op.node.args[1] if len(op.node.args) > 1 else None
    for word in ("dim", "axis"):
        given = op.node.kwargs.get(word, given)
    chosen = range(dims) if given is None else [given] if isinstance(given, int) else given
    if not isinstance(chosen, list | tuple | range) or not all(isinstance(dim, int) for dim in chosen):
        return None
    numbers = {int(str(dim)) % dims for dim in chosen}
    return numbers or set(range(dims))


def _permutation(op: Op, dims: int = 0) -> list[int] | None:
    """Returns the input's dimension for each dimension of the result, as in torch.permute; None if not constant."""
    if op.module is not None:
        return [int(dim) % max(dims, 1) for dim in op.module.dims]  # type: ignore[union-attr, arg-type]
    if op.node is None:
        return None
    given: list[Any] = list(op.node.args[1:]) or list(op.node.kwargs.values())
    numbers = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not all(isinstance(number, int) for number in numbers):
        return None
    if not dims:
        return numbers
    numbers = [number % dims for number in numbers]
    if op.node.target in {torch.transpose, "transpose"}:
        order = list(range(dims))
        order[numbers[0]], order[numbers[1]] = order[numbers[1]], order[numbers[0]]
        return order
    return numbers


def _is_reordering(op: Op) -> bool:
    if op.module is not None:
        return type(op.module).__name__ == "Permute" and hasattr(op.module, "dims")
    return _target(op) in {torch.permute, torch.transpose, "permute", "transpose"} and _permutation(op) is not None


@rule("reorder", _is_reordering)
def reorder(op: Op, inputs: list[Op]) -> None:
    """Lets permute and transpose be sharded by samples (n) and by channels in any dimension (c)."""
    op.letters = whole_or_batch(op, inputs)
    order, before = _permutation(op, len(inputs[0].extent.dims)), inputs[0].feature
    if order is None or before is None or order[0] != 0 or before == 0:
        return
    op.feature = order.index(before)
    op.letters["c"] = Sharding((before,), op.feature, length=op.extent.dims[op.feature])

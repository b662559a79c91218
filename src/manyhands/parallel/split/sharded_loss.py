"""The loss of a network whose samples or classes are sharded.

A custom loss is traced into operators. Operators with a rule run on shards of the classes. Partial sums over classes
are added up over processes, and values without a class dimension are replicated.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from manyhands.core.mesh import shard_boundaries
from manyhands.parallel.gradients import sum_over_samples
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import WHOLE
from manyhands.parallel.network import LossFn
from manyhands.parallel.split import execute, tracing
from manyhands.parallel.split.graph import INPUT, LOSS, Graph, Op, Sharding, name_nodes, trace
from manyhands.parallel.split.rules.functions import MAXIMA, max_values, reduced_dims

# (output [n, C], labels int64 [n]) -> the loss of each sample [n, …], or the mean loss [].
CustomLoss = Callable[[Tensor, Tensor], Tensor]

WHOLE_CLASSES = "classes are split only for cross-entropy and losses whose operators all have rules"


class _LossModule(nn.Module):
    def __init__(self, function: CustomLoss) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return self.function(output, labels)


def describe_loss(function: CustomLoss, classes: int, dtype: torch.dtype, device: torch.device) -> Graph | str:
    """Traces a loss over `classes` classes. Returns its graph, or the reason (a text) why classes can't be sharded."""
    traced, unseen = trace(_LossModule(function), lambda _: False, ("output", "labels"))
    if unseen:
        return f"{WHOLE_CLASSES}; this loss can't be traced ({next(iter(unseen.values()))})"
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(tracing.SAMPLES, classes, generator=generator).to(device, dtype)
    labels = torch.randint(classes, (tracing.SAMPLES,), generator=generator).to(device)
    try:
        _fold_sizes(traced, *tracing.run_two_sizes(traced, (output, labels)))
        _replace_maxima(traced)
        many, few = tracing.run_two_sizes(traced, (output, labels))
    except Exception as error:  # noqa: BLE001 - whatever a user's loss does with made-up outputs
        why = str(error).partition("\n")[0]
        return f"{WHOLE_CLASSES}; this loss fails on {tracing.FEWER} or {tracing.SAMPLES} samples ({why})"
    names = name_nodes(traced)
    ops, _ = tracing.describe_ops(traced, names, many, few, _describe_input)
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    if not isinstance(result, fx.Node) or not ops[names[result]].extents:
        return f"{WHOLE_CLASSES}; this loss returns no tensor"
    ops[LOSS] = Op(LOSS, LOSS, sources=(names[result],), tied=LOSS, letters={"r": Sharding((WHOLE,), WHOLE)})
    for op in ops.values():
        _allow_sharded_maximum(op, ops)
    graph = Graph(ops, traced, tracing.SAMPLES, (classes,))
    letters = letters_for_classes(graph)
    return letters if isinstance(letters, str) else graph


def _describe_input(given: Op) -> None:
    """Sets the letters of the loss's inputs: the network's output may have sharded classes, the labels may not."""
    given.letters = {"r": Sharding((), WHOLE)}
    if given.name == INPUT:
        given.feature, given.trains = 1, True
        given.letters["c"] = Sharding((), 1, length=given.extent.dims[1])


def _fold_sizes(traced: fx.GraphModule, many: dict[fx.Node, Any], few: dict[fx.Node, Any]) -> None:
    """Replaces tensor sizes that don't depend on the batch by constants, because shards have other sizes."""
    for node in list(traced.graph.nodes):
        value = many.get(node)
        if type(value) is int and value == few.get(node):
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda one, node=node, value=value: value if one is node else one)
                user.kwargs = fx.map_arg(user.kwargs, lambda one, node=node, value=value: value if one is node else one)
    traced.graph.eliminate_dead_code()
    traced.recompile()


def _replace_maxima(traced: fx.GraphModule) -> None:
    """Replaces `torch.max` over one dimension by `max_values`, unless the loss uses the indices."""
    for node in list(traced.graph.nodes):
        if node.target not in {torch.max, "max"} or len(node.args) + len(node.kwargs) < 2:
            continue
        users = list(node.users)
        values = [one for one in users if one.target in {operator.getitem, getattr} and one.args[1] in {0, "values"}]
        chosen = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if len(values) != len(users) or not isinstance(chosen, int):
            continue
        node.op, node.target = "call_function", max_values
        for one in values:
            one.replace_all_uses_with(node)
            traced.graph.erase_node(one)
    traced.recompile()


def _allow_sharded_maximum(op: Op, ops: dict[str, Op]) -> None:
    """Lets a maximum over classes be sharded by classes (i): the maximum of the maxima of all processes."""
    if op.node is None or op.node.target not in MAXIMA or len(op.sources) != 1:
        return
    source = ops[op.sources[0]]
    if source.feature and source.feature in (reduced_dims(op, len(source.extent.dims)) or ()):
        op.letters["i"] = Sharding((source.feature,), WHOLE, length=source.extent.dims[source.feature])


def letters_for_classes(graph: Graph) -> dict[str, str] | str:
    """Returns {op: letter} along an axis that shards the classes, or the reason (a text) why an op has no letter."""
    letters: dict[str, str] = {}
    for op in graph.ops.values():
        shardings = [graph.ops[name].letters[letters[name]] for name in op.sources]
        cut = any(isinstance(sharding, Sharding) and isinstance(sharding.output, int) for sharding in shardings)
        fitting = [letter for letter in ("c", "i") if isinstance(op.letters.get(letter), Sharding)]
        if op.name == INPUT or op.kind == "one_hot":
            letters[op.name] = "c" if fitting else "r"
        elif not cut or op.name == LOSS:
            letters[op.name] = "r"
        elif fitting:
            letters[op.name] = fitting[0]
        else:
            return f"{WHOLE_CLASSES}; {op.name} of this loss has no rule for split classes"
    return letters


def _sharded_loss(graph: Graph, axes: tuple[int, ...], grid: Grid) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the loss as a function of (output [n, c], labels [n]). c: this process's classes, sharded over `axes`."""
    chosen = letters_for_classes(graph)
    assert isinstance(chosen, dict)
    every = range(len(grid.mesh.axes))
    letters = {name: tuple(letter if axis in axes else "r" for axis in every) for name, letter in chosen.items()}
    return execute.GraphBuilder(graph, letters, grid, {}).build(training=True)


class ShardedLoss:
    """The training loss of a sharded network.

    If the plan doesn't shard the classes, it is `loss_fn`. If the plan does, it is `custom`, the graph of a custom loss
    from `describe_loss`, or without such a graph cross-entropy with label smoothing `smoothing`.
    """

    def __init__(
        self, network: execute.SplitNetwork, loss_fn: LossFn, smoothing: float = 0.0, custom: Graph | None = None
    ) -> None:
        self._network, self._loss_fn, self._smoothing = network, loss_fn, smoothing
        letters = network.letters[LOSS]
        sizes = network.grid.mesh.sizes
        self._classes = tuple(axis for axis, letter in enumerate(letters) if letter == "o" and sizes[axis] > 1)
        self._custom = _sharded_loss(custom, self._classes, network.grid) if custom and self._classes else None

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (summed loss of this process, scores [n, …], index [n] of the correct score in each row)."""
        if not self._classes:
            loss, logits = self._loss_fn(output, labels)
            return loss, logits, labels
        grid = self._network.grid
        group = grid.group(self._classes)
        edges = shard_boundaries(self._network.classes, grid.parts(self._classes))
        place = grid.place(self._classes)
        classes = edges[place], edges[-1]
        if self._custom is None:
            result: Any = _ShardedCrossEntropy.apply(output, labels, classes, group, self._smoothing)
            loss, scores = result
        else:
            given = self._custom(output, labels)
            is_sum = getattr(self._loss_fn, "is_sum", False)  # a sum with all classes is a sum here too
            loss = given.sum() if is_sum else sum_over_samples(given, len(labels))
            scores = sharded_scores(output.detach(), labels, classes[0], group)
        return loss, scores, torch.zeros_like(labels)


def sharded_scores(logits: Tensor, labels: Tensor, first: int, group: Any) -> Tensor:
    """Returns [n, 2]: the logit of the correct class, and the largest logit. Two small all-reduces."""
    largest = logits.max(1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    place = labels - first
    here = (place >= 0) & (place < logits.shape[1])
    found = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    target = torch.where(here, found, torch.zeros_like(found))
    dist.all_reduce(target, group=group)
    return torch.stack([target, largest], 1)


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over sharded classes, with two small all-reduces in forward and none in backward.

    `logits` [n, c] are those of this process's classes, and `labels` int64 [n] index all classes. `classes`: (index of
    this process's first class, number of all classes). Returns the summed loss, equal on all processes, and scores
    [n, 2]: the logit of the correct class and the largest logit, both minus the largest logit.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, classes: tuple[int, int], group: Any, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        first, count = classes
        values = logits if logits.dtype == torch.float64 else logits.float()
        largest = values.max(1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = values - largest[:, None]
        exponents = shifted.exp()
        place = labels - first
        here = (place >= 0) & (place < logits.shape[1])
        place = place.clamp(0, logits.shape[1] - 1)
        target = shifted.gather(1, place[:, None])[:, 0] * here
        sums = torch.stack([exponents.sum(1), target, shifted.sum(1)])
        dist.all_reduce(sums, group=group)
        logarithm = sums[0].log()
        losses = logarithm - (1 - smoothing) * sums[1] - smoothing * sums[2] / count
        ctx.save_for_backward(exponents / sums[0][:, None], place, here)
        ctx.smoothing, ctx.count, ctx.dtype = smoothing, count, logits.dtype
        scores = torch.stack([sums[1], torch.zeros_like(logarithm)], 1)
        ctx.mark_non_differentiable(scores)
        return losses.sum(), scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax, place, here = ctx.saved_tensors
        gradient = softmax - ctx.smoothing / ctx.count
        rows = torch.arange(len(place), device=place.device)
        gradient[rows, place] -= (1 - ctx.smoothing) * here.to(gradient.dtype)
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None, None

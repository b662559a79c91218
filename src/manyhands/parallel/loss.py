"""The loss of a split network, with samples or classes cut."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.mesh import bounds
from manyhands.parallel.convert import convert
from manyhands.parallel.execute import SplitNetwork
from manyhands.parallel.graph import INPUT, LOSS, Graph
from manyhands.parallel.network import LossFn
from manyhands.parallel.placement import Extent, value_of
from manyhands.parallel.sharded_loss import ShardedLoss


def summed_over_samples(loss: Tensor, count: int) -> Tensor:
    """The sum [] of what a loss gives for so many samples: a value for each [n, …], or their mean []."""
    return loss * count if loss.ndim == 0 else loss.reshape(count, -1).mean(1).sum()


class SplitLoss:
    """A loss function over what a split network gives in training.

    `loss_fn`, of outputs and labels int64 [n], gives the sum [] of losses and the logits [n, C]; for uncut classes, and
    None where the user computes it. For cut ones there are cross-entropy's smoothing, or the graph of the user's own
    loss.
    """

    def __init__(
        self, network: SplitNetwork, loss_fn: LossFn | None = None, smoothing: float = 0.0, own: Graph | None = None
    ) -> None:
        self._network, self._loss_fn, self._smoothing = network, loss_fn, smoothing
        letters = network.letters[LOSS]
        sizes = network.grid.mesh.sizes
        self._classes = tuple(axis for axis, letter in enumerate(letters) if letter == "o" and sizes[axis] > 1)
        self._wanted = value_of([0 if letter == "n" else "R" for letter in letters])
        self._given = value_of([0 if letter == "n" else "R" for letter in network.letters[INPUT]])
        self._own = ShardedLoss(own, self._classes, network.grid, network.state) if own and self._classes else None

    def labels(self, labels: Tensor) -> Tensor:
        """The labels of this process's part of the loss, from those of its part of the input."""
        return convert(labels, self._given, self._wanted, Extent((len(labels),), 1), self._network.grid)

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum [] of this process's losses, and scores [n, …] whose largest is at the numbers [n] where right."""
        labels = self.labels(labels)
        if not self._classes:
            assert self._loss_fn is not None
            loss, logits = self._loss_fn(output, labels)
            return loss, logits, labels
        grid = self._network.grid
        group = grid.group(self._classes)
        edges = bounds(self._network.classes, grid.parts(self._classes))
        place = grid.place(self._classes)
        classes = edges[place], edges[-1]
        if self._own is None:
            loss, scores = sharded_cross_entropy(output, labels, classes, group, self._smoothing)
        else:
            given = self._own(output, labels)
            # A loss that was found to be a sum is one here too.
            is_sum = getattr(self._loss_fn, "is_sum", False)
            loss = given.sum() if is_sum else summed_over_samples(given, len(labels))
            scores = shard_scores(output.detach(), labels, classes[0], group)
        return loss, scores, torch.zeros_like(labels)


def shard_scores(logits: Tensor, labels: Tensor, first: int, group: Any) -> Tensor:
    """[n, 2]: the label's logit and the largest one, of classes that several processes hold; two small messages."""
    largest = logits.max(1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    place = labels - first
    here = (place >= 0) & (place < logits.shape[1])
    found = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    target = torch.where(here, found, torch.zeros_like(found))
    dist.all_reduce(target, group=group)
    return torch.stack([target, largest], 1)


def sharded_cross_entropy(
    logits: Tensor, labels: Tensor, classes: tuple[int, int], group: Any, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy over classes that several processes hold parts of, in two small messages.

    Logits [n, c] are of this process's classes, labels int64 [n] count over all; `classes` are the first of this
    process's and the number of all. Gives the sum of losses [], whole on each process, and [n, 2]: the label's logit
    and the largest one.
    """
    result: Any = _ShardedCrossEntropy.apply(logits, labels, classes, group, smoothing)
    return result


class _ShardedCrossEntropy(torch.autograd.Function):
    """Needs no message in its backward pass: each process has the softmax of its own classes."""

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

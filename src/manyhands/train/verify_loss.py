"""Tries whether a loss of the user's own adds up over samples, on made-up outputs and labels that hold every class.

A mean with class weights hides in samples of one class alone, and what a share's own mean is divided by is seen where
shares are uneven and hold other classes. Compared are gradients, by the row: they are what is added up.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.parallel.plain import broadcast_plain
from manyhands.train.draws import drawing
from manyhands.train.loss import Function, LossFn

# Values in one tensor of made-up outputs, and part of the largest gradient that is rounding.
MOST_VALUES, ROUNDING = 1 << 22, 1e-4
# Shares of a batch that is tried: uneven, and none of one sample alone, which some losses can't take.
PARTS = (0.15, 0.6)
MEAN, SUM, NEITHER = "mean", "sum", "neither"
BETTER_LOSS = 'pass torch.nn.CrossEntropyLoss(weight=…) itself, or return one value per sample (reduction="none")'


def verify_loss(loss_fn: LossFn, outputs: int, classes: int, world: World, dtype: torch.dtype) -> LossFn:
    """The loss function as it adds up, or with a sentence for plan.json where it doesn't; a collective.

    Args:
        loss_fn: as the user gave it.
        outputs: of the network.
        classes: labels are below.
        world: who takes part; rank 0's finding counts.
        dtype: of outputs.
    """
    if loss_fn.own is None:
        return loss_fn
    kind, dependent = broadcast_plain(list(_try(loss_fn.own, outputs, classes, world.device, dtype)), world)
    if kind == SUM:
        # What it gives for n samples has been multiplied by n, as of a mean.
        own = loss_fn.own
        return replace(loss_fn, summed=lambda output, labels: own(output, labels).sum(), is_sum=True)
    return replace(loss_fn, dependent=dependent)


def _try(own: Function, outputs: int, classes: int, device: str, dtype: torch.dtype) -> tuple[str, str]:
    """How a loss adds up, and what is to be said of it."""
    rows = max(8, min(2 * classes + 5, MOST_VALUES // outputs))
    failed = ""
    with drawing(derive(0, "loss"), device.partition(":")[0]):
        generator = torch.Generator().manual_seed(derive(0, "made-up"))
        for make in (_log_probabilities, _probabilities):
            found: set[str] = set()
            try:
                function = _copied(own)
                for labels in _labels(classes, rows, generator):
                    values = make(torch.randn(len(labels), outputs, generator=generator))
                    found |= _ways(function, values.to(device, dtype), labels.to(device))
            except Exception as error:  # noqa: BLE001 - the user's own code, of values that it may not be made for
                failed = failed or f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if found <= {MEAN, SUM} and len(found) == 1:
                return found.pop(), ""
            return NEITHER, (
                "The loss of a batch is not the mean of its samples' losses, so training depends on the number of "
                "processes and on train.micro_batch."
            )
    return NEITHER, f"The loss could not be checked for being a mean over samples ({failed})."


def _copied(own: Function) -> Function:
    """A loss that may be tried without the user's own learning of it; fails where it holds what can't be copied."""
    return copy.deepcopy(own) if isinstance(own, nn.Module) else own


def _labels(classes: int, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Labels int64 [up to rows] in which, together, each class is; in their order, then in none."""
    mixed = torch.randperm(classes, generator=generator)
    for some in mixed.split(max(2, rows // 2)):
        twice = some.repeat(-(-max(8, 2 * len(some)) // len(some)))[: max(8, 2 * len(some))]
        yield twice.sort().values
        yield twice[torch.randperm(len(twice), generator=generator)]


def _log_probabilities(values: Tensor) -> Tensor:
    return values.log_softmax(1)


def _probabilities(values: Tensor) -> Tensor:
    return values.softmax(1)


def _ways(function: Function, values: Tensor, labels: Tensor) -> set[str]:
    """How the gradient of a batch comes from those of its parts.

    Raises:
        ValueError: the loss or its gradient isn't finite, so that it isn't made for such outputs; or it draws.
    """
    whole = _gradient(function, values, labels)
    if not bool(torch.isfinite(whole).all()):
        raise ValueError("the gradient for test outputs is not finite")
    if not torch.equal(whole, _gradient(function, values, labels)):
        raise ValueError("the loss function returns different values for the same outputs")
    count = len(labels)
    first, second = (round(part * count) for part in PARTS)
    edges = [0, max(2, first), max(4, second), count]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    gradients = [_gradient(function, values[part], labels[part]) for part in parts]
    means = torch.cat([each * (len(each) / count) for each in gradients])
    limit = ROUNDING * float(whole.abs().max())
    if _near(means, whole, limit):
        return {MEAN}
    return {SUM} if _near(torch.cat(gradients), whole, limit) else {NEITHER}


def _near(one: Tensor, other: Tensor, limit: float) -> bool:
    return bool(((one - other).abs() <= limit).all())  # not a number is far from all


def _gradient(function: Function, values: Tensor, labels: Tensor) -> Tensor:
    """Of the loss [] as it is, or of the mean of its values by sample; zero where it has none."""
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        loss = function(values, labels)
        loss = loss if loss.ndim == 0 else loss.reshape(len(labels), -1).mean(1).mean()
        (gradient,) = torch.autograd.grad(loss, values, allow_unused=True)
    return torch.zeros_like(values) if gradient is None else gradient

"""The loss as a sum over samples, which any number of processes can add up.

A mean in torch is not always over samples: with class weights or an ignored class, the sum is divided by the weights of
the labels. Therefore, a loss is stored as a sum over samples and a separate divisor for the batch.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.config.job import OBJECT, TrainOptions
from manyhands.core.choices import unknown_choice
from manyhands.core.errors import UserError
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.models.interface import main_and_auxiliary
from manyhands.parallel.gradients import summed_over_samples
from manyhands.parallel.group.plain import broadcast_plain
from manyhands.train.feed import drawing
from manyhands.train.objects import brought

Function = Callable[[Tensor, Tensor], Tensor]
BUILT_IN = ("cross-entropy", "nll")


@dataclass(frozen=True)
class LossFn:
    """Computes the sum [] of losses and the logits [n, C] from a network's output and labels int64 [n]."""

    summed: Function  # the same of a tensor of outputs [n, C]
    # what labels int64 [n] count for, added up []; None where each sample counts for one
    weigh: Callable[[Tensor], Tensor] | None = None
    is_sum: bool = False  # the loss of a batch is the sum itself, divided by nothing
    own: Function | None = None  # the user's function, where it isn't known how it adds up; `prove.py` tries it
    # says why the loss depends on how a batch is shared; empty where it doesn't, or hasn't been tried
    dependent: str = ""

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum [] of losses, auxiliary heads' among them, and the logits [n, C]."""
        logits, auxiliary = main_and_auxiliary(output)
        loss = self.summed(logits, labels)
        for other, weight in auxiliary:
            loss = loss + weight * self.summed(other, labels)
        return loss, logits

    def divisor(self, labels: Tensor) -> Tensor | float:
        """Returns the divisor of the sum for a batch with these labels."""
        if self.is_sum:
            return 1.0
        return float(len(labels)) if self.weigh is None else something(self.weigh(labels))


def something(weights: Tensor) -> Tensor:
    """Returns a sum [] of weights as a divisor: 1 if the sum is 0."""
    return torch.where(weights == 0, torch.ones_like(weights), weights)


def make_loss_fn(options: TrainOptions, own: Function | None = None) -> LossFn:
    """Creates the loss of a job or of the user.

    A custom loss may return one value per sample [n] or their mean []. torch's cross-entropy and NLL loss are split
    into sum and divisor.

    Args:
        options: the train section.
        own: the custom loss from Python; it overrides the name in the options.
    """
    if own is not None or options.loss == OBJECT:
        return _of_function(brought("train.loss", options.loss, own))
    if options.loss == "cross-entropy":
        return _taken_apart(F.cross_entropy, {"label_smoothing": options.label_smoothing})
    if options.label_smoothing:
        raise UserError("label smoothing needs cross-entropy", "train.label_smoothing", ("set the option to 0",))
    if options.loss == "nll":
        return _taken_apart(F.nll_loss, {})
    if (function := brought("train.loss", options.loss, None)) is not None:
        return _of_function(function)
    raise unknown_choice("loss", options.loss, [*BUILT_IN, "file.py:function"], "train.loss")


def _of_function(function: Any) -> LossFn:
    if isinstance(function, type) and issubclass(function, nn.Module):
        name = function.__name__
        raise UserError(f"the loss {name} is a class", "train.loss", (f"pass an instance: {name}()",))
    known = _settings_of(function)
    if known:
        return _taken_apart(*known)
    return LossFn(functools.partial(summed, function), own=function)


def _settings_of(function: Any) -> tuple[Callable[..., Tensor], dict[str, Any]] | None:
    """Returns the torch function of a loss and its settings; None for an unknown loss."""
    for kind, known, names in (
        (nn.CrossEntropyLoss, F.cross_entropy, ("weight", "ignore_index", "reduction", "label_smoothing")),
        (nn.NLLLoss, F.nll_loss, ("weight", "ignore_index", "reduction")),
    ):
        if type(function) is kind:
            return known, {name: getattr(function, name) for name in names}
    settings: dict[str, Any] = {}
    if isinstance(function, functools.partial) and not function.args:
        function, settings = function.func, dict(function.keywords)
    # By identity: a callable of the user's own may have no hash.
    known = function is F.cross_entropy or function is F.nll_loss
    return (function, settings) if known and not settings.keys() & {"size_average", "reduce"} else None


def _taken_apart(function: Callable[..., Tensor], settings: dict[str, Any]) -> LossFn:
    """Splits a loss of torch into its sum and the divisor from the weights of the labels."""
    weight: Tensor | None = settings.get("weight")
    ignored: int = settings.get("ignore_index", -100)
    reduction: str = settings.get("reduction", "mean")
    others = {name: value for name, value in settings.items() if name not in {"weight", "reduction"}}

    def add_up(output: Tensor, labels: Tensor) -> Tensor:
        # torch accepts weights of double precision only with such outputs.
        kind = torch.float64 if output.dtype == torch.float64 else torch.float32
        beside = None if weight is None else weight.to(output.device, kind)
        return function(output, labels, weight=beside, reduction="sum", **others)

    def weigh(labels: Tensor) -> Tensor:
        # In double, so that a batch's parts add up to the same however it is shared; Apple's devices have none.
        counted, kind = labels != ignored, torch.float32 if labels.device.type == "mps" else torch.float64
        if weight is None:
            return counted.sum().to(kind)
        return (weight.to(labels.device, kind)[labels.where(counted, 0)] * counted).sum()

    mean = reduction == "mean" and (weight is not None or ignored >= 0)
    return LossFn(add_up, weigh if mean else None, is_sum=reduction == "sum")


def summed(function: Function, output: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum [] of a custom loss that returns one value per sample or their mean.

    Raises:
        UserError: the loss returns something else.
    """
    loss: Any = function(output, labels)
    if isinstance(loss, Tensor) and (loss.ndim == 0 or len(loss) == len(labels)):
        return summed_over_samples(loss, len(labels))
    given = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    hints = ("return one value per sample, or the mean over the samples",)
    raise UserError(f"the loss function returned {given} for {len(labels)} samples", "train.loss", hints)


# Values in one tensor of made-up outputs, and part of the largest gradient that is rounding.
MOST_VALUES, ROUNDING = 1 << 22, 1e-4
# Shares of a batch that is tried: uneven, and none of one sample alone, which some losses can't take.
PARTS = (0.15, 0.6)
MEAN, SUM, NEITHER = "mean", "sum", "neither"
BETTER_LOSS = 'pass torch.nn.CrossEntropyLoss(weight=…) itself, or return one value per sample (reduction="none")'


def verify_loss(loss_fn: LossFn, outputs: int, classes: int, world: World, dtype: torch.dtype) -> LossFn:
    """Checks how a custom loss adds up over samples; adds a sentence for plan.json if it doesn't. A collective.

    Rank 0's result is used. Tested on random outputs [n, `outputs`] of `dtype` and labels below `classes`.
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
    """Returns how a loss adds up, and a sentence if results depend on the number of processes."""
    rows = max(8, min(2 * classes + 5, MOST_VALUES // outputs))
    failed = ""
    with drawing(derive(0, "loss"), device.partition(":")[0]):
        generator = torch.Generator().manual_seed(derive(0, "made-up"))
        for make in (Tensor.log_softmax, Tensor.softmax):
            found: set[str] = set()
            try:
                function = copy.deepcopy(own) if isinstance(own, nn.Module) else own  # which a test would change
                for labels in _labels(classes, rows, generator):
                    values = make(torch.randn(len(labels), outputs, generator=generator), 1)
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
    return NEITHER, f"Can't check that the loss is a mean over samples ({failed})."


def _labels(classes: int, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields labels int64 [up to rows] that together contain each class, sorted and shuffled."""
    for some in torch.randperm(classes, generator=generator).split(max(2, rows // 2)):
        count = max(8, 2 * len(some))
        twice = some.repeat(-(-count // len(some)))[:count]
        yield twice.sort().values
        yield twice[torch.randperm(len(twice), generator=generator)]


def _ways(function: Function, values: Tensor, labels: Tensor) -> set[str]:
    """Determines how the gradient of a batch follows from the gradients of its parts.

    Raises:
        ValueError: the loss or its gradient is not finite for such outputs, or the loss is random.
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
    limit = ROUNDING * float(whole.abs().max())
    ways = {MEAN: [each * (len(each) / count) for each in gradients], SUM: gradients}
    near = (way for way, parts in ways.items() if bool(((torch.cat(parts) - whole).abs() <= limit).all()))
    return {next(near, NEITHER)}


def _gradient(function: Function, values: Tensor, labels: Tensor) -> Tensor:
    """Returns the gradient of the loss [], or of the mean of its values per sample; zero without a gradient."""
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        loss = function(values, labels)
        loss = loss if loss.ndim == 0 else loss.reshape(len(labels), -1).mean(1).mean()
        (gradient,) = torch.autograd.grad(loss, values, allow_unused=True)
    return torch.zeros_like(values) if gradient is None else gradient

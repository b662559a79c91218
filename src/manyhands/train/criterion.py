"""The loss, as a sum over samples, so that any number of processes can add up their parts."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.plugins import is_object_reference, load_object, unknown_choice
from manyhands.models.outputs import main_and_auxiliary

Criterion = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
BUILT_IN = ("cross-entropy", "nll")


def make_criterion(options: TrainOptions, own: Callable[[Tensor, Tensor], Tensor] | None = None) -> Criterion:
    """A function of a network's output and labels int64 [n] that gives the summed loss [] and the logits [n, C].

    A loss of the user's own may return one value per sample [n] or their mean []; a mean is multiplied by n.

    Args:
        options: the train section.
        own: the user's loss from Python; it wins over the name in the options.
    """
    per_output = (own and _summing(own)) or _named(options)

    def criterion(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, auxiliary = main_and_auxiliary(output)
        loss = per_output(logits, labels)
        for other, weight in auxiliary:
            loss = loss + weight * per_output(other, labels)
        return loss, logits

    return criterion


def _named(options: TrainOptions) -> Callable[[Tensor, Tensor], Tensor]:
    if options.loss == "cross-entropy":
        smoothing = options.label_smoothing
        return lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    if options.label_smoothing:
        raise UserError("label smoothing goes with cross-entropy only", "train.label_smoothing", ("set it to 0",))
    if options.loss == "nll":
        return lambda log_probabilities, labels: F.nll_loss(log_probabilities, labels, reduction="sum")
    if is_object_reference(options.loss):
        return _summing(load_object(options.loss, "train.loss"))
    raise unknown_choice("loss", options.loss, [*BUILT_IN, "file.py:function"], "train.loss")


def _summing(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def summed(output: Tensor, labels: Tensor) -> Tensor:
        loss = function(output, labels)
        if loss.ndim == 0:
            return loss * len(labels)
        return loss.reshape(len(labels), -1).mean(1).sum()

    return summed

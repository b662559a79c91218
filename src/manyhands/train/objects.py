"""What a user of the Python interface brings instead of names; without torch, as the head puts it together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.train.epoch_end import AtEpochEnd
    from manyhands.train.own_optimizer import MakeOptimizer


@dataclass
class Objects:
    """Any may be left out.

    Attributes:
        model: an nn.Module.
        train_set: a data set; so are test_set and held_out_set.
        loss: function (output, labels) of the mean loss or one per sample.
        at_epoch_end: called on rank 0 after each epoch.
        optimizer: makes one of the list of parameters.
    """

    model: Any = None
    train_set: Any = None
    test_set: Any = None
    held_out_set: Any = None
    loss: Callable[..., Any] | None = None
    at_epoch_end: "AtEpochEnd | None" = None
    optimizer: "MakeOptimizer | None" = None

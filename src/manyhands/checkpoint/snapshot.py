"""What a checkpoint holds, in memory."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Snapshot:
    """A run's state at one step, gathered on one process."""

    # CPU tensors (any shape, dtype and memory format) by the network's own names, or another tool's
    model: dict[str, Tensor]
    # {"state": {parameter: {key: Tensor or number}}, "param_groups": [{"params": [names], "lr": …}]}, the form of
    # torch's get_optimizer_state_dict with full_state_dict; None where there is none
    optimizer: dict[str, Any] | None = None
    # plain JSON data: step, epoch, step_in_epoch, best, scaler, extra_state … (tuples come back as lists)
    state: dict[str, Any] = field(default_factory=dict)
    # names of tensors that may hold NaN or infinity, since they began so (the mask of an attention, say)
    endless: frozenset[str] = frozenset()

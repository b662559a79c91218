"""What a checkpoint holds, in memory."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint.described import fit_names
from manyhands.checkpoint.tensors import EXTRA_STATE

_COUNTER, _MEAN = "num_batches_tracked", "running_mean"  # of BatchNorm


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
    notes: list[str] = field(default_factory=list[str])  # what of it a network doesn't take, as sentences


def fitted(snapshot: Snapshot, wanted: Collection[str]) -> Snapshot:
    """The snapshot under the names `wanted` of a network's state dict, as `fit_names` finds them.

    BatchNorm counters, which torch before 0.4.1 didn't save, are zero.
    """
    extra = snapshot.state.get(EXTRA_STATE, {})
    names = fit_names([*snapshot.model, *extra], wanted)
    model = {names[key]: one for key, one in snapshot.model.items() if key in names}
    counters = [name for name in wanted if name.endswith(_COUNTER) and name.removesuffix(_COUNTER) + _MEAN in model]
    model = {**{name: torch.zeros((), dtype=torch.int64) for name in counters}, **model}
    renamed = {EXTRA_STATE: {names[key]: one for key, one in extra.items()}} if extra else {}
    return replace(snapshot, model=model, state={**snapshot.state, **renamed})

"""Helpers for torch's DTensors, whose constructors are imported late because that takes half a second."""

from typing import Any

from torch import Tensor


def is_spread(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Any:
    """Returns the full tensor; a collective for a DTensor."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def spread_like(value: Tensor, parameter: Any) -> Tensor:
    """Shards a full tensor like the DTensor `parameter`, without communication; all processes must hold the tensor."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

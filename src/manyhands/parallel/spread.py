"""torch's DTensors; importing what creates them takes half a second."""

from typing import Any

from torch import Tensor


def is_spread(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Any:
    """The full tensor; a collective for a DTensor."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def spread_like(value: Tensor, parameter: Any) -> Tensor:
    """Shards a full tensor, which every process holds, like a DTensor; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

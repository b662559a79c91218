"""Tensors that torch itself has spread over processes, its DTensors; importing what makes them takes half a second."""

from typing import Any

from torch import Tensor


def is_spread(tensor: Any) -> bool:
    """True for a DTensor, which alone can be asked for the whole."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Any:
    """The whole of a tensor; a collective where it is spread."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def spread_like(value: Tensor, parameter: Any) -> Tensor:
    """A whole tensor in the layout of a DTensor. Every process has the whole, so nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

"""Many tensors as one vector, and back; shapes, types and memory formats of the tensors stay as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type in which they are put together: double precision if one of them is, else single."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def as_vector(tensors: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """All values in the order of the tensors' indices, whatever their memory format, [n]; a copy, in `out` if given."""
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors], out=out)


def write_vector(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, piece in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def add_vector(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, piece in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.add_(piece.view(tensor.shape).to(tensor.dtype))

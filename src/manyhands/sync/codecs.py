"""Values as fewer bytes: how numbers travel between machines.

Each codec rounds, and what it rounds away is given back to the sender, who adds it to what it sends next (error
feedback: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847).
Integers are of blocks that share one scale, so that a large value costs only its neighbours their precision.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

# The unit in which vectors are cut, and how many values share a scale unless told otherwise. A scale is of 16 bits, so 4
# bits become 4.0625.
BLOCK = 256
_SCALE_BYTES = 2
# The least scale whose inverse is a number.
_SMALLEST = 1e-35


class Codec(ABC):
    """Turns values into bytes and back; the same bytes give the same values everywhere."""

    @abstractmethod
    def bytes_of(self, count: int) -> int:
        """Bytes for `count` values, a multiple of BLOCK."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Values [..., n] to uint8 [..., bytes_of(n)]; n is a multiple of BLOCK."""

    @abstractmethod
    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Back to [..., n] of a floating type."""


class Plain(Codec):
    """Values as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def bytes_of(self, count: int) -> int:
        """The type's own size."""
        return count * self._dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """Rounds to the type, which may be the values' own."""
        return values.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Exact."""
        return coded.view(self._dtype).to(dtype)


class Integers(Codec):
    """Whole numbers of 8 or 4 bits times a scale for each block.

    Args:
        bits: of a number.
        block: values that share a scale; divides BLOCK.
    """

    def __init__(self, bits: int, block: int = BLOCK) -> None:
        self._bits, self._block = bits, block
        self._most = 2 ** (bits - 1) - 1

    def bytes_of(self, count: int) -> int:
        """The numbers, then the scales."""
        return count * self._bits // 8 + count // self._block * _SCALE_BYTES

    def encode(self, values: Tensor) -> Tensor:
        """Rounds to the nearest.

        A block with an infinity or a NaN becomes NaN, so that nobody takes it for a number.
        """
        blocks = values.to(torch.float32).unflatten(-1, (-1, self._block))
        # Of bfloat16, which has the range of a float32: gradients may be small.
        scales = (blocks.abs().amax(-1) / self._most).to(torch.bfloat16)
        scales = torch.where(scales.isinf(), torch.nan, torch.where(scales < _SMALLEST, 0, scales))
        factors = torch.where(scales > 0, 1 / scales.float(), 0)
        whole = (blocks * factors[..., None]).round_().clamp_(-self._most, self._most).flatten(-2).to(torch.int8)
        if self._bits == 4:
            low, high = whole.add_(8).view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
            packed = high.mul(16).bitwise_or_(low)
        else:
            packed = whole.view(torch.uint8)
        return torch.cat([packed, scales.contiguous().view(torch.uint8)], -1)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers times their scales."""
        per_block = self._block * self._bits // 8 + _SCALE_BYTES
        blocks = coded.shape[-1] // per_block
        packed, scales = coded.split([coded.shape[-1] - blocks * _SCALE_BYTES, blocks * _SCALE_BYTES], -1)
        if self._bits == 4:
            whole = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).view(torch.int8) - 8
        else:
            whole = packed.view(torch.int8)
        factors = scales.contiguous().view(torch.bfloat16).to(torch.float32)
        return (whole.unflatten(-1, (-1, self._block)).to(torch.float32) * factors[..., None]).flatten(-2).to(dtype)


def codec_named(name: str, dtype: torch.dtype) -> Codec:
    """The codec that options call none, bf16, int8 or int4; `dtype` is what "none" keeps."""
    if name == "none":
        return Plain(dtype)
    return Plain(torch.bfloat16) if name == "bf16" else Integers(8 if name == "int8" else 4)


def chunk_values(count: int, machines: int) -> int:
    """How many of `count` values each of some machines adds up for all: equal shares in whole blocks."""
    return -(-count // (machines * BLOCK)) * BLOCK


def mean_bytes(count: int, machines: int, codec: Codec) -> int:
    """Bytes that a machine sends for the mean of `count` values: its parts to their owners, then its own to all."""
    return 2 * (machines - 1) * codec.bytes_of(chunk_values(count, machines)) if machines > 1 else 0

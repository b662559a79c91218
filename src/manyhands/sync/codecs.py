"""Codecs that send values as fewer bytes.

Each codec rounds and returns the rounding error, which the sender adds to its next values (error feedback: Seide et al.
2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847). Integers share a scale per block,
so that a large value costs only its neighbours precision.
"""

import torch
from torch import Tensor

# The unit in which vectors are cut, and how many values share a scale unless told otherwise. A scale is of 16 bits, so
# that 4 bits become 4.0625.
BLOCK = 256
_SCALE_BYTES = 2
# The least scale by which one may divide.
_SMALLEST = 1e-35
# What makes two numbers from -8 to 7 one byte: 8 for the lower, 8 * 16 for the upper.
_BIAS = 136


class Plain:
    """Values of a floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def bytes_of(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        coded = values.to(self._dtype).contiguous()
        return coded.view(torch.uint8), values - coded.to(values.dtype)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded.view(self._dtype).to(dtype)


class Integers:
    """Integers of 8 or 4 bits times a scale for each block of values, whose length divides BLOCK."""

    def __init__(self, bits: int, block: int = BLOCK) -> None:
        self._bits, self._block = bits, block
        self._most = 2 ** (bits - 1) - 1

    def bytes_of(self, count: int) -> int:
        return count * self._bits // 8 + count // self._block * _SCALE_BYTES

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds to the nearest; a block with an infinity or a NaN becomes NaN."""
        blocks = values.to(torch.float32).unflatten(-1, (-1, self._block))
        # bfloat16 has the range of a float32, and gradients may be small.
        scales = (blocks.abs().amax(-1, keepdim=True) / self._most).to(torch.bfloat16)
        scales = torch.where(scales.isinf(), torch.nan, scales.clamp(min=_SMALLEST))
        factors = scales.float()
        whole = (blocks / factors).round_().clamp_(-self._most, self._most)
        lost = values - (whole * factors).flatten(-2).to(values.dtype)
        if self._bits == 4:
            pairs = whole.flatten(-2).unflatten(-1, (-1, 2))
            packed = torch.add(pairs[..., 0], pairs[..., 1], alpha=16).add_(_BIAS).to(torch.uint8)
        else:
            packed = whole.flatten(-2).to(torch.int8).view(torch.uint8)
        return torch.cat([packed, scales.flatten(-2).view(torch.uint8)], -1), lost

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        per_block = self._block * self._bits // 8 + _SCALE_BYTES
        blocks = coded.shape[-1] // per_block
        packed, scales = coded.split([coded.shape[-1] - blocks * _SCALE_BYTES, blocks * _SCALE_BYTES], -1)
        if self._bits == 4:
            whole = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.float32).sub_(8)
        else:
            whole = packed.view(torch.int8).to(torch.float32)
        factors = scales.contiguous().view(torch.bfloat16).to(torch.float32)
        return whole.unflatten(-1, (-1, self._block)).mul_(factors[..., None]).flatten(-2).to(dtype)


# A codec turns values into bytes and back; the same bytes give the same values on every machine. `bytes_of(n)` is the
# number of bytes for n values, a multiple of BLOCK. `encode` turns values [..., n] into uint8 [..., bytes_of(n)] and
# the rounding errors; `decode` returns [..., n] of a floating type.
Codec = Plain | Integers


def codec_named(name: str, dtype: torch.dtype) -> Codec:
    """The codec none, bf16, int8 or int4 of the options; `dtype` is that of "none"."""
    if name == "none":
        return Plain(dtype)
    return Plain(torch.bfloat16) if name == "bf16" else Integers(8 if name == "int8" else 4)


def chunk_values(count: int, machines: int) -> int:
    """Of `count` values, how many each machine sums for all: equal shares in whole blocks."""
    return -(-count // (machines * BLOCK)) * BLOCK


def mean_bytes(count: int, machines: int, codec: Codec) -> int:
    """Bytes that a machine sends for the mean of `count` values: parts to their owners, then its own to all."""
    return 2 * (machines - 1) * codec.bytes_of(chunk_values(count, machines)) if machines > 1 else 0

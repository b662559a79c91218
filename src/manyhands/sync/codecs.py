"""Codecs that send values as fewer bytes.

Each codec rounds and returns the rounding error, which the sender adds to its next values (error feedback: Seide et al.
2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847). Integers share a scale per block,
so that a large value costs only its neighbours precision.
"""

import torch
from torch import Tensor

from manyhands.sync.costs import BLOCK, SCALE_BYTES

_SMALLEST = 1e-35  # the smallest divisor
_BIAS = 136  # packs two integers from -8 to 7 into one byte: 8 + 8 * 16


class Plain:
    """Values of a floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

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

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds to the nearest integer; a block with an infinity or a NaN becomes NaN."""
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
        per_block = self._block * self._bits // 8 + SCALE_BYTES
        blocks = coded.shape[-1] // per_block
        packed, scales = coded.split([coded.shape[-1] - blocks * SCALE_BYTES, blocks * SCALE_BYTES], -1)
        if self._bits == 4:
            whole = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.float32).sub_(8)
        else:
            whole = packed.view(torch.int8).to(torch.float32)
        factors = scales.contiguous().view(torch.bfloat16).to(torch.float32)
        return whole.unflatten(-1, (-1, self._block)).mul_(factors[..., None]).flatten(-2).to(dtype)


# `encode` converts values [..., n], n a multiple of BLOCK, to uint8 and rounding errors; `decode` returns [..., n].
Codec = Plain | Integers


def codec_named(name: str, dtype: torch.dtype) -> Codec:
    """Returns the codec none, bf16, int8 or int4; `dtype` is for "none"."""
    if name == "none":
        return Plain(dtype)
    return Plain(torch.bfloat16) if name == "bf16" else Integers(8 if name == "int8" else 4)

"""The arithmetic of BatchNorm groups that several processes hold: sums over processes, and the pass with its backward.

Whatever is as large as an activation is computed in single precision (in double where the activation is) and rounded
once. Each process subtracts its own mean before it squares, and values per channel are in double, so a mean that is
large beside the deviation costs nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def accumulator_dtype(like: Tensor) -> torch.dtype:
    """Of sums and of values per channel; Apple's devices know no double precision."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def computed_dtype(like: Tensor) -> torch.dtype:
    """Of what is as large as an activation."""
    return like.dtype if like.dtype == torch.float64 else torch.float32


def moments_of(parts: Sequence[tuple[Tensor, int]], groups: int, channels: int, like: Tensor) -> Tensor:
    """Sums and sums of squares of this process's parts [n, C, ...], each with its group's place: [groups, 2, C]."""
    dtype = accumulator_dtype(like)
    moments = torch.zeros(groups, 2, channels, dtype=dtype, device=like.device)
    for part, place in parts:
        values = part.detach().to(computed_dtype(part))
        count = values.shape[0] * values[0, 0].numel() if values.numel() else 0
        if not count:
            continue
        middle = (_reduced(values, dtype) / count).to(values.dtype)
        centred = values - per_channel(middle, values)
        rest, middle = _reduced(centred, dtype), middle.to(dtype)
        moments[place, 0] += count * middle + rest
        moments[place, 1] += _reduced(centred.square_(), dtype) + middle * (2 * rest + count * middle)
    return moments


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values [C] as [1, C, ...], to go with an activation."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))


def _reduced(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of [n, C, ...] over all but channels, [C], over samples in `dtype`."""
    if values.dim() > 2:
        return values.sum(dim=list(range(2, values.dim()))).sum(0, dtype=dtype)
    return values.sum(0).to(dtype)


def _normalised(part: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Part [n, C, ...] less its mean [C], times the inverse deviation [C]; the mean may have more digits than it."""
    dtype = computed_dtype(part)
    middle = mean.to(dtype)
    centred = part.to(dtype) - per_channel(middle, part)
    left = -(mean - middle.to(mean.dtype)) * inverse
    return centred.mul_(per_channel(inverse.to(dtype), part)).add_(per_channel(left.to(dtype), part))


class SharedNorm(torch.autograd.Function):
    """Normalises parts of groups whose statistics are known; its backward sums over the processes once."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, inverse: Tensor, counts: Tensor, held: tuple[tuple[int, ...], Any], weight: Tensor,
        bias: Tensor, *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Args: mean, inverse deviation [groups, C] and counts [groups, 1], the parts' places and what adds up."""
        ctx.save_for_backward(mean, inverse, counts, weight, *parts)
        ctx.places, ctx.add_up = held
        outputs: list[Tensor] = []
        for part, place in zip(parts, ctx.places or (0,), strict=True):
            values = _normalised(part, mean[place], inverse[place])
            values.mul_(per_channel(weight.to(values.dtype), part)).add_(per_channel(bias.to(values.dtype), part))
            outputs.append(values.to(part.dtype))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of weight, bias and parts; a collective."""
        mean, inverse, counts, weight, *parts = ctx.saved_tensors
        sums = torch.zeros(mean.shape[0], 2, mean.shape[1], dtype=mean.dtype, device=mean.device)
        places = ctx.places or (0,)
        normalised: list[Tensor] = []
        wide = [gradient.to(computed_dtype(part)) for gradient, part in zip(gradients, parts, strict=True)]
        for part, place, gradient in zip(parts, places, wide, strict=True):
            values = _normalised(part, mean[place], inverse[place])
            normalised.append(values)
            sums[place, 0] += _reduced(gradient, sums.dtype)
            sums[place, 1] += _reduced(gradient * values, sums.dtype)
        weight_gradient, bias_gradient = sums[:, 1].sum(0).to(weight.dtype), sums[:, 0].sum(0).to(weight.dtype)
        ctx.add_up(sums)
        means = sums / counts[:, None]
        inputs: list[Tensor] = []
        for part, place, gradient, values in zip(parts, places, wide, normalised, strict=True):
            rest = values.mul_(per_channel(means[place, 1].to(values.dtype), part)).neg_().add_(gradient)
            rest.sub_(per_channel(means[place, 0].to(values.dtype), part))
            inputs.append(rest.mul_(per_channel((weight * inverse[place]).to(values.dtype), part)).to(part.dtype))
        return (None, None, None, None, weight_gradient, bias_gradient, *inputs)

"""Forward and backward pass of BatchNorm over several groups at once, or over groups that processes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor


@dataclass(frozen=True)
class PassGroups:
    """The BatchNorm groups that one `NormPass` normalizes on this process."""

    part_groups: tuple[tuple[int, int], ...]  # (first group, number of equal groups) of each part of the input
    all_reduce: Callable[[Tensor], None] | None = None  # sums over processes; None if no group is shared
    eps: float = 0.0  # for groups that aren't shared


def precise_dtype(device: str | torch.device) -> torch.dtype:
    """Returns the dtype in which to sum values on a device: float64, or float32 on mps, which has no float64."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def computed_dtype(like: Tensor) -> torch.dtype:
    """Returns the dtype in which to normalize an activation: float64 for float64, float32 for all others."""
    return like.dtype if like.dtype == torch.float64 else torch.float32


def sum_moments(parts: Sequence[tuple[Tensor, int]], groups: int, channels: int, like: Tensor) -> Tensor:
    """Returns each group's sum and sum of squares [groups, 2, C]. `parts`: (values [n, C, ...], group index) pairs."""
    dtype = precise_dtype(like.device)
    moments = torch.zeros(groups, 2, channels, dtype=dtype, device=like.device)
    for part, place in parts:
        values = split_into_groups(part.detach().to(computed_dtype(part)), 1)
        count = values.numel() // channels
        if not count:
            continue
        middle = (_sum_per_channel(values, dtype) / count).to(values.dtype)
        centered = values - expand_per_channel(middle, values)  # for precision if the mean is far above the deviation
        rest, middle = _sum_per_channel(centered, dtype)[0], middle[0].to(dtype)
        moments[place, 0] += count * middle + rest
        moments[place, 1] += _sum_per_channel(centered.square_(), dtype)[0] + middle * (2 * rest + count * middle)
    return moments


def batch_norm_statistics(part: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance [groups, C] of each of the equal groups in `part` [groups * n, C, ...]."""
    values = split_into_groups(part.detach().to(computed_dtype(part)), groups)
    variance, mean = torch.var_mean(values, dim=[1, *range(3, values.dim())], correction=0)
    return mean.to(precise_dtype(part.device)), variance.to(precise_dtype(part.device))


def split_into_groups(part: Tensor, groups: int) -> Tensor:
    """Returns `part` [groups * n, C, ...] as a view [groups, n, C, ...]."""
    return part.unflatten(0, (groups, part.shape[0] // groups))


def expand_per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Views `values` [groups, C] as [groups, 1, C, 1, ...], which broadcasts over the activation `like`."""
    return values.view(values.shape[0], 1, -1, *([1] * (like.dim() - 3)))


def _sum_per_channel(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums values [groups, n, C, ...] to [groups, C]. The sum over samples is computed in `dtype`."""
    if values.dim() > 3:
        return values.sum(dim=list(range(3, values.dim()))).sum(1, dtype=dtype)
    return values.sum(1).to(dtype)


def _scale_and_shift(values: Tensor, scale: Tensor, shift: Tensor, like: Tensor, *, in_place: bool) -> Tensor:
    """Returns values [groups, n, C, ...] * scale + shift, in shape and dtype of `like`. `in_place` changes `values`."""
    # Not a view, because later ops such as activations may change it in place.
    if torch.compiler.is_compiling():  # torch.compile refuses `out`, and fuses this anyway
        return torch.addcmul(shift, values, scale).flatten(0, 1).to(like.dtype).clone()
    result = torch.empty_like(like)
    into = split_into_groups(result, len(values))
    if in_place:
        torch.add(values.mul_(scale), shift, out=into)
    else:
        torch.addcmul(shift, values, scale, out=into)
    return result


class NormPass(torch.autograd.Function):
    """Normalizes groups whose statistics are known. Backward has one collective if processes share groups.

    Values of a shared group are centered first, so that a large mean costs no precision. Other groups use one
    multiply-add, as torch does on CPUs, which adds the error of rounding an input once.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, inverse: Tensor, counts: Tensor | int, info: PassGroups, weight: Tensor | None,
        bias: Tensor | None, *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`mean`, `inverse` (1 / deviation): [groups, C]. `counts`: values per channel, int or [groups, 1, 1]."""
        ctx.save_for_backward(mean, inverse, weight, bias, *parts)
        ctx.counts, ctx.info = counts, info
        outputs: list[Tensor] = []
        for part, (first, groups) in zip(parts, info.part_groups, strict=True):
            values, off = _centered(part, mean[first : first + groups], info)
            scale = inverse[first : first + groups]
            scale = (scale if weight is None else scale * weight).to(computed_dtype(part))
            shift = -off * scale if bias is None else torch.addcmul(bias, off, scale, value=-1)
            spread = expand_per_channel(scale, values), expand_per_channel(shift.to(scale.dtype), values)
            outputs.append(_scale_and_shift(values, *spread, part, in_place=info.all_reduce is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, inverse, weight, bias, *parts = ctx.saved_tensors
        info: PassGroups = ctx.info
        if torch.is_grad_enabled() and info.all_reduce is None:
            return _differentiable(info, weight, bias, parts, gradients)
        sums = torch.zeros(mean.shape[0], 2, mean.shape[1], dtype=mean.dtype, device=mean.device)
        pieces: list[tuple[Tensor, Tensor, Tensor, Tensor, slice]] = []
        for part, (first, groups), gradient in zip(parts, info.part_groups, gradients, strict=True):
            of = slice(first, first + groups)
            values, off = _centered(part, mean[of], info)
            wide = split_into_groups(gradient.to(computed_dtype(part)), groups)
            total = _sum_per_channel(wide, sums.dtype)
            sums[of, 0].add_(total)
            product = _sum_per_channel(wide * values, sums.dtype)
            sums[of, 1].addcmul_(product.addcmul_(off, total, value=-1), inverse[of])
            pieces.append((part, wide, values, off, of))
        over_groups = sums.sum(0)
        weight_gradient = None if weight is None else over_groups[1].to(weight.dtype)
        bias_gradient = None if bias is None else over_groups[0].to(bias.dtype)
        if info.all_reduce is not None:
            info.all_reduce(sums)
        negative_means = sums / -ctx.counts
        scale = inverse if weight is None else inverse * weight
        inputs: list[Tensor] = []
        for part, wide, values, off, of in pieces:
            slope = negative_means[of, 1] * inverse[of]
            shift = torch.addcmul(negative_means[of, 0], slope, off, value=-1) * scale[of]
            spread = torch.stack([slope, scale[of], shift]).to(wide.dtype)
            slope, times, shift = (expand_per_channel(one, values) for one in spread)
            # (gradient + values times slope) times scale, plus shift
            in_place = info.all_reduce is not None
            tilted = values.mul_(slope).add_(wide) if in_place else torch.addcmul(wide, values, slope)
            inputs.append(_scale_and_shift(tilted, times, shift, part, in_place=in_place))
        return (None, None, None, None, weight_gradient, bias_gradient, *inputs)


def _centered(part: Tensor, mean: Tensor, info: PassGroups) -> tuple[Tensor, Tensor]:
    """Returns `part` and `mean`, both minus an offset: the rounded mean if processes share groups, otherwise 0."""
    values = split_into_groups(part, len(mean))
    if info.all_reduce is None:
        return values, mean
    middle = mean.to(computed_dtype(part))
    return values.to(middle.dtype) - expand_per_channel(middle, values), mean - middle.to(mean.dtype)


def _differentiable(
    info: PassGroups, weight: Tensor | None, bias: Tensor | None, parts: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of `NormPass.backward` by torch's kernels, so that they are differentiable too."""

    def groups_of(tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(tensors, info.part_groups, strict=True)
        return [group for one, (_, count) in pairs for group in split_into_groups(one, count).unbind()]

    outputs = [F.batch_norm(group, None, None, weight, bias, True, 0.0, info.eps) for group in groups_of(parts)]
    wanted = [one for one in (weight, bias, *parts) if one is not None and one.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, groups_of(gradients), create_graph=True))
    answers = [next(found) if one is not None and one.requires_grad else None for one in (weight, bias, *parts)]
    return (None, None, None, None, *answers)

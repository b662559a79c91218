"""Why values that processes computed together are not what they should be: which sums explain them."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.layouts import bounds
from manyhands.core.mesh import Mesh


def close(observed: Tensor, expected: Tensor, tolerance: float, scale: float) -> bool:
    """True when no value differs by more than a part of the scale; numbers that are not finite never are."""
    if observed.shape != expected.shape:
        return False
    return not observed.numel() or bool((observed - expected).abs().max() <= tolerance * scale)


def scale_of(tensors: Iterable[Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


@dataclass(frozen=True)
class Explanation:
    """Sums over `missing` of what is there are sums over `extra` of what should be there (numbers of axes)."""

    missing: tuple[int, ...]
    extra: tuple[int, ...]


def explain(
    observed: Sequence[Tensor], expected: Sequence[Tensor], mesh: Mesh, cut: Collection[int], tolerance: float
) -> list[Explanation]:
    """The simplest reasons for which values, by rank, differ from what they should be; none if there is no such reason.

    Along the axes `cut` processes hold different pieces, so that sums over them mean nothing. The tolerance is a part
    of the largest expected value.
    """
    factor = factor_between(observed, expected, tolerance)
    if factor is not None and factor < 1:
        # Equal parts of a value are no terms that somebody forgot to add up.
        return []
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    open_axes = [axis for axis in axes if axis not in cut]
    candidates = [
        Explanation(missing, extra)
        for missing in _subsets(open_axes)
        for extra in _subsets([axis for axis in axes if axis not in missing])
        if missing or extra
    ]
    found: list[Explanation] = []
    for candidate in sorted(candidates, key=_complexity):
        if found and _complexity(candidate) > _complexity(found[0]):
            break
        if _holds(candidate, observed, expected, mesh, cut, tolerance):
            found.append(candidate)
    return found


def _subsets(axes: Sequence[int]) -> list[tuple[int, ...]]:
    return [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]


def _complexity(candidate: Explanation) -> int:
    return len(candidate.missing) + len(candidate.extra)


def _holds(
    candidate: Explanation,
    observed: Sequence[Tensor],
    expected: Sequence[Tensor],
    mesh: Mesh,
    cut: Collection[int],
    tolerance: float,
) -> bool:
    factor = mesh.parts([axis for axis in candidate.extra if axis in cut])
    summed = [axis for axis in candidate.extra if axis not in cut]
    pairs: list[tuple[Tensor, Tensor]] = []
    for rank in range(mesh.size):
        here = [observed[peer] for peer in mesh.peers(candidate.missing, rank)]
        there = [expected[peer] for peer in mesh.peers(summed, rank)]
        if len({tensor.shape for tensor in (*here, *there)}) != 1:
            return False
        pairs.append((torch.stack(here).sum(0), factor * torch.stack(there).sum(0)))
    scale = scale_of(there for _, there in pairs)
    return scale > 0 and all(close(here, there, tolerance, scale) for here, there in pairs)


def factor_between(observed: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float | None:
    """A number by which all values are too large, or None."""
    here = torch.cat([tensor.reshape(-1) for tensor in observed])
    there = torch.cat([tensor.reshape(-1) for tensor in expected])
    square = float(there @ there) if here.shape == there.shape else 0.0
    if not square:
        return None
    factor = float(here @ there) / square
    return factor if close(here, factor * there, tolerance, scale_of([here])) and factor else None


def differing_axes(values: Sequence[Tensor], mesh: Mesh, cut: Collection[int], tolerance: float) -> tuple[int, ...]:
    """Axes along which processes should hold the same and don't."""
    scale = scale_of(values)
    return tuple(
        axis
        for axis, size in enumerate(mesh.sizes)
        if size > 1 and axis not in cut
        for pair in [[mesh.peers([axis], rank) for rank in range(mesh.size)]]
        if any(not close(values[peer], values[peers[0]], tolerance, scale) for peers in pair for peer in peers)
    )


def cut_of(observed: Sequence[Tensor], expected: Sequence[Tensor], mesh: Mesh) -> tuple[int, int] | None:
    """(axis, dimension) of a cut by which what is there is a piece of what should be there."""
    for axis, dim in itertools.product(range(len(mesh.axes)), range(expected[0].dim())):
        fits = mesh.sizes[axis] > 1
        for rank in range(mesh.size):
            edges = bounds(expected[rank].shape[dim], mesh.sizes[axis])
            place = mesh.coordinates(rank)[axis]
            piece = expected[rank].narrow(dim, edges[place], edges[place + 1] - edges[place])
            fits = fits and close(observed[rank], piece, 1e-6, scale_of(expected))
        if fits:
            return axis, dim
    return None


def error_between(observed: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error, as a part of the largest value that should be there."""
    scale = scale_of(expected) or 1.0
    return max(scale_of([one - due]) for one, due in zip(observed, expected, strict=True)) / scale

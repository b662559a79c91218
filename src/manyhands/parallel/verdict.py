"""What is wrong with a value that processes computed together, and which collective is likely to be missing."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from manyhands.core.errors import RunError
from manyhands.core.layouts import bounds
from manyhands.core.mesh import Mesh

Cause = Literal["missing", "doubled", "wrong axis", "scaled", "replicas", "cut", "mark", "wrong"]
OUTPUT = "output"
SHOWN = 12


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        name: of the parameter, or "output".
        cause: a missing collective, one too many (doubled), one over the wrong axis, a wrong factor (scaled), replicas
            that differ, an output that is cut, a parameter that is not marked as it lies (mark), or none of these.
        axes: names of the mesh's axes that the mend is about.
        what: what is seen.
        mend: what is likely to help.
    """

    name: str
    cause: Cause
    axes: tuple[str, ...]
    what: str
    mend: str

    def as_plain(self) -> list[object]:
        """As JSON data."""
        return [self.name, self.cause, list(self.axes), self.what, self.mend]


@dataclass(frozen=True)
class GradientCheck:
    """What `verify_gradients` found; the same on every process.

    Attributes:
        findings: what is wrong, the output before the parameters.
        worst: the largest error of a gradient, as a part of that gradient's largest value.
        compared: how many parameters were compared.
    """

    findings: tuple[Finding, ...]
    worst: float
    compared: int

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.findings

    def require(self) -> None:
        """Raises RunError when something is wrong."""
        if self.findings:
            first = self.findings[0]
            raise RunError(first.what, first.name, tuple(str(self).splitlines()[1:]))

    def __str__(self) -> str:
        """A few lines: what was compared, what is wrong, what to do."""
        if self.ok:
            return f"{self.compared} gradients are those of one process (largest relative error {self.worst:.1e})"
        lines = [f"{len(self.findings)} thing(s) are wrong, {self.compared} gradients were compared"]
        for finding in self.findings[:SHOWN]:
            lines += [f"{finding.name}: {finding.what}", f"  do: {finding.mend}"]
        if len(self.findings) > SHOWN:
            lines.append(f"… and {len(self.findings) - SHOWN} more")
        return "\n".join(lines)


def close(observed: Tensor, expected: Tensor, tolerance: float, scale: float) -> bool:
    """True when no value differs by more than a part of the scale; numbers that are not finite never are."""
    if observed.shape != expected.shape:
        return False
    return not observed.numel() or bool((observed - expected).abs().max() <= tolerance * scale)


def scale_of(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


@dataclass(frozen=True)
class Explanation:
    """Sums over `missing` of what is there are sums over `extra` of what should be there (numbers of axes)."""

    missing: tuple[int, ...]
    extra: tuple[int, ...]


def explain(
    observed: Sequence[Tensor], expected: Sequence[Tensor], mesh: Mesh, cut: Collection[int], tolerance: float
) -> list[Explanation]:
    """The simplest reasons for which values differ from what they should be; none if there is no such reason.

    Args:
        observed: by rank, what each process has.
        expected: by rank, what it should have.
        mesh: the processes.
        cut: numbers of the axes along which processes hold different pieces, so that sums over them mean nothing.
        tolerance: as a part of the largest expected value.
    """
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


def _holds(  # noqa: PLR0913, PLR0917 - as `explain`
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


def names_of(axes: Iterable[int], mesh: Mesh) -> str:
    """Names of axes for a sentence."""
    return " and ".join(mesh.names[axis] for axis in axes)


def judge_gradient(name: str, found: Sequence[Explanation], mesh: Mesh, shared: Collection[int]) -> Finding | None:
    """The finding for a parameter's gradient that has such explanations; `shared` are the axes of the samples."""
    if not found:
        return None
    missing, extra = found[0].missing, found[0].extra
    absent, twice = names_of(missing, mesh), " or ".join(names_of(one.extra, mesh) for one in found)
    axes = tuple(mesh.names[axis] for axis in (*missing, *extra))
    if missing and extra:
        what = f"its gradient is summed over {twice}, where it should be over {absent}: its sum over {absent} matches"
        return Finding(name, "wrong axis", axes, what, f"write {absent}.enter in place of {twice}.enter")
    if missing:
        what = f"its gradient is partial over {absent}: its sum over {absent} matches"
        mend = f"{absent}.enter is missing where a value that {name} makes goes into work that is split over {absent}"
        return Finding(name, "missing", axes, what, mend)
    what = f"its gradient is {mesh.parts(extra)} times too large: summed twice over {twice}"
    if set(extra) & set(shared):
        mend = f"leave {twice} to the mode, which sums over the axes of the samples: take {twice}.enter away"
    else:
        mend = f"take one all-reduce over {twice} away: {twice}.enter twice, or a torch.distributed one in backward?"
    return Finding(name, "doubled", axes, what, mend)


def judge_output(name: str, found: Sequence[Explanation], mesh: Mesh, but: str = "") -> Finding | None:
    """The finding for an output that has such explanations; `but` is said of what they don't explain."""
    if not found:
        return None
    missing, extra = found[0].missing, found[0].extra
    absent, twice = names_of(missing, mesh), " or ".join(names_of(one.extra, mesh) for one in found)
    axes = tuple(mesh.names[axis] for axis in (*missing, *extra))
    if missing and extra:
        what = f"it is summed over {twice}, where it should be over {absent}: its sum over {absent} matches{but}"
        return Finding(name, "wrong axis", axes, what, f"write {absent}.all_reduce in place of {twice}.all_reduce")
    if missing:
        what = f"it is partial over {absent}: its sum over {absent} matches{but}"
        return Finding(name, "missing", axes, what, f"{absent}.all_reduce is missing")
    what = f"it is {mesh.parts(extra)} times too large: summed twice over {twice}{but}"
    return Finding(name, "doubled", axes, what, f"take one {twice}.all_reduce away")

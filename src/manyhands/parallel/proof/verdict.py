"""What is wrong with a network that its author has split, in words, and which collective is likely to be missing."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from manyhands.core.errors import RunError
from manyhands.core.mesh import Mesh
from manyhands.parallel.proof.sums import Explanation, close, cut_of, error_between, explain, factor_between, scale_of

Cause = Literal["missing", "doubled", "wrong axis", "scaled", "replicas", "cut", "mark", "wrong"]
OUTPUT = "output"
SHOWN = 12
BUT = ", but for what is the same for all samples (a bias?)"


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


def names_of(axes: Iterable[int], mesh: Mesh) -> str:
    return " and ".join(mesh.names[axis] for axis in axes)


def _named(found: Sequence[Explanation], mesh: Mesh) -> tuple[str, str, tuple[str, ...]]:
    """Names of the axes over which a sum is missing, of those with one too many, and of all that a mend is about."""
    missing, extra = found[0].missing, found[0].extra
    twice = " or ".join(names_of(one.extra, mesh) for one in found)
    return names_of(missing, mesh), twice, tuple(mesh.names[axis] for axis in (*missing, *extra))


def judge_gradient(name: str, found: Sequence[Explanation], mesh: Mesh, shared: Collection[int]) -> Finding | None:
    """The finding for a parameter's gradient that has such explanations; `shared` are the axes of the samples."""
    if not found:
        return None
    missing, extra = found[0].missing, found[0].extra
    absent, twice, axes = _named(found, mesh)
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


def judge_sum(name: str, found: Sequence[Explanation], mesh: Mesh, but: str = "") -> Finding | None:
    """The finding for an output that has such explanations; `but` is said of what they don't explain."""
    if not found:
        return None
    missing, extra = found[0].missing, found[0].extra
    absent, twice, axes = _named(found, mesh)
    if missing and extra:
        what = f"it is summed over {twice}, where it should be over {absent}: its sum over {absent} matches{but}"
        return Finding(name, "wrong axis", axes, what, f"write {absent}.all_reduce in place of {twice}.all_reduce")
    if missing:
        what = f"it is partial over {absent}: its sum over {absent} matches{but}"
        return Finding(name, "missing", axes, what, f"{absent}.all_reduce is missing")
    what = f"it is {mesh.parts(extra)} times too large: summed twice over {twice}{but}"
    return Finding(name, "doubled", axes, what, f"take one {twice}.all_reduce away")


def judge_value(
    name: str, observed: list[Tensor], expected: list[Tensor], mesh: Mesh, tolerance: float
) -> Finding | None:
    """What is wrong with what processes have of a value, by rank, when it should be whole for their samples."""
    scale = scale_of(expected)
    if all(close(one, due, tolerance, scale) for one, due in zip(observed, expected, strict=True)):
        return None
    if [one.shape for one in observed] != [one.shape for one in expected]:
        return _judge_shape(name, observed, expected, mesh)
    found = judge_sum(name, explain(observed, expected, mesh, (), tolerance), mesh)
    return found or _judge_differences(name, observed, expected, mesh, tolerance)


def _judge_shape(name: str, observed: list[Tensor], expected: list[Tensor], mesh: Mesh) -> Finding:
    if observed[0].dim() == expected[0].dim():
        cut = cut_of(observed, expected, mesh)
        if cut:
            axis, dim = mesh.names[cut[0]], cut[1]
            what = f"it is cut over {axis} in dimension {dim}"
            return Finding(name, "cut", (axis,), what, f"{axis}.gather(output, {dim}) is missing")
    what = f"it has shape {tuple(observed[0].shape)} for the samples of rank 0, where {tuple(expected[0].shape)} is due"
    return Finding(name, "cut", (), what, "is a gather or scatter missing, or over another axis than it should be?")


def _judge_differences(
    name: str, observed: list[Tensor], expected: list[Tensor], mesh: Mesh, tolerance: float
) -> Finding:
    """What is added once, such as a bias, is not part of a sum; differences between samples don't have it."""
    here, there = ([one - one.mean(0) for one in values] for values in (observed, expected))
    scale = scale_of(there)
    if scale and all(close(one, due, tolerance, scale) for one, due in zip(here, there, strict=True)):
        what = "it is off by the same for all samples"
        mend = "is something whole, such as a bias, added before an all_reduce? It is then added once by each process"
        return Finding(name, "doubled", (), what, mend)
    found = judge_sum(name, explain(here, there, mesh, (), tolerance), mesh, BUT)
    factor = factor_between(here, there, tolerance)
    if found is None and factor is not None:
        return Finding(name, "scaled", (), f"it is {factor:.6g} times what it should be", "is a mean taken for a sum?")
    what = f"it is wrong, by up to {error_between(observed, expected):.1e} of its largest value"
    mend = "is a collective missing, or over a wrong axis, before an op that is not linear?"
    return found or Finding(name, "wrong", (), what, mend)

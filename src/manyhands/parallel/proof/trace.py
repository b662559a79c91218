"""What passed through the collectives of a network's axes, forward and backward, and where it goes wrong."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from manyhands.core.mesh import Mesh
from manyhands.parallel.grid import Grid
from manyhands.parallel.proof.alone import gather
from manyhands.parallel.proof.sums import Explanation, close, explain, scale_of
from manyhands.parallel.proof.verdict import Finding, judge_sum

_OURS = str(Path(__file__).resolve().parents[1])
# Methods whose result is whole, so that it can be compared with one process's.
_WHOLE = ("enter", "all_reduce", "gather")


@dataclass
class CollectiveCall:
    """One call of a collective."""

    label: str  # axis, method and the user's line: "tp.enter at net.py:12"
    value: Tensor | None = None  # what came out, if it is whole
    gradient: Tensor | None = None  # of what went in, if that was whole; None where backward didn't come by


@contextmanager
def recording(grid: Grid) -> Iterator[list[CollectiveCall]]:
    """Keeps what passes through the collectives of a mesh's axes."""
    records: list[CollectiveCall] = []

    def watch(name: str, given: Tensor, result: Tensor) -> None:
        method = name.rpartition(".")[2]
        record = CollectiveCall(f"{name} at {_users_line()}", result.detach() if method in _WHOLE else None)
        records.append(record)
        if given.requires_grad and method in {"enter", "scatter"}:
            given.register_hook(_keeping(record))

    grid.watch = watch
    try:
        yield records
    finally:
        grid.watch = None


def _keeping(record: CollectiveCall) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        record.gradient = gradient.detach().clone()

    return keep


def _users_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "?"


@dataclass(frozen=True)
class WrongPlace:
    """The first collective, in the order of the pass, at which something is wrong, and why."""

    label: str
    why: Explanation


def wrong_places(
    grid: Grid, seen: list[CollectiveCall], due: list[CollectiveCall], shares: list[slice], tolerance: float
) -> tuple[WrongPlace | None, WrongPlace | None]:
    """Where the forward and the backward pass first have a value that is a wrong sum."""

    def first(pairs: list[tuple[str, Tensor | None, Tensor | None]]) -> WrongPlace | None:
        found: WrongPlace | None = None
        for label, here, there in pairs:
            why = _why(grid, here, there, shares, tolerance)
            if why:
                found = WrongPlace(label, why)
            elif found and here is not None:
                break
        # Of collectives one after the other the last one shows what all of them did.
        return found

    both = list(zip(seen, due, strict=False))
    forward = first([(one.label, one.value, other.value) for one, other in both])
    return forward, first([(one.label, one.gradient, other.gradient) for one, other in reversed(both)])


def _why(
    grid: Grid, here: Tensor | None, there: Tensor | None, shares: list[slice], tolerance: float
) -> Explanation | None:
    if here is None or there is None:
        return None
    mesh = grid.mesh
    observed = gather(here, grid)
    dues = [
        _rows_due(there, observed[rank].shape, rows, max(rows.stop for rows in shares))
        for rank, rows in enumerate(shares)
    ]
    expected = [one for one in dues if one is not None]
    if len(expected) < len(dues):
        return None
    scale = scale_of(expected)
    if all(close(one, right, tolerance, scale) for one, right in zip(observed, expected, strict=True)):
        return None
    found = explain(observed, expected, mesh, (), tolerance)
    return found[0] if found else None


def _rows_due(value: Tensor, shape: Sequence[int], share: slice, count: int) -> Tensor | None:
    """The part of one process's value that belongs to a share of `count` samples, if it has this shape, or None."""
    if not value.dim() or value.shape[0] % count:
        return None
    each = value.shape[0] // count
    due = value[share.start * each : share.stop * each]
    return due if tuple(due.shape) == tuple(shape) else None


def located(finding: Finding, place: WrongPlace, mesh: Mesh) -> Finding:
    """The finding for an output that is wrong from a collective on."""
    better = judge_sum(finding.name, [place.why], mesh)
    return replace(better, what=f"at {place.label}, {better.what}") if better else finding

"""What passed through the collectives of a network's axes, forward and backward, to find where it goes wrong."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from manyhands.parallel.grid import Grid

_OURS = str(Path(__file__).resolve().parent)
# Methods whose result is whole, so that it can be compared with one process's.
_WHOLE = ("enter", "all_reduce", "gather")


@dataclass
class Record:
    """One call of a collective.

    Attributes:
        label: axis, method and the user's line: "tp.enter at net.py:12".
        value: what came out, if it is whole.
        gradient: of what went in, if that was whole; None where backward didn't come by.
    """

    label: str
    value: Tensor | None = None
    gradient: Tensor | None = None


@contextmanager
def recording(grid: Grid) -> Iterator[list[Record]]:
    """Keeps what passes through the collectives of a mesh's axes."""
    records: list[Record] = []

    def watch(name: str, given: Tensor, result: Tensor) -> None:
        method = name.rpartition(".")[2]
        record = Record(f"{name} at {_users_line()}", result.detach() if method in _WHOLE else None)
        records.append(record)
        if given.requires_grad and method in {"enter", "scatter"}:
            given.register_hook(_keeping(record))

    grid.watch = watch
    try:
        yield records
    finally:
        grid.watch = None


def _keeping(record: Record) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        record.gradient = gradient.detach().clone()

    return keep


def _users_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "?"


def rows_due(value: Tensor, shape: Sequence[int], share: slice, count: int) -> Tensor | None:
    """The part of one process's value that belongs to a share of `count` samples, if it has this shape, or None."""
    if not value.dim() or value.shape[0] % count:
        return None
    each = value.shape[0] // count
    due = value[share.start * each : share.stop * each]
    return due if tuple(due.shape) == tuple(shape) else None

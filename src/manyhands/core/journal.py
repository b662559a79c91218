"""Writes what happens into the run folder: records by rank 0 alone, and lines by each process into its own file."""

import sys
import time
from collections.abc import Callable
from typing import Any

from manyhands.core.folder import RunFolder
from manyhands.core.records import (
    EvaluationDetail,
    EvaluationMetrics,
    Event,
    StepMetrics,
    append,
    append_line,
    write_json,
)


class Journal:
    """The run's own diary.

    Args:
        folder: the run folder.
        rank: this process.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank, self._told = folder, rank, False

    def event(self, kind: str, message: str = "", step: int | None = None, **data: Any) -> None:
        """Records an event; the other ranks keep silent, for rank 0 sees the same."""
        if self._rank == 0:
            record = Event(time=time.time(), kind=kind, rank=self._rank, step=step, message=message, data=data)
            self._keep(lambda: append(self._folder.events, record))

    def line(self, text: str) -> None:
        """Adds a line, with the time, to this process's own file; on every rank."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._keep(lambda: append_line(self._folder.ranks / f"{self._rank}.log", f"{at} {text}"))

    def metrics(self, record: StepMetrics | EvaluationMetrics) -> None:
        """Records what was measured."""
        if self._rank == 0:
            self._keep(lambda: append(self._folder.metrics, record))

    def detail(self, name: str, record: EvaluationDetail) -> None:
        """Records an evaluation whole, as evaluations/<name>.json."""
        if self._rank == 0:
            self._keep(lambda: write_json(self._folder.evaluations / f"{name}.json", record))

    def _keep(self, write: Callable[[], None]) -> None:
        """A full disk costs the record, not the run; this process's own output says so once."""
        try:
            write()
        except OSError as error:
            if not self._told:
                self._told = True
                sys.stderr.write(f"records can't be written to {self._folder.path}: {error}\n")

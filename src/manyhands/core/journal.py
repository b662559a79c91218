"""Writes what happens into the run folder; only the process that speaks does."""

import time
from typing import Any

from manyhands.core.folder import RunFolder
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics, append


class Journal:
    """The run's own diary.

    Args:
        folder: the run folder.
        rank: this process.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def event(self, kind: str, message: str = "", step: int | None = None, **data: Any) -> None:
        """Records an event; the other ranks keep silent, for rank 0 sees the same."""
        if self._rank == 0:
            record = Event(time=time.time(), kind=kind, rank=self._rank, step=step, message=message, data=data)
            append(self._folder.events, record)

    def metrics(self, record: StepMetrics | EvaluationMetrics) -> None:
        """Records what was measured."""
        if self._rank == 0:
            append(self._folder.metrics, record)

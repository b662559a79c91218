"""Writes what happens into the run folder: records by rank 0 alone, and lines by each process into its own file."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from manyhands.core.files import append_line
from manyhands.core.records import (
    EvaluationDetail,
    EvaluationMetrics,
    Event,
    PhaseMetrics,
    StepMetrics,
    append,
    write_json,
)
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import say

# Records that wait for room on a full disk: at two in a second more than an hour's, in some megabytes of memory.
_MOST_WAITING = 10_000


class Journal:
    """The events of a run.

    A full disk neither ends the run nor tears a hole into its records: they wait, and are written in their order as
    soon as there is room. Of more than ten thousand the oldest are left out.

    Args:
        folder: the run folder.
        rank: this process.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank, self._warned = folder, rank, False
        self._waiting: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
        self._writing = threading.Lock()  # a checkpoint is written, and told of, by a thread

    def event(self, kind: str, message: str = "", step: int | None = None, **data: Any) -> None:
        """Records an event; the other ranks keep silent, for rank 0 sees the same."""
        if self._rank == 0:
            record = Event(time=time.time(), kind=kind, rank=self._rank, step=step, message=message, data=data)
            self._keep(functools.partial(append, self._folder.events, record))

    def line(self, text: str) -> None:
        """Adds a line, with the time, to this process's own file; on every rank."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._keep(lambda: append_line(self._folder.ranks / f"{self._rank}.log", f"{at} {text}"))

    def metrics(self, record: StepMetrics | EvaluationMetrics | PhaseMetrics) -> None:
        """Records what was measured."""
        if self._rank == 0:
            self._keep(functools.partial(append, self._folder.metrics, record))

    def detail(self, name: str, record: EvaluationDetail) -> None:
        """Records an evaluation whole, as evaluations/<name>.json."""
        if self._rank == 0:
            self._keep(functools.partial(write_json, self._folder.evaluations / f"{name}.json", record))

    def file(self, write: Callable[[], None]) -> None:
        """Writes a small file of the run folder; a `write` that raises OSError is called again once there is room."""
        if self._rank == 0:
            self._keep(write)

    def _keep(self, write: Callable[[], None]) -> None:
        """Writes what waits, and this; what can't be written waits, and this process's own output says so once."""
        self._waiting.append(write)
        try:
            with self._writing:
                while self._waiting:
                    self._waiting[0]()
                    self._waiting.popleft()
        except OSError as error:
            if not self._warned:
                self._warned = True
                # That output may lie on the same disk.
                with suppress(OSError):
                    say(f"can't write records to {self._folder.path}: {error}; manyhands keeps the records and retries")

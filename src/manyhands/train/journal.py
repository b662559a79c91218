"""Records of a run: rank 0 writes into the run folder, and each process into its own log."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from manyhands.config.job import Job
from manyhands.core.files import append_line
from manyhands.core.records import EvaluationDetail, Event, Record, append, write_json
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.terminal import say
from manyhands.core.world import World

_MOST_WAITING = 10_000  # records that wait while the disk is full: over an hour at two per second
_SPOKEN = {"setup", "note", "warning", "resumed", "stall", "sync", "changed", "stopped"}


class Journal:
    """Records the events of a run in its folder. Records nothing if the folder is NOWHERE.

    While the disk is full, the last ten thousand records wait in memory, to be written in order once there is space.
    With `prints`, also prints important events, for runs without a progress screen.
    """

    def __init__(self, folder: RunFolder, rank: int, *, prints: bool = False) -> None:
        self._folder, self._rank, self._spoken, self._warned = folder, rank, prints, False
        self._waiting: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
        self._writing = threading.Lock()  # a background thread writes checkpoints and their events

    def event(self, kind: str, message: str = "", step: int | None = None, **data: Any) -> None:
        if self._spoken and self._rank == 0 and kind in _SPOKEN:
            say(message)
        record = Event(time=time.time(), kind=kind, rank=self._rank, step=step, message=message, data=data)
        self.write_file(functools.partial(append, self._folder.events, record))

    def line(self, text: str) -> None:
        """Appends a line with a timestamp to the log of this process."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write_or_retry_later(lambda: append_line(self._folder.ranks / f"{self._rank}.log", f"{at} {text}"))

    def metrics(self, record: Record) -> None:
        self.write_file(functools.partial(append, self._folder.metrics, record))

    def write_detail(self, name: str, record: EvaluationDetail) -> None:
        self.write_file(functools.partial(write_json, self._folder.evaluations / f"{name}.json", record))

    def write_file(self, write: Callable[[], None]) -> None:
        """Calls `write` on rank 0. If it raises an OSError, retries it before the next record."""
        if self._rank == 0:
            self._write_or_retry_later(write)

    def _write_or_retry_later(self, write: Callable[[], None]) -> None:
        """Calls the functions that failed before, then `write`. Prints a message at the first failure."""
        if self._folder is NOWHERE:
            return
        self._waiting.append(write)
        try:
            with self._writing:
                while self._waiting:
                    self._waiting[0]()
                    self._waiting.popleft()
        except OSError as error:
            if not self._warned:
                self._warned = True
                # The output may be on the same disk.
                with suppress(OSError):
                    say(f"can't write records to {self._folder.path}: {error}; keeping records in memory and retrying")


@dataclass(frozen=True)
class RunContext:
    """The job, the processes and the records of a run."""

    job: Job  # the user's options
    folder: RunFolder  # or NOWHERE
    world: World
    journal: Journal
    mode: str  # the resolved parallel mode

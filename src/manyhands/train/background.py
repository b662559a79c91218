"""Writes a checkpoint beside training: from a copy in memory, by a thread, never two at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.checkpoint.write import NotFiniteError, SaveError

SAVED, NOT_SAVED, NOT_FINITE = "saved", "not saved", "not finite"


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended."""

    word: str = SAVED  # SAVED, NOT_SAVED or NOT_FINITE
    what: str = ""  # the disk's words, where it wasn't saved; else the checkpoint's name
    digests: dict[str, str] = field(default_factory=dict[str, str])  # of the files that hold tensors, by name


class Saver:
    """One save at a time, on a process that writes; the others know that one goes on.

    Attributes:
        step: of the save that goes on, None where none does; equal on all processes.
        waited_s: how long training waited for the copy that is written.
        stalled_s: how long it stood still for this save so far.
        wrote_s: how long this process wrote beside training.
        has_run: whether a save of this process has found the run's job file in its folder.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.waited_s = self.stalled_s = self.wrote_s = 0.0
        self.has_run = False
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._error: Exception | None = None

    def begin(self, step: int, write: Callable[[], SaveOutcome] | None, *, beside: bool = True) -> None:
        """Has a checkpoint written, beside training or before this returns; `write` is None on who writes none."""
        self.step, self._outcome, self._error, self.wrote_s = step, None, None, 0.0
        if write is not None and beside:
            self._thread = threading.Thread(target=self._run, args=(write,), name="saving", daemon=True)
            self._thread.start()
        elif write is not None:
            self._run(write)
            self.wrote_s = 0.0

    @property
    def done(self) -> bool:
        """True where this process has written what it was to write."""
        return self._outcome is not None or self._error is not None

    def wait(self) -> None:
        """Until what this process writes is written, or can't be; no collective."""
        if self._thread:
            self._thread.join()

    def end(self) -> SaveOutcome | None:
        """Waits, and gives how it ended; None where this process writes nothing. Raises what wasn't foreseen."""
        self.wait()
        self.step = self._thread = None
        if self._error:
            raise self._error
        return self._outcome

    def _run(self, write: Callable[[], SaveOutcome]) -> None:
        began_s = time.perf_counter()
        try:
            self._outcome = write()
        except SaveError as error:
            self._outcome = SaveOutcome(NOT_SAVED, error.message)
        except NotFiniteError:
            self._outcome = SaveOutcome(NOT_FINITE)
        except Exception as error:  # noqa: BLE001 - raised by whoever asks how it ended
            self._error = error
        self.wrote_s = time.perf_counter() - began_s

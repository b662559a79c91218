"""Hears that the run should stop: Ctrl-C, SIGTERM from a scheduler, or the head's word."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from manyhands.core.records import FAILURE_FILE


class StopSignal:
    """True once somebody asked for a stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler: the first signal asks for a save, a second Ctrl-C ends at once."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def listening() -> Iterator[StopSignal]:
    """Turns SIGINT, SIGTERM and SIGUSR1 into a wish to stop; off the main thread nothing is changed."""
    stop = StopSignal()
    previous: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)):
        with contextlib.suppress(ValueError):
            previous[number] = signal.signal(number, stop.hear)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            # An agent's worker is on its way out now; a wish to stop that others heard first may reach it late.
            late = handler is signal.SIG_DFL and FAILURE_FILE in os.environ
            signal.signal(number, signal.SIG_IGN if late else handler)

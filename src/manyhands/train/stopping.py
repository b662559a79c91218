"""Handles requests to stop: Ctrl-C, SIGTERM from a scheduler, or a request of the launcher."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType

from manyhands.core.errors import EXIT_INTERRUPTED
from manyhands.core.records import FAILURE_FILE
from manyhands.core.stops import STOPS, handled

# The main thread takes a signal up as soon as it is back from what it waits for in C++; a second one is given so long.
_UP_S = 1.5
_POLL_S = 0.25


class StopSignal:
    """True after a request to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: the first signal requests a save, a second Ctrl-C ends the process at once."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def listening() -> Iterator[StopSignal]:
    """Installs signal handlers that record requests to stop; does nothing outside the main thread."""
    stop = StopSignal()
    with handled(stop.hear) as previous:
        for number, handler in previous.items():
            # An agent's worker is on its way out then; a wish to stop that others heard first may reach it late.
            if handler is signal.SIG_DFL and FAILURE_FILE in os.environ:
                previous[number] = signal.SIG_IGN
        yield stop


@contextlib.contextmanager
def ended_where_deaf(hung: Callable[[], str], last_words: Callable[[str], None]) -> Generator[None]:
    """Ends this process at a request to stop even if its main thread hangs and handles no signals.

    If an agent started this process, the agent does that.

    Args:
        hung: returns why no save is possible, or an empty string.
        last_words: called with that reason, or an empty string at a second request, before this process ends.
    """
    if FAILURE_FILE in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before, over = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False), threading.Event()
    thread = threading.Thread(target=_watch, args=(ours, hung, last_words, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        thread.join()
        os.close(ours)
        os.close(theirs)


def _watch(signals: int, hung: Callable[[], str], last_words: Callable[[str], None], over: threading.Event) -> None:
    stop_requests, again_at = 0, float("inf")
    while not over.is_set():
        if select.select([signals], [], [], _POLL_S)[0]:
            heard = [number for number in os.read(signals, 64) if number in {*STOPS}]
            stop_requests += len(heard)
            if stop_requests > 1 and signal.SIGINT in heard:
                again_at = min(again_at, time.monotonic())
        reason = hung() if stop_requests else ""
        if (reason or time.monotonic() - again_at > _UP_S) and not over.is_set():
            last_words(reason)
            os._exit(EXIT_INTERRUPTED)

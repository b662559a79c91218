"""Handles signals that request a run to save and stop."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from manyhands.core.errors import EXIT_INTERRUPTED
from manyhands.core.records import FAILURE_FILE

Handler = Callable[[int, FrameType | None], Any]

# Ctrl-C, a scheduler's end, a closed terminal, and a scheduler's early warning. Some systems lack some of them.
STOPS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
RECEIVED: list[int] = []  # signals that this process has received, in order
_SECOND_SIGNAL_S = 1.5  # limit for the main thread to handle a second signal, for which it must return from C++
_POLL_S = 0.25
_HANDLERS: list[Handler] = []  # handlers of the open contexts, innermost last; also of contexts in other threads


@contextlib.contextmanager
def on_stop(handler: Handler) -> Generator[dict[signal.Signals, Any]]:
    """Calls `handler` for each signal in `STOPS` within the context. Yields the previous handlers, and restores them.

    Installs handlers only in the main thread. Keeps an ignored SIGHUP (nohup) and C handlers, which can't be restored.
    """

    def receive(number: int, frame: FrameType | None) -> Any:
        RECEIVED.append(number)
        return handler(number, frame)

    previous: dict[signal.Signals, Any] = {}
    for number in STOPS:
        before = signal.getsignal(number)
        nohup = number.name == "SIGHUP" and before is signal.SIG_IGN
        with contextlib.suppress(ValueError):  # not the main thread
            if not nohup and before is not None:
                previous[number] = signal.signal(number, receive)
    _HANDLERS.append(handler)
    try:
        yield previous
    finally:
        del _HANDLERS[~_HANDLERS[::-1].index(handler)]  # the innermost, since the same handler may be open twice
        for number, before in previous.items():
            signal.signal(number, before)


def request_stop() -> bool:
    """Calls the innermost handler as SIGTERM would, from any thread. Returns False if no handler can save the run."""
    if not _HANDLERS or _HANDLERS[-1] is signal.default_int_handler:
        return False
    _HANDLERS[-1](signal.SIGTERM, None)
    return True


def stop_signals_as_ctrl_c() -> contextlib.AbstractContextManager[object]:
    """Raises KeyboardInterrupt at any signal in `STOPS` within the context, so that cleanup code runs."""
    return on_stop(signal.default_int_handler)


@contextlib.contextmanager
def stop_signals_delayed() -> Generator[None]:
    """Delays stop signals until after the context, because an interrupted import of torch can't be repeated."""
    received: list[int] = []
    with on_stop(lambda number, _frame: received.append(number)):
        yield
    if received:
        signal.raise_signal(received[0])


class StopSignal:
    """A flag that is True after a request to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handles a stop signal: the first one requests a save, and a second Ctrl-C raises KeyboardInterrupt."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def stop_signal() -> Generator[StopSignal]:
    """Yields a flag that a stop signal sets within the context. Outside the main thread, the flag stays False."""
    stop = StopSignal()
    with on_stop(stop.handle) as previous:
        for number, handler in previous.items():
            # An agent's worker is ending at that time, and a late request to stop must not kill it.
            if handler is signal.SIG_DFL and FAILURE_FILE in os.environ:
                previous[number] = signal.SIG_IGN
        yield stop


@contextlib.contextmanager
def exit_if_hung(hung: Callable[[], str], before_exit: Callable[[str], None]) -> Generator[None]:
    """Exits if the main thread hangs when a stop request arrives within the context. The agent does this for workers.

    `hung` returns the reason why no save is possible, or "" if not hung. `before_exit` is called with that reason.
    """
    if FAILURE_FILE in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before, over = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False), threading.Event()

    def watch() -> None:
        stop_requests, again_at = 0, float("inf")
        while not over.is_set():
            if select.select([ours], [], [], _POLL_S)[0]:
                received = [number for number in os.read(ours, 64) if number in {*STOPS}]
                stop_requests += len(received)
                if stop_requests > 1 and signal.SIGINT in received:
                    again_at = min(again_at, time.monotonic())
            reason = hung() if stop_requests else ""
            if (reason or time.monotonic() - again_at > _SECOND_SIGNAL_S) and not over.is_set():
                before_exit(reason)
                os._exit(EXIT_INTERRUPTED)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        thread.join()
        os.close(ours)
        os.close(theirs)

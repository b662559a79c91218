"""Signals that ask a run to save and stop."""

import contextlib
import signal
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# Ctrl-C, the scheduler's end, a closed terminal, and a scheduler's early warning. Not all systems have all.
STOPS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
RECEIVED: list[int] = []  # those that this process has received, in order
_OPEN: list[Handler] = []  # handlers of the open blocks, innermost last; a block off the main thread has one too


@contextlib.contextmanager
def handled(handler: Handler) -> Generator[dict[signal.Signals, Any]]:
    """Installs a handler for each of `STOPS`, in the main thread only; gives the earlier ones, and restores them.

    An ignored SIGHUP (`nohup`) stays ignored. Handlers from outside Python stay, since they can't be restored.
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
    _OPEN.append(handler)
    try:
        yield previous
    finally:
        _OPEN.remove(handler)
        for number, before in previous.items():
            signal.signal(number, before)


def request_stop() -> bool:
    """Asks the innermost block for a stop as SIGTERM does, from any thread; False while nothing there could save."""
    if not _OPEN or _OPEN[-1] is signal.default_int_handler:
        return False
    _OPEN[-1](signal.SIGTERM, None)
    return True


def ended_like_ctrl_c() -> contextlib.AbstractContextManager[object]:
    """Ends the block with KeyboardInterrupt at each of `STOPS`, so that its cleanup runs."""
    return handled(signal.default_int_handler)


@contextlib.contextmanager
def held_back() -> Generator[None]:
    """Delays stop signals until after the block: an interrupted import of torch cannot be repeated."""
    received: list[int] = []
    with handled(lambda number, _frame: received.append(number)):
        yield
    if received:
        signal.raise_signal(received[0])

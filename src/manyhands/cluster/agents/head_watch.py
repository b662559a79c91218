"""Ends an agent whose head leaves while it is busy, with importing torch from a cold disk perhaps."""

import os
import select
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from manyhands.cluster.agents.wire import Wire

# A pipe's end hangs up; of sshd's socket only one direction is closed. What is closed here hears of nobody any more.
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


@contextmanager
def ended_with_head(wire: Wire, clean_up: Callable[[], None]) -> Generator[None]:
    """Ends this process when its launcher closes the connection, or does not replace one that was lost.

    Reads nothing. Its thread ends with the block, so that workers can be forked afterwards.

    Args:
        wire: the connection, whose input is descriptor 0.
        clean_up: called before the process ends.
    """
    if not hasattr(select, "poll"):
        yield
        return
    ours, over = socket.socketpair()

    def watch() -> None:
        poll = select.poll()
        poll.register(0, _GONE)
        poll.register(over, select.POLLIN)
        while over.fileno() not in (events := dict(poll.poll())):
            if events.get(0, 0) & _GONE:
                if wire.lost and wire.replaced(over):
                    return
                clean_up()
                os._exit(1)

    thread = threading.Thread(target=watch, name="watches the head", daemon=True)
    with ours, over:
        thread.start()
        try:
            yield
        finally:
            ours.send(b".")
            thread.join()

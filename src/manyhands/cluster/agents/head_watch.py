"""Ends an agent whose head leaves while it is busy, with importing torch from a cold disk perhaps."""

import os
import select
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

# A pipe's end hangs up; of sshd's socket only one direction is closed. What is closed here hears of nobody any more.
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


@contextmanager
def ended_with_head(descriptor: int, clean_up: Callable[[], None]) -> Generator[None]:
    """Ends this process as soon as the other end of a descriptor is closed, until the block is left.

    Nothing is read from it. The thread has ended with the block, so that workers can be forked then.

    Args:
        descriptor: of the conversation's input.
        clean_up: called before the process ends.
    """
    if not hasattr(select, "poll"):
        yield
        return
    ours, over = socket.socketpair()

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, _GONE)
        poll.register(over, select.POLLIN)
        while over.fileno() not in (events := dict(poll.poll())):
            if events.get(descriptor, 0) & _GONE:
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

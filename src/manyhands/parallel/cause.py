"""Passes the first cause of a failure to the other processes, who would only see that a connection was closed."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from manyhands.parallel.meet import linger
from manyhands.parallel.said import PeerFailure, understood

LISTEN_S = 0.5
# A process that sees a peer gone waits so long for the reason.
LEARN_S = 2.0
# One that has heard the reason and doesn't see the peer gone, as with NCCL, has so long to end by itself.
PATIENCE_S = 5.0


class Cause:
    """What the first process that failed has said, in the store of all, which goes with rank 0.

    `attempt` is how many times a launcher has restarted the processes. `leave` ends this process, which waits in a
    collective that nobody ends; it is given the first cause, or None where the store itself has gone. None where a
    closed connection ends collectives, as with gloo.
    """

    def __init__(self, store: Any, attempt: int, leave: Callable[[PeerFailure | None], None] | None = None) -> None:
        self._store, self._leave = dist.PrefixStore(f"failure/{attempt}", store), leave
        self._heard: PeerFailure | None = None
        self._known, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def publish(self, failure: PeerFailure) -> None:
        """Tells the others why this process fails, unless one has failed before."""
        text = failure.model_dump_json()
        with contextlib.suppress(dist.DistError):
            if not understood(self._store.compare_set("text", "", text), PeerFailure):
                self._store.set("text", text)  # junk was there

    def learn(self) -> PeerFailure | None:
        """What the first said, or None where nobody has said anything soon."""
        self._known.wait(LEARN_S)
        return self._heard

    def keep_until_heard(self, processes: int) -> None:
        """On the process that the store goes with: waits, not for long, until so many have heard."""
        linger(self._store, "heard", processes)

    def close(self) -> None:
        """Stops listening."""
        self._over.set()
        self._thread.join(LEARN_S)

    def _listen(self) -> None:
        self._wait_for_words()
        if self._leave and not self._over.wait(PATIENCE_S):
            self._leave(self._heard)

    def _wait_for_words(self) -> None:
        with contextlib.suppress(dist.DistError):
            while not self._over.wait(LISTEN_S):
                failure = understood(self._store.get("text"), PeerFailure) if self._store.check(["text"]) else None
                if failure:
                    self._heard = failure
                    self._known.set()
                    self._store.add("heard", 1)
                    return

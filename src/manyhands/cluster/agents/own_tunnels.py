"""A machine's own ssh tunnels to others, and the switchboard that its processes reach them through."""

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.agents import switchboard
from manyhands.core.errors import RunError
from manyhands.core.scratch import scratch
from manyhands.core.timeouts import SWITCHBOARD_S
from manyhands.parallel.tunnel_ends import TunnelEnds, fits

# What the other end of a tunnel says, once it stands.
STANDS = "this tunnel of manyhands stands"


class Tunnels:
    """What one start of the processes needs; opened anew for the next."""

    def __init__(self) -> None:
        self.ends = TunnelEnds("", "")
        self._open = contextlib.ExitStack()
        self._standing: list[_Child] = []

    def open(self, address: str) -> str:
        """A folder for the tunnels' ends, with a switchboard where this machine has an address for its processes."""
        self.close()
        folder = self._open.enter_context(scratch("way"))
        if not fits(folder):
            hints = ("set a shorter path on this machine: export TMPDIR=/tmp",)
            raise RunError(f"the path {folder} is too long for Unix sockets", "TMPDIR", hints)
        self.ends = TunnelEnds(address, str(folder))
        if address:
            words = [sys.executable, "-P", "-m", switchboard.__name__, address, str(folder)]
            if failed := self._add([self._start(words, "the switchboard")], switchboard.READY, SWITCHBOARD_S):
                raise RunError(f"the process that connects ssh tunnels did not start: {failed['the switchboard']}")
        return str(folder)

    def open_tunnels(
        self, commands: Mapping[str, Sequence[str]], patience_s: float, meanwhile: Callable[[], object] = lambda: None
    ) -> dict[str, str]:
        """Starts ssh commands that make tunnels.

        Args:
            commands: by a name for each.
            patience_s: for all of them together.
            meanwhile: called a few times a second until they stand.

        Returns:
            The last words of those that don't stand, by name; these have ended.
        """
        started = [self._start(words, name) for name, words in commands.items()]
        return self._add(started, STANDS, patience_s, meanwhile)

    def ended(self) -> str:
        """What is told of the first that has ended by itself; empty while all stand."""
        for child in self._standing:
            if (code := child.process.poll()) is not None:
                return f"the ssh tunnel to {child.name} ended ({child.said() or f'exit code {code}'})"
        return ""

    def close(self) -> None:
        """Ends all, and takes the sockets away."""
        for child in self._standing:
            child.end()
        self._standing.clear()
        self._open.close()
        self.ends = TunnelEnds("", "")

    def _start(self, words: Sequence[str], name: str) -> "_Child":
        descriptor, log = tempfile.mkstemp(suffix=".log", dir=self.ends.folder)
        with os.fdopen(descriptor, "wb") as file:
            pipe = subprocess.PIPE
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=file, start_new_session=True)
        return _Child(name, process, Path(log))

    def _add(
        self, started: Sequence["_Child"], word: str, patience_s: float, meanwhile: Callable[[], object] = lambda: None
    ) -> dict[str, str]:
        """Keeps those that say a word on a line of its own; ends the others, and gives their last words."""
        failed = _wait_for(started, word, patience_s, meanwhile)
        for child in failed:
            child.end()
        self._standing += [child for child in started if child not in failed]
        return {child.name: child.said() for child in failed}


@dataclass(frozen=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1].strip() if lines else ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


def _wait_for(started: Sequence[_Child], word: str, patience_s: float, meanwhile: Callable[[], object]) -> list[_Child]:
    """Those that haven't said a word on a line of its own before their output, or the time, is over."""
    until, said = time.monotonic() + patience_s, dict.fromkeys(started, b"")
    waiting = list(started)
    with selectors.DefaultSelector() as selector:
        for child in started:
            assert child.process.stdout is not None
            selector.register(child.process.stdout.fileno(), selectors.EVENT_READ, child)
        while selector.get_map() and time.monotonic() < until:
            meanwhile()
            for key, _ in selector.select(min(0.2, until - time.monotonic())):
                received = os.read(key.fd, 1 << 12)
                said[key.data] = (said[key.data] + received)[-(1 << 16) :]
                stands = word.encode() in said[key.data].splitlines()
                if stands:
                    waiting.remove(key.data)
                if stands or not received:
                    selector.unregister(key.fd)
    return waiting

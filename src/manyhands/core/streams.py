"""Output that may be lost without ending the program: a terminal that is closed, a log on a disk that is full."""

from contextlib import suppress
from typing import Any, TextIO


class Tolerant:
    """A text stream on which a write that fails is left out.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, as far as there is somebody to read it."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes each, likewise."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Sends what waits."""
        with suppress(OSError):
            self._stream.flush()

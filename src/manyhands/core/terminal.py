"""Writes to the terminal. All output passes through `say`, `show` or `show_json`, which remove control characters."""

import errno
import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any, TextIO

# Escape sequences and control characters; marks that change the direction of text, which can disguise a name; lone
# surrogates, which can't be encoded.
_SEQUENCE = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
_SINGLE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_CONTROL = re.compile(rf"{_SEQUENCE}|[{_SINGLE}]")
_LINE_ENDS = re.compile("[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")
_UNESCAPED_BY_JSON = re.compile(f"[{_SINGLE}]")


def plain(text: str) -> str:
    """Removes control characters from a text and joins the lines of the text with " | "."""
    lines = [_CONTROL.sub("", line.replace("\t", " ")) for line in _LINE_ENDS.split(text)]
    return lines[0] if len(lines) == 1 else " | ".join(line.strip() for line in lines if line.strip())


def plain_lines(text: str) -> str:
    """Removes control characters from a text, except line ends."""
    return "\n".join(_CONTROL.sub("", line) for line in text.splitlines())


class UnwritableError(Exception):
    """Raised if the output of a command can't be written, for example because the disk is full."""


def as_json(content: Any) -> str:
    return _UNESCAPED_BY_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(content, ensure_ascii=False))


def say(text: str, sender: str = "manyhands") -> None:
    """Writes "`sender`: `text`" to standard error. Ignores errors such as a closed terminal."""
    with suppress(OSError):
        sys.stderr.write(f"{sender}: {escape_unencodable(plain_lines(text), sys.stderr)}\n")
        sys.stderr.flush()


def show(lines: str | Iterable[str], to: TextIO | None = None) -> None:
    """Writes a command's output. Raises BrokenPipeError if the reader has exited, UnwritableError if writing fails."""
    stream = sys.stdout if to is None else to
    text = "".join(f"{plain_lines(line)}\n" for line in ([lines] if isinstance(lines, str) else lines))
    try:
        stream.write(escape_unencodable(text, stream))
        stream.flush()
    except OSError as error:
        if error.errno in {errno.EPIPE, errno.EIO}:  # EIO: the terminal was closed
            raise BrokenPipeError from error
        raise UnwritableError(f"the output can't be written: {error.strerror or error}") from error


def show_json(content: Any) -> None:
    show(as_json(content))


def escape_unencodable(text: str, stream: IO[str]) -> str:
    """Escapes the characters that a stream can't encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class TolerantStream:
    """A text stream that ignores failed writes, such as to a closed terminal or to a log on a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

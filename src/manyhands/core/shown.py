"""What a screen and a report may show of texts that others wrote: names of classes, files and hosts, peers' words.

All that this program says goes out through `say`, `show` and `show_json`; an error cleans its words.
"""

import errno
import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

# Everything that moves a terminal's cursor, changes its colours or ends a line; marks that turn the direction of what
# follows, by which a name reads as another one; and halves of characters, which can't be written.
_SEQUENCE = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
_SINGLE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_OBEYED = re.compile(rf"{_SEQUENCE}|[{_SINGLE}]")
_LINE_ENDS = re.compile("[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")
_LEFT_BY_JSON = re.compile(f"[{_SINGLE}]")


def plain(text: str) -> str:
    """A text as one line that no terminal obeys; further lines stand behind " | "."""
    lines = [_OBEYED.sub("", line.replace("\t", " ")) for line in _LINE_ENDS.split(text)]
    return lines[0] if len(lines) == 1 else " | ".join(line.strip() for line in lines if line.strip())


def plain_lines(text: str) -> str:
    """A text of several lines that no terminal obeys."""
    return "\n".join(_OBEYED.sub("", line) for line in text.splitlines())


class UnwritableError(Exception):
    """A command's own output could not be written where it goes, such as a full disk."""


def as_json(content: Any) -> str:
    """Plain data as one line of JSON in which what a terminal would obey is written as an escape of JSON's."""
    return _LEFT_BY_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(content, ensure_ascii=False))


def say(text: str, who: str = "manyhands") -> None:
    """Tells the user something beside the command's own output; nothing fails where nobody reads it."""
    with suppress(OSError):
        sys.stderr.write(f"{who}: {_writable(plain_lines(text), sys.stderr)}\n")
        sys.stderr.flush()


def show(lines: str | Iterable[str], to: TextIO | None = None) -> None:
    """Writes a command's own output, on standard output unless `to` is another stream; each text may have lines."""
    stream = sys.stdout if to is None else to
    text = "".join(f"{plain_lines(line)}\n" for line in ([lines] if isinstance(lines, str) else lines))
    try:
        stream.write(_writable(text, stream))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno == errno.EIO:  # a terminal that was closed has no reader, as a pipe may have none
            raise BrokenPipeError from error
        raise UnwritableError(f"the output can't be written: {error.strerror or error}") from error


def show_json(content: Any) -> None:
    """Writes one line of JSON on standard output."""
    show(as_json(content))


def _writable(text: str, stream: TextIO) -> str:
    """The text with characters that the stream can't write spelled out."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)

"""The readers of JSON, TOML and YAML from outside: whatever the bytes are, plain data of a known size or one error.

Python's own readers end in a RecursionError at some thousand levels, refuse a number of 5,000 digits where it is read
(or, later, where it is shown), and need minutes for a dotted key of 40 kB. Here each of these is an `UnreadableError`,
which is a ValueError, so that a caller needs one `except (OSError, ValueError)`.
"""

import json
import math
import os
import re
import select
import stat
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NoReturn, cast

MOST_BYTES = 64 * 2**20
MOST_TOML_BYTES = 2**20
MOST_TEXT_BYTES = 8 * 2**20  # a description of machines: a rank table of ten thousand cards has a fifth of it
MOST_YAML_BYTES = 128 * 2**10  # its reader is pure Python: a second for as much
DEEPEST = 64
MOST_DIGITS = 40  # room for 128 bits, and far below what a float can hold
MOST_VALUES = 3_000_000
_MOST_KEY_PARTS = 32
_PIPE_PATIENCE_S = 2.0

_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"""(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MOST_KEY_PARTS},}}""")
_SURROGATE = re.compile("[\ud800-\udfff]")


class UnreadableError(ValueError):
    """Text that can't be read, or is beyond what any file of its kind has; says what, without the place."""


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """A file's bytes; with `pipes` also what is written into a pipe, as a shell makes one of <(COMMAND).

    Raises:
        OSError: it can't be read.
        UnreadableError: it is larger than any such file, a device, or a pipe that mustn't be one or isn't written to.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        kind = os.fstat(file.fileno()).st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise UnreadableError("it is a device, not a file")
        if stat.S_ISFIFO(kind) and not pipes:
            raise UnreadableError("it is a pipe, not a file")
        found = _from_pipe(file.fileno(), most_bytes + 1) if stat.S_ISFIFO(kind) else file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise UnreadableError(f"it is larger than {_size(most_bytes)}, the most that such a file has")
    return found


def open_file(path: Path) -> IO[bytes]:
    """Opens a file for reading, and nothing that could be waited for or read without end.

    Raises:
        OSError: it can't be read.
        UnreadableError: it is a pipe, a socket or a device.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - given to the caller, who closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise UnreadableError("it is a pipe or a device, not a file")


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe whether or not somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _from_pipe(descriptor: int, most_bytes: int) -> bytes:
    """What is written into a pipe, whose writer may take its time, but not between one piece and the next."""
    found, until = bytearray(), time.monotonic() + _PIPE_PATIENCE_S
    while len(found) < most_bytes:
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            raise UnreadableError("it is a pipe that nobody writes to")
        piece = os.read(descriptor, min(1 << 16, most_bytes - len(found)))
        if piece:
            found, until = found + piece, time.monotonic() + _PIPE_PATIENCE_S
        elif found or time.monotonic() > until:
            break
        else:
            time.sleep(0.02)  # no writer yet, which looks like an end
    return bytes(found)


def decoded(content: bytes) -> str:
    """Bytes as text: UTF-8, with or without a byte-order mark, or UTF-16 with one.

    Raises:
        UnreadableError: it is neither; says the line, and which encoding it may be.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return content.decode("utf-16")
        except UnicodeDecodeError as error:
            raise UnreadableError("it begins like UTF-16, and isn't") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"line {line} is not UTF-8{_other_encoding(content)}") from error


def _other_encoding(content: bytes) -> str:
    try:
        content.decode("gbk")
    except UnicodeDecodeError:
        return ""
    return ", but may be GBK"


def parse_json(text: str | bytes, *, infinite: bool = False, once_each: bool = False) -> Any:
    """Plain data from JSON.

    Halves of UTF-16 pairs, which can be neither shown nor written, come as U+FFFD.

    Args:
        text: the JSON; bytes are decoded as `decoded` does.
        infinite: take NaN and Infinity too, which JSON doesn't have; for what processes of one run tell each other.
        once_each: refuse a name that is there twice in one object; else the last one holds.

    Raises:
        UnreadableError: it isn't JSON; or too large, too deep, or has a number that is too long.
    """
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text)
    options: dict[str, Any] = {"parse_int": whole_number}
    if not infinite:
        options |= {"parse_float": finite_number, "parse_constant": _no_constant}
    if once_each:
        options["object_pairs_hook"] = _once_each
    try:
        return json.loads(without_halves(text), **options)
    except json.JSONDecodeError as error:
        raise UnreadableError(str(error)) from None


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Plain data (and dates) from TOML.

    Raises:
        UnreadableError: it isn't TOML; or too large, too deep, or has a number that is too long.
    """
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text, MOST_TOML_BYTES, brackets=False)
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise UnreadableError(f"line {line} has a key of more than {_MOST_KEY_PARTS} parts")
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # TOMLDecodeError, and Python's own limit on the digits of a number
        raise UnreadableError(_too_long() if "digits" in str(error) else str(error)) from None
    _check_values(content)
    return content


def parse_yaml(text: str | bytes) -> tuple[Any, Any]:
    """Plain data from YAML, and the yaml.Node that it came from (None of an empty text), whose parts know their lines.

    Anchors, aliases and tags are refused: no file that is read here has them, and a few lines of them grow to
    gigabytes.

    Raises:
        UnreadableError: it isn't YAML; or too large, too deep, or has what is refused.
    """
    import yaml

    library: Any = yaml  # whose types are half known
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text, MOST_YAML_BYTES, brackets=False)
    try:
        _check_yaml(library.parse(text, Loader=yaml.SafeLoader))
        content: Any = yaml.safe_load(text)
        node: Any = library.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error)
        raise UnreadableError(f"line {mark.line + 1}: {problem}" if mark else problem.splitlines()[0]) from None
    except RecursionError:
        raise _too_deep() from None
    except UnreadableError:
        raise
    except ValueError as error:  # a date that there isn't, a number of 5,000 digits
        raise UnreadableError(f"a value can't be read: {error}") from None
    _check_values(content)
    return content, node


def _check_yaml(events: Iterable[Any]) -> None:
    """Refuses what is nested too deep, before anything recurses, and what stands for something else."""
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise UnreadableError(f"line {event.start_mark.line + 1} has an anchor, an alias or a tag")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _too_deep()


def typed_number(text: str) -> int | None:
    """A count or an index as somebody typed it: 0 and up, in at most 18 digits; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def whole_number(digits: str) -> int:
    """A whole number of a length that can be shown and made a float.

    Raises:
        UnreadableError: it is longer.
    """
    if len(digits) > MOST_DIGITS:
        raise UnreadableError(_too_long())
    return int(digits)


def finite_number(digits: str) -> float:
    """A number that a float can hold.

    Raises:
        UnreadableError: it can't.
    """
    value = float(digits)
    if math.isinf(value):
        raise UnreadableError("a number is larger than any that can be computed with")
    return value


def _no_constant(word: str) -> NoReturn:
    raise UnreadableError(f"{word} is not a value of JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise UnreadableError(f'"{twice}" is there twice in one object')
    return found


def _check_size(text: str, most_bytes: int = MOST_BYTES, *, brackets: bool = True) -> None:
    if len(text) > most_bytes:
        raise UnreadableError(f"it is larger than {_size(most_bytes)}, the most that such a file has")
    opened = text.count("[") + text.count("{")
    if opened + text.count(",") > MOST_VALUES:
        raise UnreadableError(f"it has more than {MOST_VALUES} values")
    if brackets and opened > DEEPEST:
        _check_brackets(found[0] for found in _BRACKET_OR_STRING.finditer(text))


def _check_brackets(tokens: Iterable[str]) -> None:
    depth = 0
    for token in tokens:
        depth += 1 if token in "[{" else -1 if token in "]}" else 0
        if depth > DEEPEST:
            raise _too_deep()


def _check_values(content: Any) -> None:
    """Depth and digits of what a reader made; without recursion, since that is what it guards against."""
    waiting: list[tuple[Any, int]] = [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise _too_deep()
        if isinstance(value, int) and value.bit_length() > MOST_DIGITS * math.log2(10):
            raise UnreadableError(_too_long())
        if isinstance(value, dict):
            waiting += [(one, depth + 1) for pair in cast(dict[Any, Any], value).items() for one in pair]
        elif isinstance(value, list | tuple | set):
            waiting += [(one, depth + 1) for one in cast(Iterable[Any], value)]


def without_halves(text: str) -> str:
    """JSON whose strings have no half of a UTF-16 pair, neither as it is nor as an escape; as long as it was."""
    if text.isascii() and "\\u" not in text:
        return text
    if "\\ud" in text or "\\uD" in text:
        text = _ESCAPES.sub(_whole_pairs, text)
    return _SURROGATE.sub("\ufffd", text)


# A run of escapes, so that a backslash that is itself escaped (\\ud800 is text) isn't taken for the beginning of one.
_ESCAPES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.")


def _whole_pairs(found: re.Match[str]) -> str:
    half = len(found[0]) == len("\\ud800")
    return "\\ufffd" if half else found[0]


def _too_deep() -> UnreadableError:
    return UnreadableError(f"it is nested more than {DEEPEST} levels deep")


def _too_long() -> str:
    return f"a number has more than {MOST_DIGITS} digits"


def _size(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB" if size_bytes >= 2**20 else f"{size_bytes // 2**10} KiB"


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of ours, or None where it is missing, damaged or something else."""
    try:
        content = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], content) if isinstance(content, dict) else None

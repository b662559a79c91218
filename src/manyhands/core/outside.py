"""Readers of JSON, TOML and YAML files from outside: plain data of a limited size, or one `UnreadableError`."""

import json
import math
import re
import stat
import tomllib
from pathlib import Path
from typing import IO, Any, NoReturn, cast

MOST_BYTES = 64 * 2**20
MOST_TOML_BYTES = 2**20
MOST_TEXT_BYTES = 8 * 2**20  # a host list: a rank table of ten thousand cards is about 2 MiB
_MOST_YAML_BYTES = 128 * 2**10  # the parser is pure Python and takes about a second for this
_MOST_DIGITS = 40


class UnreadableError(ValueError):
    """A file or text that can't be parsed or exceeds a limit. The message doesn't name the file."""

    def __init__(self, problem: str, line: int = 0) -> None:
        self.problem, self.line = problem, line  # the line is 0 where it is unknown
        super().__init__(f"line {line}: {problem}" if line else problem)


class RepeatedNameError(UnreadableError):
    """An object in a JSON text has the same name twice."""


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """Reads a file. With `pipes`, also a pipe such as the shell makes for `<(COMMAND)`, until its writer closes it.

    Raises:
        OSError: the file can't be read.
        UnreadableError: the file is larger than `most_bytes`, a device, or a pipe where none is allowed.
    """
    with open_file(path, pipes=pipes) as file:
        content = file.read(most_bytes + 1)
    _check_size(content, most_bytes)
    return content


def open_file(path: Path, *, pipes: bool = False) -> IO[bytes]:
    """Opens a regular file for reading, or with `pipes` a pipe.

    Raises:
        OSError: the file can't be opened.
        UnreadableError: the file is a pipe, a socket or a device, which could block or never end.
    """
    kind = path.stat().st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind) or (pipes and stat.S_ISFIFO(kind)):
        return path.open("rb")
    raise UnreadableError("expected a regular file, found a " + ("pipe" if stat.S_ISFIFO(kind) else "device"))


def decoded(content: bytes) -> str:
    """Decodes UTF-8, with or without a byte-order mark, or UTF-16 with one.

    Raises:
        UnreadableError: the bytes are neither. The message names the line and, where it fits, GBK.
    """
    try:
        return content.decode("utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        try:
            content.decode("gbk")
        except UnicodeDecodeError:
            raise UnreadableError(f"line {line} is not UTF-8") from error
        raise UnreadableError(f"line {line} is not UTF-8, but may be GBK") from error


def parse_json(text: str | bytes, *, infinite: bool = False, once_each: bool = False) -> Any:
    """Parses JSON. Lone surrogates, which can't be printed or encoded, are replaced.

    Args:
        text: the JSON; bytes are decoded as `decoded` does.
        infinite: accept NaN and Infinity, for values that the processes of one run exchange.
        once_each: refuse a name that an object has twice; otherwise the last one counts.

    Raises:
        UnreadableError: the text isn't JSON, is nested too deeply, or has a number that is too long.
    """
    text = decoded(text) if isinstance(text, bytes) else text
    options: dict[str, Any] = {} if infinite else {"parse_float": finite_number, "parse_constant": _refuse_constant}
    if once_each:
        options["object_pairs_hook"] = _refuse_duplicates
    try:
        content = json.loads(text, parse_int=whole_number, **options)
        if "\\u" in text or not text.isascii():
            content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        raise UnreadableError("the nesting is too deep") from None
    except json.JSONDecodeError as error:
        raise UnreadableError(error.msg[:1].lower() + error.msg[1:], error.lineno) from None
    return content


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Parses TOML.

    Raises:
        UnreadableError: the text isn't TOML, is too large, is nested too deeply, or has a number that is too long.
    """
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text, MOST_TOML_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UnreadableError("the nesting is too deep") from None
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def parse_yaml(text: str | bytes) -> tuple[Any, Any]:
    """Parses YAML. Returns the plain data and the `yaml.Node` it came from, which knows its lines (None if empty).

    Raises:
        UnreadableError: the text isn't YAML, is too large or nested too deeply, or has an alias or an unreadable value.
    """
    import yaml

    untyped: Any = yaml
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text, _MOST_YAML_BYTES)
    try:
        for token in untyped.scan(text) if "*" in text else ():
            if isinstance(token, yaml.AliasToken):  # a few aliases can expand to billions of values
                raise UnreadableError("YAML aliases (*name) are not supported", token.start_mark.line + 1)
        return yaml.safe_load(text), untyped.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UnreadableError(str(error.problem), mark.line + 1 if mark else 0) from None
    except RecursionError:
        raise UnreadableError("the nesting is too deep") from None
    except UnreadableError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: a date that doesn't exist, a number of 5,000 digits
        raise UnreadableError(f"a value can't be read: {str(error).splitlines()[0]}") from None


def typed_number(text: str) -> int | None:
    """Parses a count or an index typed by a user: 0 and up, in at most 18 digits. Returns None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def whole_number(digits: str) -> int:
    """Parses an integer short enough to be shown and to become a float.

    Raises:
        UnreadableError: the integer is longer.
    """
    if len(digits) > _MOST_DIGITS:
        raise UnreadableError(f"a number has more than {_MOST_DIGITS} digits")
    return int(digits)


def finite_number(digits: str) -> float:
    """Parses a float.

    Raises:
        UnreadableError: the number is larger than a float can hold.
    """
    if math.isinf(value := float(digits)):
        raise UnreadableError("a number exceeds the range of a 64-bit float")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise UnreadableError(f"{word} is not a JSON value")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedNameError(f'"{twice}" is given twice in one object')
    return content


def _check_size(content: str | bytes, most_bytes: int) -> None:
    if len(content) > most_bytes:
        limit = f"{most_bytes // 2**20} MiB" if most_bytes >= 2**20 else f"{most_bytes // 2**10} KiB"
        raise UnreadableError(f"the file exceeds the limit of {limit}")


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads the JSON object in one of our own files. Returns None if the file is missing, damaged or anything else."""
    try:
        content = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], content) if isinstance(content, dict) else None

"""Reads untrusted files as plain data, and writes files atomically, durably and with the right permissions.

Readers raise OSError, or `UnreadableError` if the content is too large, too deeply nested, damaged or not plain data.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, cast

from manyhands.core.errors import UserError

MOST_BYTES = 64 * 2**20
MOST_TOML_BYTES = 2**20
MOST_TEXT_BYTES = 8 * 2**20  # a host list: a rank table of ten thousand devices is about 2 MiB
_MOST_YAML_BYTES = 128 * 2**10  # the parser is pure Python and takes about a second for this
_MOST_DIGITS = 40


class UnreadableError(ValueError):
    """Raised if a file or text can't be parsed or exceeds a limit. The message doesn't name the file."""

    def __init__(self, problem: str, line: int = 0) -> None:
        self.problem, self.line = problem, line  # 0 if the line is unknown
        super().__init__(f"line {line}: {problem}" if line else problem)


def open_file(path: Path, *, pipes: bool = False) -> IO[bytes]:
    """Opens a regular file for reading; with `pipes`, also a pipe. Refuses sockets and devices, which could block."""
    kind = path.stat().st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind) or (pipes and stat.S_ISFIFO(kind)):
        return path.open("rb")
    raise UnreadableError("expected a regular file, found a " + ("pipe" if stat.S_ISFIFO(kind) else "device"))


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """Reads an entire file; with `pipes`, also a pipe until its end, such as bash's `<(COMMAND)`."""
    with open_file(path, pipes=pipes) as file:
        content = file.read(most_bytes + 1)
    _check_size(content, most_bytes)
    return content


def read_growing(path: Path, offset: int, most_bytes: int, *, rest: bool = False) -> bytes:
    """Reads complete lines from byte `offset`, or part of a line over `most_bytes`. `rest`: also an unfinished line."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(most_bytes)
    lines = content[: content.rfind(b"\n") + 1]
    if len(content) == most_bytes:
        return lines or content
    return content if rest else lines


def size_of(path: Path) -> int:
    """Returns the size of a file in bytes; 0 if it is missing."""
    return path.stat().st_size if path.is_file() else 0


def decoded(content: bytes) -> str:
    """Decodes UTF-8, or UTF-16 with a byte-order mark. Errors name the line, and whether the text may be GBK."""
    try:
        return content.decode("utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"line {line} is not UTF-8"
        with contextlib.suppress(UnicodeDecodeError):
            content.decode("gbk")
            problem += ", but may be GBK"
        raise UnreadableError(problem) from error


def parse_json(text: str | bytes, *, infinite: bool = False, once_each: bool = False) -> Any:
    """Parses JSON. Lone surrogates, which can't be printed or encoded, are replaced.

    Args:
        text: the JSON; bytes are decoded as `decoded` does.
        infinite: accept NaN and Infinity, for values that the processes of one run exchange.
        once_each: raise if an object has a key twice; otherwise the last value counts.
    """
    text = decoded(text) if isinstance(text, bytes) else text
    with _parsing():
        content = json.loads(
            text,
            parse_int=_short_integer,
            parse_float=None if infinite else _finite_number,
            parse_constant=None if infinite else _finite_number,
            object_pairs_hook=_refuse_duplicates if once_each else None,
        )
        if "\\u" in text or not text.isascii():
            content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    return content


def parse_toml(text: str | bytes) -> dict[str, Any]:
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text, MOST_TOML_BYTES)
    with _parsing():
        return tomllib.loads(text)


def parse_yaml(text: str | bytes) -> tuple[Any, Any]:
    """Parses YAML without aliases. Returns (plain data, `yaml.Node` with line numbers), or (None, None) if empty."""
    import yaml

    untyped: Any = yaml
    text = decoded(text) if isinstance(text, bytes) else text
    _check_size(text, _MOST_YAML_BYTES)
    with _parsing("a value can't be read: "):
        try:
            for token in untyped.scan(text) if "*" in text else ():
                if isinstance(token, yaml.AliasToken):  # a few aliases can expand to billions of values
                    raise UnreadableError("YAML aliases (*name) are not supported", token.start_mark.line + 1)
            return yaml.safe_load(text), untyped.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise UnreadableError(str(error.problem), mark.line + 1 if mark else 0) from None
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object that manyhands wrote. Returns None if the file is missing, damaged or not an object."""
    try:
        content = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], content) if isinstance(content, dict) else None


def typed_number(text: str) -> int | None:
    """Parses a count or an index from user input, with at most 18 digits. Returns None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


@contextlib.contextmanager
def _parsing(prefix: str = "") -> Generator[None]:
    try:
        yield
    except UnreadableError:
        raise
    except json.JSONDecodeError as error:
        raise UnreadableError(error.msg[:1].lower() + error.msg[1:], error.lineno) from None
    except RecursionError:
        raise UnreadableError("the nesting is too deep") from None
    except ValueError as error:  # also an invalid date, and a number of 5,000 digits
        raise UnreadableError(prefix + str(error).partition("\n")[0]) from None


def _short_integer(digits: str) -> int:
    """Parses an integer. Raises UnreadableError if it is too long for a message or a float."""
    if len(digits) > _MOST_DIGITS:
        raise UnreadableError(f"a number has more than {_MOST_DIGITS} digits")
    return int(digits)


def _finite_number(word: str) -> float:
    if word.strip("-").isalpha():
        raise UnreadableError(f"{word} is not a JSON value")
    if math.isinf(value := float(word)):
        raise UnreadableError("a number exceeds the range of a 64-bit float")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise UnreadableError(
                f'"{name}" is given twice in one object; the second value is {json.dumps(value)[:80]}'
            )
        content[name] = value
    return content


def _check_size(content: str | bytes, most_bytes: int) -> None:
    if len(content) > most_bytes:
        limit = f"{most_bytes // 2**20} MiB" if most_bytes >= 2**20 else f"{most_bytes // 2**10} KiB"
        raise UnreadableError(f"the file exceeds the limit of {limit}")


_umasks: list[int] = []  # the umasks to restore; the first is the user's


@contextlib.contextmanager
def private_files() -> Generator[None]:
    """Makes files and folders created in the context, also by forked processes, accessible to their owner only."""
    _umasks.append(os.umask(0o077))
    try:
        yield
    finally:
        os.umask(_umasks.pop())


def usual_umask() -> int:
    """Returns the `umask` for `subprocess.Popen`: the user's umask inside `private_files`, else -1 (unchanged)."""
    return _umasks[0] if _umasks else -1


@contextlib.contextmanager
def one_at_a_time(path: Path, hints: tuple[str, ...] = ()) -> Generator[None]:
    """Holds a lock on `path` during the context, with a lock file in the same folder; creates the folder if missing.

    The system releases the lock of a killed process. New files have the user's umask, because users may share data sets
    and caches. Raises UserError with `hints` if the folder can't be written.
    """
    from filelock import FileLock  # not imported by readers of files, such as `--help`

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    previous = os.umask(_umasks[0]) if _umasks else None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            usual = ("choose a writable folder: --data-dir for data, MANYHANDS_CACHE for the cache",)
            what = f"{path.parent} can't be written: {error.strerror or error}"
            raise UserError(what, str(path), hints or usual) from error
        yield
    finally:
        lock.release()
        if previous is not None:
            os.umask(previous)


@contextlib.contextmanager
def temporary(path: Path) -> Generator[Path]:
    """Yields a temporary path in the folder of `path`; removes the file at this temporary path after the context."""
    # Process ids repeat on machines that share a disk.
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yields a temporary path in the folder of `path`; renames this file to `path` unless the context raises."""
    with temporary(path) as part:
        yield part
        part.replace(path)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a text and a newline atomically; creates the folder. With `durable`, syncs to disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text + "\n", encoding="utf-8")
        if durable:
            sync(part)
    if durable:
        sync(path.parent)


def append_line(path: Path, text: str) -> None:
    """Appends a line, in one write if possible, because other processes may append. First ends an unfinished line."""
    line = (text + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            write_all(descriptor, line)
        except OSError:
            # Remove the incomplete line, unless another process has appended to it.
            if line.startswith(os.pread(descriptor, len(line), size)):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Writes all bytes; repeats partial writes, as on a nearly full disk or after a signal."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the entries of a folder, are on the disk."""
    folder = path.is_dir()
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems can't sync folders
        if not folder or error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def free_name(folder: Path, stem: str, suffix: str = "", first: int = 1) -> Path:
    """Returns the first path <stem>-<number><suffix> that doesn't exist in a folder."""
    return next(path for number in itertools.count(first) if not (path := folder / f"{stem}-{number}{suffix}").exists())


def is_full(path: Path) -> bool:
    """Returns True if this user has less than 64 KiB left on the disk of a folder."""
    try:
        state = os.statvfs(path)
    except OSError:
        return False
    blocks = state.f_bfree if os.geteuid() == 0 else state.f_bavail  # some file systems reserve space for root
    return state.f_blocks > 0 and blocks * state.f_frsize < 64 << 10

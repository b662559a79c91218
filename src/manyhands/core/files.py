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
    """Opens a regular file (with `pipes`, also a pipe) for reading. Refuses sockets and devices, which could block."""
    kind = path.stat().st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind) or (pipes and stat.S_ISFIFO(kind)):
        return path.open("rb")
    raise UnreadableError("expected a regular file, found a " + ("pipe" if stat.S_ISFIFO(kind) else "device"))


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """Reads an entire file. With `pipes`, the path may be a pipe, such as bash's `<(COMMAND)`."""
    with open_file(path, pipes=pipes) as file:
        content = file.read(most_bytes + 1)
    _check_size(content, most_bytes)
    return content


def read_new_lines(path: Path, offset: int, most_bytes: int, *, unfinished: bool = False) -> bytes:
    """Reads complete lines from byte `offset`, or part of one over `most_bytes`. `unfinished`: also the rest."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(most_bytes)
    lines = content[: content.rfind(b"\n") + 1]
    if len(content) == most_bytes:
        return lines or content
    return content if unfinished else lines


def file_size(path: Path) -> int:
    """Returns the size of a file in bytes, or 0 if the file is missing."""
    return path.stat().st_size if path.is_file() else 0


def decode_text(content: bytes) -> str:
    """Decodes UTF-8, or UTF-16 with a byte-order mark. Raises UnreadableError for other bytes, such as GBK text."""
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
        text: the JSON, as a string or as bytes for `decode_text`.
        infinite: accept NaN and Infinity, which the processes of a run may send to each other.
        once_each: raise UnreadableError if an object has a key twice. If False, the last value is used.
    """
    text = decode_text(text) if isinstance(text, bytes) else text
    with _convert_parse_errors():
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
    text = decode_text(text) if isinstance(text, bytes) else text
    _check_size(text, MOST_TOML_BYTES)
    with _convert_parse_errors():
        return tomllib.loads(text)


def parse_yaml(text: str | bytes) -> tuple[Any, Any]:
    """Parses YAML without aliases. Returns plain data, and a `yaml.Node` with line numbers (None for empty text)."""
    import yaml

    untyped: Any = yaml
    text = decode_text(text) if isinstance(text, bytes) else text
    _check_size(text, _MOST_YAML_BYTES)
    with _convert_parse_errors("a value can't be read: "):
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


def parse_count(text: str) -> int | None:
    """Parses a nonnegative integer of at most 18 digits from user input. Returns None for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


@contextlib.contextmanager
def _convert_parse_errors(prefix: str = "") -> Generator[None]:
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
    """Parses an integer. Raises UnreadableError if the integer has more than 40 digits."""
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
    """Restricts files and folders that are created within the context, also by forked processes, to their owner."""
    _umasks.append(os.umask(0o077))
    try:
        yield
    finally:
        os.umask(_umasks.pop())


def usual_umask() -> int:
    """Returns the user's umask within `private_files`. Elsewhere returns -1, with which Popen keeps the umask."""
    return _umasks[0] if _umasks else -1


@contextlib.contextmanager
def locked(path: Path, hints: tuple[str, ...] = ()) -> Generator[None]:
    """Holds a lock on `path` within the context, by a lock file in the same folder. Creates a missing folder.

    The system releases the lock of a killed process. Files created within the context have the user's umask, because
    users may share data sets and caches. Raises UserError with `hints` if the folder can't be written.
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


def require_writable(folder: Path) -> None:
    """Raises OSError if the user can't write to a folder or, if it is missing, to the closest existing one above it."""
    folder = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        denied = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        code = denied if folder.is_dir() else errno.ENOTDIR
        raise OSError(code, os.strerror(code), str(folder))


def check_output_files(*paths: Path, force: bool) -> None:
    """Raises UserError if one of the files, which are in one folder, exists (unless `force`) or can't be written."""
    if not force and (found := next((path for path in paths if path.exists()), None)):
        hints = ("overwrite the file: --force", f"or choose another file: --out other{paths[0].suffix}")
        raise UserError(f"{found} already exists", str(found), hints)
    try:
        require_writable(paths[0].parent)
    except OSError as error:
        hints = (f"choose another folder: --out DIR/{paths[0].name}",)
        raise UserError(f"{paths[0]} can't be written: {error.strerror}", error.filename, hints) from error


@contextlib.contextmanager
def temporary_path(path: Path) -> Generator[Path]:
    """Yields a temporary path in the folder of `path`. Removes the file at the temporary path after the context."""
    # Process ids repeat on machines that share a disk.
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_on_success(path: Path) -> Generator[Path]:
    """Yields a temporary path in the folder of `path`. Renames that file to `path` unless the context raises."""
    with temporary_path(path) as part:
        yield part
        part.replace(path)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a text and a newline atomically; creates the folder. With `durable`, syncs to disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_on_success(path) as part:
        part.write_text(text + "\n", encoding="utf-8")
        if durable:
            sync_to_disk(part)
    if durable:
        sync_to_disk(path.parent)


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
    """Writes all bytes to a file descriptor. Continues after partial writes, such as those that a signal interrupts."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_to_disk(path: Path) -> None:
    """Calls fsync, which waits until the bytes of a file, or the entries of a folder, are on the disk."""
    folder = path.is_dir()
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems can't sync folders
        if not folder or error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def unused_path(folder: Path, stem: str, suffix: str = "", first: int = 1) -> Path:
    """Returns the first path folder/<stem>-<number><suffix> that doesn't exist, counting from `first`."""
    return next(path for number in itertools.count(first) if not (path := folder / f"{stem}-{number}{suffix}").exists())


def is_disk_full(path: Path) -> bool:
    """Returns True if the disk of the folder `path` has less than 64 KiB of free space for this user."""
    try:
        state = os.statvfs(path)
    except OSError:
        return False
    blocks = state.f_bfree if os.geteuid() == 0 else state.f_bavail  # some file systems reserve space for root
    return state.f_blocks > 0 and blocks * state.f_frsize < 64 << 10

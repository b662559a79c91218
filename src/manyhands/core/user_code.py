"""Loads and hashes the user's `file.py:object`, and finds the user's lines in a traceback."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import site
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD = {*map(sysconfig.get_path, ("stdlib", "platstdlib")), f"{sysconfig.get_path('platstdlib')}/lib-dynload"}


def is_object_reference(word: str) -> bool:
    path, colon, name = word.rpartition(":")
    return bool(colon) and path.endswith(".py") and name.isidentifier()


def code_file(word: str) -> Path | None:
    """Returns the path in a text such as "file.py:object", even if the file is missing, or None for other texts."""
    return Path(word.rpartition(":")[0]).expanduser().resolve() if is_object_reference(word) else None


def code_digests(words: Iterable[str]) -> dict[str, str]:
    """Returns {word: SHA-256 of its file} for words such as "net.py:Net", and {path: SHA-256} of local modules."""
    found: dict[str, Path] = {}
    for word in words:
        if file := code_file(word):
            found[word] = file
            folder = Path(word.rpartition(":")[0]).parent
            found |= {str(folder / each.relative_to(file.parent)): each for each in imported_files(file)}
    digests: dict[str, str] = {}
    for name, file in found.items():
        with contextlib.suppress(OSError), file.open("rb") as content:
            digests[name] = hashlib.file_digest(content, "sha256").hexdigest()
    return digests


def imported_files(file: Path) -> list[Path]:
    """Returns the modules in the folder of the Python file `file` that it imports, directly or indirectly."""
    found, waiting = dict.fromkeys([file]), [file]
    while waiting and len(found) < 500:
        module = waiting.pop()
        try:
            tree = ast.parse(module.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        paths = itertools.chain.from_iterable(_module_paths(node, module, file.parent) for node in imports)
        new = [path for path in paths if path not in found and path.is_relative_to(file.parent) and path.is_file()]
        found.update(dict.fromkeys(new))
        waiting += new
    return [path for path in found if path != file]


def _module_paths(node: ast.Import | ast.ImportFrom, module: Path, root: Path) -> Iterator[Path]:
    """Yields the paths of files, which may not exist, that an import statement may run, with each __init__.py."""
    names = [name.name for name in node.names]
    level = 0
    if isinstance(node, ast.ImportFrom):
        level, prefix = node.level, node.module or ""
        names = [f"{prefix}.{name}".strip(".") for name in names]
    base = module.parents[min(level, len(module.parents)) - 1] if level else root
    for name in names:
        parts = name.split(".")
        if not level and parts[0] in sys.stdlib_module_names:
            continue
        for count in range(1, len(parts) + 1):
            place = base.joinpath(*parts[:count])
            yield from (place.with_name(f"{place.name}.py"), place / "__init__.py")


def refuse_missing_code(word: str, where: str) -> None:
    if (file := code_file(word)) and not file.is_file():
        hints = ("write path/to/file.py:object",)
        raise UserError(f"there is no file {word.rpartition(':')[0]}", where, hints)


def load_object(reference: str, where: str) -> Any:
    """Imports and returns the user's `file.py:object`. Adds its folder to `sys.path`. Raises UserError on failure."""
    refuse_missing_code(reference, where)
    path_text, _, name = reference.rpartition(":")
    module = _run_file(Path(path_text).expanduser().resolve(), where)
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        hint = did_you_mean(name, public) or f"choose one of its objects: {', '.join(public[:20]) or 'none found'}"
        raise UserError(f"{path_text} has no object {name}", where, (hint,))
    return getattr(module, name)


def _make_importable(path: Path) -> None:
    """Adds the folder of a user's file to `sys.path`, after the standard library, whose modules it must not shadow.

    The current folder is also added, after all installed packages, if it contains the file.
    """
    if str(path.parent) not in sys.path:
        own = [place for place, entry in enumerate(sys.path) if entry in _STANDARD]
        sys.path.insert(max(own, default=-1) + 1, str(path.parent))
    here = Path.cwd()
    if path.is_relative_to(here) and str(here) not in sys.path:
        sys.path.append(str(here))


def _run_file(path: Path, where: str) -> ModuleType:
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None or name in sys.stdlib_module_names:
        name = f"{path.stem}@{path.parent}"  # a user's types.py or random.py must not replace the library's
        if name in sys.modules:
            return sys.modules[name]
    _make_importable(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file", where)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        message = error.msg if isinstance(error, SyntaxError) else error
        what = f"{path.name} can't be loaded: {type(error).__name__}: {message}"
        raise UserError(what, user_line(error) or str(path)) from error
    return module


def user_traceback(error: BaseException) -> str:
    """Formats those frames of an error that are in the user's files. Returns "" if there are none."""
    trace = traceback.TracebackException.from_exception(error)
    return "".join(trace.format()).rstrip() if _keep_user_frames(trace) else ""


def run_git(folder: Path, *words: str) -> bytes:
    """Runs git in a folder and returns the output. Prevents .git/config from running programs."""
    quiet = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    command = ["git", "-C", str(folder), *quiet, *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=10.0, env=environment).stdout


def git_revision(folder: Path) -> str:
    """Returns the short hash of a folder's commit, or "" if there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return os.fsdecode(run_git(folder, "rev-parse", "--short", "HEAD")).strip()
    return ""


def user_line(error: BaseException) -> str:
    """Returns "file:line" of an error's innermost frame in the user's files, or "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    return f"{mine[-1].filename}:{mine[-1].lineno}" if mine else ""


def _keep_user_frames(trace: traceback.TracebackException) -> bool:
    """Removes all frames outside the user's files from an error and its causes. Returns True if any frame is left."""
    trace.stack[:] = [frame for frame in trace.stack if _is_user_file(frame.filename)]
    found = bool(trace.stack) or issubclass(trace.exc_type or object, SyntaxError)
    for before in (trace.__cause__, trace.__context__):
        found |= before is not None and _keep_user_frames(before)
    return found


def _is_user_file(filename: str) -> bool:
    return not filename.startswith(("<frozen ", *_library_folders()))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Returns the folders of code that isn't the user's: Python, installed packages, and manyhands."""
    paths = sysconfig.get_paths()
    found = {_PACKAGE, *site.getsitepackages(), *(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))}
    return tuple(f"{path.rstrip('/')}/" for path in sorted(found))

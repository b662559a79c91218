"""Finds a choice by name: a file in a folder of choices, or an object in the user's own file."""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from manyhands.core.blame import users_line
from manyhands.core.errors import UserError, shortened

_LONGEST_WORD = 200


def module_names(package: str) -> list[str]:
    """Names of the choice files in a package, without importing them."""
    return sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__))


def load_choice(package: str, name: str) -> ModuleType:
    """Imports the choice file `name` of `package`."""
    return importlib.import_module(f"{package}.{name}")


def read_choice(package: str, name: str) -> dict[str, Any]:
    """Returns what a choice file defines, without importing the file, which may import torch.

    Constants, and functions that only return one, have their values; what is computed is None.
    """
    spec = importlib.util.find_spec(f"{package}.{name}")
    found: dict[str, Any] = {}
    for node in ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=word)], value=value)
                | ast.AnnAssign(target=ast.Name(id=word), value=ast.expr() as value)
                | ast.FunctionDef(name=word, body=[*_, ast.Return(value=ast.expr() as value)])
            ):
                found[word] = None
                with suppress(ValueError):
                    found[word] = ast.literal_eval(value)
            case _:
                pass
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is spelled most alike, whatever its case, hyphens and blanks; empty where none is."""
    if len(word) > _LONGEST_WORD:  # comparing takes the product of both lengths, and no known word is as long
        return ""
    bare = {re.sub(r"[-_ ]", "", name).casefold(): name for name in known}
    plain = re.sub(r"[-_ ]", "", word).casefold()
    near = [plain] if plain in bare else difflib.get_close_matches(plain, bare, n=1, cutoff=0.6)
    return bare[near[0]] if near else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the nearest known word, or an empty string."""
    near = nearest(word, known)
    return f'did you mean "{near}"?' if near else ""


def unknown_choice(kind: str, word: str, known: Iterable[str], where: str) -> UserError:
    """The error for a word that names no choice, with a suggestion and the list."""
    words = sorted(known)
    shown = ", ".join(words[:30]) + (f" … ({len(words)} in all)" if len(words) > 30 else "")
    hint = did_you_mean(word, words)
    hints = tuple(filter(None, (hint, f"choose one of: {shown}")))
    return UserError(f'no {kind} is called "{shortened(word)}"', where, hints)


def is_object_reference(word: str) -> bool:
    """True for "file.py:object"."""
    path, colon, name = word.rpartition(":")
    return bool(colon) and path.endswith(".py") and name.isidentifier()


def code_file(word: str) -> Path | None:
    """The file of "file.py:object", whether it is there or not; None for words of another kind."""
    return Path(word.rpartition(":")[0]).expanduser().resolve() if is_object_reference(word) else None


def code_digest(file: Path) -> str:
    """SHA-256 of a file of code, in hex; empty where it can't be read."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return ""


def code_digests(words: Iterable[str]) -> dict[str, str]:
    """The digest of each file of code, by the word that names it; words that name none are left out."""
    files = {word: code_file(word) for word in words}
    return {word: digest for word, file in files.items() if file and (digest := code_digest(file))}


_STANDARD = {*map(sysconfig.get_path, ("stdlib", "platstdlib")), f"{sysconfig.get_path('platstdlib')}/lib-dynload"}


def refuse_no_code(word: str, where: str) -> None:
    """Raises UserError for "file.py:object" where the file is missing."""
    if (file := code_file(word)) and not file.is_file():
        hints = ("write path/to/file.py:object",)
        raise UserError(f"there is no file {word.rpartition(':')[0]}", where, hints)


def load_object(reference: str, where: str) -> Any:
    """Loads `object` from the user's `file.py:object`; the file's folder becomes importable.

    Raises:
        UserError: the file is missing, can't be run, or has no such object.
    """
    refuse_no_code(reference, where)
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text).expanduser().resolve()
    module = _run_file(path, where)
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        hint = did_you_mean(name, public) or f"choose one of its objects: {', '.join(public[:20]) or 'none found'}"
        raise UserError(f"{path_text} has no object {name}", where, (hint,))
    return getattr(module, name)


def _make_importable(path: Path) -> None:
    """Lets a file of the user's own import what lies beside it, as Python does for a script.

    Python's own modules come before it: a process that starts anew with this path needs its random, not the user's.
    Where it lies below the current folder it finds what lies there too, but only after all that is installed.
    """
    if str(path.parent) not in sys.path:
        own = [place for place, entry in enumerate(sys.path) if entry in _STANDARD]
        sys.path.insert(max(own, default=-1) + 1, str(path.parent))
    here = Path.cwd()
    if path.is_relative_to(here) and str(here) not in sys.path:
        sys.path.append(str(here))


def _run_file(path: Path, where: str) -> ModuleType:
    module_name = path.stem
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None or module_name in sys.stdlib_module_names:
        # A user's types.py or random.py must not stand in for the library's.
        module_name = f"{path.stem}@{path.parent}"
        if module_name in sys.modules:
            return sys.modules[module_name]
    _make_importable(path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file", where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        message = error.msg if isinstance(error, SyntaxError) else error
        what = f"{path.name} can't be loaded: {type(error).__name__}: {message}"
        raise UserError(what, users_line(error) or str(path)) from error
    return module

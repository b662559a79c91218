"""Finds and imports choices by name, such as network architectures. Each choice is a module of a package."""

import ast
import difflib
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from manyhands.core.errors import UserError, shortened


def module_names(package: str) -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__))


def load_choice(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"{package}.{name}")


def read_choice(package: str, name: str) -> dict[str, Any]:
    """Parses a choice without importing it. Returns its literals by variable or function name; None: no literal."""
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


def most_similar_word(word: str, known: Iterable[str]) -> str:
    """Returns the known word most similar to `word`, ignoring case, hyphens and blanks, or "" if no word is similar."""
    if len(word) > 200:  # comparing takes the product of both lengths, and no known word is as long
        return ""
    bare = {re.sub(r"[-_ ]", "", name).casefold(): name for name in known}
    plain = re.sub(r"[-_ ]", "", word).casefold()
    near = [plain] if plain in bare else difflib.get_close_matches(plain, bare, n=1, cutoff=0.6)
    return bare[near[0]] if near else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = most_similar_word(word, known)
    return f'did you mean "{near}"?' if near else ""


def unknown_choice_error(kind: str, word: str, known: Iterable[str], where: str) -> UserError:
    """Returns the error for an unknown name. Hints: similar and known names, or for a Python file its definitions."""
    words = sorted(known)
    shown = ", ".join(words[:30]) + (f" … ({len(words)} in all)" if len(words) > 30 else "")
    hints = tuple(filter(None, (did_you_mean(word, words), f"choose one of: {shown}")))
    if word.endswith(".py"):
        names = ["NAME"]
        with suppress(OSError, SyntaxError, ValueError):
            code = ast.parse(Path(word).expanduser().read_bytes()).body
            names = [node.name for node in code if isinstance(node, ast.ClassDef | ast.FunctionDef)] or names
        hints = (f"name a class or function of the file: {', '.join(f'{word}:{name}' for name in names[:10])}",)
    return UserError(f'no {kind} is called "{shortened(word)}"', where, hints)

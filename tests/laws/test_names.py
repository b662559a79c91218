"""The words of the source: one name for one class, and docstrings that say something."""

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "manyhands"
# What a folder of choices asks of each of its files has one name in all of them.
OF_A_CONTRACT = {"Options"}
# What a docstring may consist of beside the name and still say nothing.
EMPTY = {
    "a",
    "an",
    "the",
    "this",
    "that",
    "its",
    "it",
    "is",
    "of",
    "as",
    "in",
    "and",
    "likewise",
    "same",
    "see",
    "too",
    "also",
}


def _trees():
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(SOURCE.rglob("*.py"))]


def _public(tree):
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and not node.name.startswith("_")]


def _words(name):
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}


def test_a_class_name_stands_once():
    places = defaultdict(list)
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in OF_A_CONTRACT:
                places[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_public_docstring_says_more_than_the_name():
    silent = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {said}"
        for path, tree in _trees()
        for node in _public(tree)
        if (said := ast.get_docstring(node)) and not set(re.findall(r"\w+", said.lower())) - EMPTY - _words(node.name)
    ]
    assert not silent

"""The words of the source: one name for one class, and docstrings that say something."""

import ast
import re
import sys
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


def ratchet():
    sys.path.insert(0, str(SOURCE.parents[1] / "scripts"))
    try:
        return __import__("ratchet")
    finally:
        sys.path.pop(0)


def test_the_ratchet_looks_at_identifiers_and_messages_and_not_at_docstrings():
    text = '"""Tells."""\ndef goesOn(a_wish):\n    "told"\n    return f"the run goes on, {a_wish.mended}"\n'
    assert {"goes On", "a wish", "mended"} <= set(ratchet().identifiers(text))
    assert ratchet().messages(text) == ["the run goes on, "]


def test_the_ratchet_refuses_words_that_left(tmp_path, monkeypatch):
    module = ratchet()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    (tmp_path / "kept.py").write_text('"""Tells."""\nfile.tell()\nold = {"mend": 1}\n')
    assert not module.discontinued()
    (tmp_path / "new.py").write_text('def heeds_it():\n    return "to be told"\n')
    assert module.discontinued() == ["new.py has words that are no longer used: heeds, told"]


def test_the_ratchet_refuses_growth_and_limits_that_are_too_high():
    def differing(**lines):
        return ratchet().differences({"lines": {"cli": 100}}, {"lines": lines, "worker": {}})

    assert not differing(cli=100)
    assert not differing(cli=75)
    assert len(differing(cli=101)) == 1
    assert len(differing(cli=74)) == 1
    assert len(differing(cli=100, new=1)) == 1

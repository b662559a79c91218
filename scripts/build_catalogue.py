"""Writes src/manyhands/locale/manyhands.pot: every text that users read, as gettext's tools take it.

Run it after a text was added or changed: python scripts/build_catalogue.py. A test compares the file with what it would
write. Nothing is marked in the source: a text is a string of words that isn't a docstring, a pattern, or a flag's help.
"""

import ast
import io
import itertools
import re
import string
from collections.abc import Iterator
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import write_po

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "manyhands"
CATALOGUE = PACKAGE / "locale" / "manyhands.pot"
# What stands in these isn't shown through the catalogue.
OTHER_CALLS = {"re.compile", "Parameter", "Field", "AssertionError", "NotImplementedError", "exec", "execute"}
MOST_VARIANTS = 16
# Fewer fixed letters than this for each value would fit every text.
FIXED_LETTERS = 3

# A text in pieces: fixed words, or the name of a value in a tuple of one.
Pieces = tuple["str | tuple[str]", ...]


def texts_of_source(source: str) -> Iterator[str]:
    """The keys of one module."""
    tree = ast.parse(source)
    skipped = set(_documentation(tree))
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if node in skipped or (isinstance(node, ast.Call) and ast.unparse(node.func) in OTHER_CALLS):
            continue
        if isinstance(node, ast.JoinedStr | ast.BinOp) or (isinstance(node, ast.Constant) and type(node.value) is str):
            yield from filter(is_text, map(key_of, _variants(node)))
        if isinstance(node, ast.JoinedStr):  # its own words are taken; those of its values are texts of their own
            waiting += [part for part in node.values if isinstance(part, ast.FormattedValue)]
        elif not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            waiting += ast.iter_child_nodes(node)


def _documentation(tree: ast.AST) -> Iterator[ast.AST]:
    """What is for those who read the source: docstrings, assertions, types written as texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        if isinstance(node, ast.Assert) and node.msg:
            yield node.msg
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        if isinstance(node, ast.FunctionDef) and node.returns:
            yield node.returns


def _variants(node: ast.AST) -> list[Pieces]:
    """What an expression may give, in pieces; a choice between texts gives each of them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [_constant(node.value)]
    if isinstance(node, ast.IfExp):
        return [*_variants(node.body), *_variants(node.orelse)]
    if isinstance(node, ast.FormattedValue):
        return _variants(node.value) if isinstance(node.value, ast.IfExp | ast.JoinedStr) else [((_name(node.value),),)]
    if isinstance(node, ast.JoinedStr):
        return _joined([_variants(part) if isinstance(part, ast.FormattedValue) else [(_fixed(part),)]
                        for part in node.values])  # fmt: skip
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([_variants(node.left), _variants(node.right)])
    return [((_name(node),),)]


def _fixed(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)


def _joined(parts: list[list[Pieces]]) -> list[Pieces]:
    while len(parts) > 1 and _count(parts) > MOST_VARIANTS:
        widest = max(range(len(parts)), key=lambda place: len(parts[place]))
        parts[widest] = [(("value",),)]
    return [tuple(itertools.chain.from_iterable(chosen)) for chosen in itertools.product(*parts)]


def _count(parts: list[list[Pieces]]) -> int:
    count = 1
    for part in parts:
        count *= len(part)
    return count


def _constant(text: str) -> Pieces:
    """A text that `format` is called on later holds fields of its own."""
    if not re.search(r"\{[a-z_]*(?:[:!][^{}]*)?\}", text):
        return (text,)
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError:
        return (text,)
    found: list[str | tuple[str]] = []
    for fixed, name, _, _ in fields:
        found += [fixed] if name is None else [fixed, (name or "value",)]
    return tuple(found)


def _name(node: ast.AST) -> str:
    """What a translator reads in place of a value: the last name of `a.b`, and of `f(a)` that of a."""
    while True:
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Attribute):
            return node.attr.strip("_").lower() or "value"
        elif isinstance(node, ast.Name):
            return node.id.strip("_").lower() or "value"
        elif inner := next((child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)), None):
            node = inner
        else:
            return "value"


def key_of(parts: Pieces) -> str:
    """A text as its key: values that touch are one, and no two have one name."""
    key, seen, after_value = "", set[str](), False
    for part in parts:
        if isinstance(part, str):
            key += part.replace("{", "{{").replace("}", "}}")
            after_value = after_value and not part
        elif not after_value:
            name = next(n for n in itertools.chain(part, (f"{part[0]}_{i}" for i in itertools.count(2)))
                        if n not in seen)  # fmt: skip
            seen.add(name)
            key, after_value = f"{key}{{{name}}}", True
    return key.strip()


def is_text(key: str) -> bool:
    """Whether a key is a text that people read."""
    fixed = re.sub(r"\{\w+\}", "", key)
    values = len(re.findall(r"(?<!\{)\{\w+\}", key))
    words = re.findall(r"[A-Za-z]{2,}", fixed)
    letters = sum(map(len, words))
    if re.match(r"\w+=\{", key):  # a line of a log, for programs
        return False
    enough = letters >= FIXED_LETTERS * values if values else len(words) > 1
    return "\n" not in key and " " in key and bool(words) and enough


def texts_of_page(source: str) -> Iterator[str]:
    """The keys of a page's template: the texts between its tags, with each way that its conditions may go."""
    source = re.sub(r"(?s)<style>.*?</style>|\{#.*?#\}", "<>", source)
    for node in re.split(r"<[^>]*>", source):
        for text in _conditions(node):
            for piece in re.split(r"\{%.*?%\}", text):
                parts: list[str | tuple[str]] = []
                for place, word in enumerate(re.split(r"\{\{(.*?)\}\}", piece)):
                    named = re.findall(r"[a-z_]\w*", word.partition("|")[0])
                    parts.append(word if place % 2 == 0 else ((named or ["value"])[-1],))
                key = re.sub(r"\s+", " ", key_of(tuple(parts))).strip()
                if is_text(key):
                    yield key


def _conditions(node: str) -> list[str]:
    inner = re.search(r"\{% if ((?!\{%).)*?%\}((?:(?!\{%).)*)(?:\{% else %\}((?:(?!\{%).)*))?\{% endif %\}", node, re.S)
    if inner is None:
        return [node]
    return [text for chosen in (inner[2], inner[3] or "")
            for text in _conditions(node[: inner.start()] + chosen + node[inner.end() :])]  # fmt: skip


def catalogue() -> str:
    """The file's text; the files where a text stands are named, without lines, so that it changes with texts only."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in texts_of_source(path.read_text(encoding="utf-8")):
            found.setdefault(text, set()).add(path.relative_to(PACKAGE).as_posix())
    for path in sorted(PACKAGE.rglob("*.j2")):
        for text in texts_of_page(path.read_text(encoding="utf-8")):
            found.setdefault(text, set()).add(path.relative_to(PACKAGE).as_posix())
    made = Catalog(project="manyhands", fuzzy=False)
    alike: dict[str, list[str]] = {}
    for text in sorted(found):
        alike.setdefault(re.sub(r"\{\w+\}", "{}", text), []).append(text)
    for first, *others in alike.values():  # which differ in the names of their values alone
        files = sorted(set[str]().union(*(found[text] for text in (first, *others))))
        made.add(first, locations=[(file, None) for file in files])
    written = io.BytesIO()
    write_po(written, made, omit_header=True, width=0)
    return written.getvalue().decode("utf-8")


if __name__ == "__main__":
    CATALOGUE.parent.mkdir(exist_ok=True)
    CATALOGUE.write_text(catalogue(), encoding="utf-8")
    print(f"wrote {CATALOGUE}")

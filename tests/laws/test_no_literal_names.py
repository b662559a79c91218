"""No mode and no sync method is compared with, looked up or defaulted by its name outside its own file and `config`.

What one says of itself is asked instead, so that another one can be added as a file. The sections of the job belong to
`config`, wherever they lie.
"""

import ast
import re
from pathlib import Path

import pytest

import manyhands
from manyhands.core.choices import module_names

SOURCE = Path(manyhands.__file__).parent
CHOICES = {
    "parallel/modes": module_names("manyhands.parallel.modes"),
    "sync/methods": module_names("manyhands.sync.methods"),
}
NAMES = {name for names in CHOICES.values() for name in names}
# The proof of networks that their author has split is of one mode alone, whose network it takes.
PROOF = ("parallel/verify.py",)
CONFIG = ("config/", "parallel/options.py", "sync/options.py")
# These words mean other things too: a section of the job, a machine, whatever device there is, a precision.
COMMON = {"data", "local", "auto", "bf16"}
# Where one of these is asked about, such a word is a mode or a method.
ASKED = re.compile(r"\b(\w*mode|\w*method|methods\(\)|MODES|METHODS)\b", re.IGNORECASE)
LOOKS_UP = {"Cost", "load_choice"} | {
    one.name
    for file in ("parallel/apply.py", "sync/options.py", "sync/choose.py", "train/choose_sync.py")
    for one in ast.walk(ast.parse((SOURCE / file).read_text()))
    if isinstance(one, ast.FunctionDef)
}
KEYS = {"mode", "method", "parallel.mode", "sync.method"}


def words(*trees):
    """All texts that stand in these expressions."""
    found = (one for tree in trees if tree for one in ast.walk(tree))
    return {one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def named(target):
    return getattr(target, "id", getattr(target, "attr", getattr(target, "arg", "")))


def of_call(node):
    found = {word for keyword in node.keywords if keyword.arg in KEYS for word in words(keyword.value)}
    return found | (words(*node.args) if named(node.func) in LOOKS_UP else set())


def of_function(node):
    every = [*node.args.posonlyargs, *node.args.args]
    pairs = [
        *zip(every[::-1], node.args.defaults[::-1], strict=False),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]
    return {word for argument, default in pairs if argument.arg in KEYS for word in words(default)}


def of_import(node):
    modules = [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [f"{node.module}.{one}" for one in modules] + [str(node.module)]
    found = [re.match(r"manyhands\.(?:parallel\.modes|sync\.methods)\.(\w+)", module) for module in modules]
    return {match[1] for match in found if match}


def used(node):  # noqa: PLR0911 - one for each kind of node
    """Names of modes and methods by which this part of a program does something, if they can only be such."""
    match node:
        case ast.Compare() if ASKED.search(ast.unparse(node)):
            return words(node)
        case ast.Subscript() if ASKED.search(ast.unparse(node.value)):
            return words(node.slice)
        case ast.Call():
            return of_call(node)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {word for key, value in pairs if words(key) & KEYS for word in words(value)}
        case ast.Assign() if any(named(target) in KEYS for target in node.targets):
            return words(node.value)
        case ast.AnnAssign() if named(node.target) in KEYS:
            return words(node.value)
        case ast.FunctionDef():
            return of_function(node)
        case ast.Import() | ast.ImportFrom():
            return of_import(node)
        case ast.Constant(value=str(word)) if word not in COMMON:
            return {word}
    return set()


def literal_names(text, own=()):
    """(line, name) of each mode or method that is named, but for the file's own."""
    found = ((getattr(node, "lineno", 0), word) for node in ast.walk(ast.parse(text)) for word in used(node) & NAMES)
    return sorted({(line, word) for line, word in found if word not in own})


def test_only_its_own_file_and_the_configuration_name_a_mode_or_a_method():
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE).as_posix()
        own = {file.stem} if place.startswith(tuple(CHOICES)) else {"hybrid"} if place.startswith(PROOF) else set()
        if not place.startswith(CONFIG):
            found += [f"{place}:{line} names {word}" for line, word in literal_names(file.read_text(), own)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", [
    'if job.parallel.mode == "data": pass',
    'alike = method in {"local", "other"}',
    'network = apply_mode("data", model)',
    'cost = Cost("local", 0.0, 0.0)',
    'make = methods()["local"].make',
    'options = {"mode": "data" if whole else found}',
    'options.update(method="auto")',
    'def run(mode="data"): pass',
    'mode: str = "auto"',
    'mode = "data"',
    'EXACT = "allreduce"',
    "from manyhands.sync.methods.local import PASSES",
    "from manyhands.sync.methods import local",
])  # fmt: skip
def test_the_law_sees(text):
    assert literal_names(text)


@pytest.mark.parametrize("text", [
    'device = "auto"',
    'Finding("data", "ok")',
    '"""The mode data."""',
    'kind = job.train.precision == "bf16"',
    'raise UserError("--sync allreduce")',
])  # fmt: skip
def test_the_law_leaves_other_words_alone(text):
    assert not literal_names(text)

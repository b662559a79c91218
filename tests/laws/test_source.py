"""The source: imports from below, one name for one class, one place for an update, no choice that is known by name."""

import ast
import functools
import re
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import grimp
import pytest
from torch import nn

from manyhands.core.choices import module_names
from manyhands.parallel.network import NetworkTraits, ParallelNetwork
from manyhands.parallel.on_mesh import NetworkOnMesh

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manyhands"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


@functools.cache
def nodes():
    """All nodes of each file's syntax tree, by its path within the package."""
    return {
        path.relative_to(SOURCE).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def test_types_come_from_below_too():
    """Imports for the type checker alone, which import-linter leaves out."""
    layers = next(contract["layers"] for contract in SETTINGS["contracts"] if contract["type"] == "layers")
    rows = [set(row.split(" | ")) for row in layers]

    def row(module):
        """0 for the uppermost; -1 for the package itself, which only names what is public."""
        package = ".".join(module.split(".")[:2])
        return next((number for number, row in enumerate(rows) if package in row), -1)

    graph = grimp.build_graph("manyhands", exclude_type_checking_imports=False)
    wrong = [
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if row(importer) > row(imported) >= 0
    ]
    assert not wrong


def test_the_launcher_imports_the_worker_within_functions_only():
    files = [name for name in nodes() if name.startswith(("cli/", "run/"))]
    at_top = [name for name in files if any(map(_of_worker, _run_at_import(nodes()[name][0].body)))]
    assert not at_top
    assert sum(any(map(_of_worker, nodes()[name])) for name in files) > 3


def _run_at_import(statements):
    """Statements that an import of the module executes; those for the type checker alone are not."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.ClassDef | ast.With | ast.Try) or (
            isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING"
        ):
            yield from _run_at_import(statement.body)


def _of_worker(node):
    modules = [node.module] if isinstance(node, ast.ImportFrom) else []
    modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any((module or "").startswith("manyhands.worker") for module in modules)


def test_backward_is_called_in_one_file():
    """Also our own method of this name, which users call, is called nowhere in the source."""
    calls = {
        name
        for name, found in nodes().items()
        for node in found
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "backward"
    }
    assert calls == {"parallel/gradients.py"}


def test_modes_are_asked_and_not_looked_into():
    """How a network is split and which process sums what: only `parallel` uses these attributes."""
    of_traits = {"no_sync", "connect_loss", "gradient_scale"}
    of_modes = {"reducer", "loss_axes", "begin_micro_batch", *of_traits}
    assert {field.name for field in fields(NetworkTraits)} >= of_traits
    assert {*NetworkOnMesh.__init__.__code__.co_names, *vars(NetworkOnMesh)} >= of_modes - of_traits
    used = {
        f"{name}: {node.attr}"
        for name, found in nodes().items()
        for node in found
        if not name.startswith("parallel/") and isinstance(node, ast.Attribute) and node.attr in of_modes
    }
    assert not used


def test_the_interface_of_a_parallel_network_is_small():
    members = {*vars(ParallelNetwork), *vars(ParallelNetwork(nn.Linear(1, 1)))}
    assert len([name for name in members if not name.startswith("_")]) <= 14


# What a folder of choices asks of each of its files has one name in all of them.
OF_A_CONTRACT = {"Options"}
# What a docstring may consist of beside the name and still say nothing.
EMPTY = {
    *("a", "an", "the", "this", "that", "its", "it", "is", "of", "as", "in", "and"),
    *("likewise", "same", "see", "too", "also"),
}
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_a_class_name_stands_once():
    names = Counter(node.name for found in nodes().values() for node in found if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1 and name not in OF_A_CONTRACT] == []


def test_a_public_docstring_says_more_than_the_name():
    public = [
        (name, node)
        for name, found in nodes().items()
        for node in found
        if isinstance(node, NAMED) and not node.name.startswith("_")
    ]

    def words(name):
        return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}

    silent = [
        f"{name}:{node.lineno} {node.name}: {said}"
        for name, node in public
        if (said := ast.get_docstring(node)) and not set(re.findall(r"\w+", said.lower())) - EMPTY - words(node.name)
    ]
    assert not silent


# No mode and no sync method is compared with, looked up or defaulted by its name outside its own file and `config`:
# what one says of itself is asked instead, so that another one can be added as a file.
CHOICES = {
    "parallel/modes": module_names("manyhands.parallel.modes"),
    "sync/methods": module_names("manyhands.sync.methods"),
}
NAMES = {name for names in CHOICES.values() for name in names}
# The proof of networks that their author has split is of one mode alone, whose network it takes.
PROOF = ("parallel/verify.py",)
# The sections of the job, wherever they lie.
CONFIG = ("config/", "parallel/options.py", "sync/options.py")
# These words mean other things too: a section of the job, a machine, whatever device there is, a precision.
COMMON = {"data", "local", "auto", "bf16"}
LOOKS_UP = {"Cost", "load_choice"} | {
    one.name
    for file in ("parallel/apply.py", "sync/options.py", "sync/choose.py", "train/choose_sync.py")
    for one in nodes()[file]
    if isinstance(one, ast.FunctionDef)
}
OF_CHOICES = re.compile(r"manyhands\.(parallel\.modes|sync\.methods)\b")
# Where one of these is asked about, such a word is a mode or a method.
ASKED = re.compile(rf"\b((?i:\w*mode|\w*method|modes|methods)|{'|'.join(LOOKS_UP)})\b")


def answers(node):
    """(What is asked about, what answers it) in this part of a program."""
    match node:
        case ast.Compare():
            yield node, node
        case ast.Subscript():
            yield node.value, node.slice
        case ast.Call():
            yield from ((node.func, argument) for argument in node.args)
        case ast.keyword():
            yield ast.Constant(node.arg), node.value
        case ast.Dict():
            yield from zip(node.keys, node.values, strict=True)
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign():
            yield node.target, node.value
        case ast.arguments():
            every = [*node.posonlyargs, *node.args]
            yield from zip(every[::-1], node.defaults[::-1], strict=False)
            yield from zip(node.kwonlyargs, node.kw_defaults, strict=True)


def words(tree):
    """All texts that stand in an expression."""
    return {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def used(node):
    """Names of modes and methods by which this part of a program does something, if they can only be such."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        text = ast.unparse(node)
        return {*re.findall(r"\w+", text)} if OF_CHOICES.search(text) else set()
    if isinstance(node, ast.Constant):
        return {node.value} - COMMON
    pairs = [(asked, found) for asked, value in answers(node) if asked and value and (found := words(value) & NAMES)]
    return {word for asked, found in pairs if ASKED.search(ast.unparse(asked)) for word in found}


def literal_names(found, own=()):
    """(line, name) of each mode or method that is named in these nodes, but for the file's own."""
    pairs = ((getattr(node, "lineno", 0), word) for node in found for word in used(node) & NAMES)
    return sorted({(line, word) for line, word in pairs if word not in own})


def test_only_its_own_file_and_the_configuration_name_a_mode_or_a_method():
    wrong = []
    for place, found in nodes().items():
        own = {Path(place).stem} if place.startswith(tuple(CHOICES)) else {"hybrid"} if place in PROOF else set()
        if not place.startswith(CONFIG):
            wrong += [f"{place}:{line} names {word}" for line, word in literal_names(found, own)]
    assert not wrong, "\n".join(wrong)


SEEN = """
if job.parallel.mode == "data": pass
alike = method in {"local", "other"}
network = apply_mode("data", model)
cost = Cost("local", 0.0, 0.0)
make = methods()["local"].make
options = {"mode": "data" if whole else found}
options.update(method="auto")
def run(mode="data"): pass
mode: str = "auto"
mode = "data"
EXACT = "allreduce"
from manyhands.sync.methods.local import PASSES
from manyhands.sync.methods import local
"""
LEFT_ALONE = """
device = "auto"
Finding("data", "ok")
'''The mode data.'''
kind = job.train.precision == "bf16"
raise UserError("--sync allreduce")
"""


@pytest.mark.parametrize(
    ("line", "seen"), [(line, text is SEEN) for text in (SEEN, LEFT_ALONE) for line in text.strip().splitlines()]
)
def test_the_law_sees_names_and_leaves_other_words_alone(line, seen):
    assert bool(literal_names(ast.walk(ast.parse(line)))) == seen

"""What import-linter doesn't see: imports for the type checker alone, and modules that are loaded by name."""

import ast
import importlib
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_types_come_from_below_too():
    layers = next(contract["layers"] for contract in SETTINGS["contracts"] if contract["type"] == "layers")
    graph = grimp.build_graph("manyhands", exclude_type_checking_imports=False)
    rows = [set(row.split(" | ")) for row in layers]
    wrong = [
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if _row(rows, importer) > _row(rows, imported) >= 0
    ]
    assert not wrong


def _row(rows, module):
    """0 for the uppermost; -1 for the package itself, which only names what is public."""
    package = ".".join(module.split(".")[:2])
    return next((number for number, row in enumerate(rows) if package in row), -1)


def test_what_is_loaded_by_name_is_there():
    found = [named for file in (ROOT / "src/manyhands").rglob("*.py") for named in _loaded(file)]
    assert len(found) > 5
    for module, name in found:
        assert hasattr(importlib.import_module(f"manyhands.worker.{module}"), name), (module, name)


def _loaded(file):
    """Of `load_worker("module").name`, both words; a module that is kept in a variable is held by its users' tests."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Name) and call.func.id == "load_worker":
                yield call.args[0].value, node.attr

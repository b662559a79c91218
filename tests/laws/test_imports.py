"""What import-linter doesn't see: imports for the type checker alone, and whether an import stands in a function."""

import ast
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


def test_the_launcher_imports_the_worker_within_functions_only():
    files = [file for package in ("cli", "run") for file in (ROOT / "src/manyhands" / package).rglob("*.py")]
    at_top = [file.name for file in files if any(map(_of_worker, _run_at_import(ast.parse(file.read_text()).body)))]
    within = [file.name for file in files if any(map(_of_worker, ast.walk(ast.parse(file.read_text()))))]
    assert not at_top
    assert len(within) > 3


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

"""One update: who trains, tries, times, rehearses or proves goes through parallel/gradients.py, and asks modes."""

import ast
from dataclasses import fields
from pathlib import Path

import manyhands
from manyhands.parallel.on_mesh import NetworkOnMesh

SOURCE = Path(manyhands.__file__).parent
# Of `NetworkOnMesh`: how a network is split and who sums what, which is the business of `parallel` alone.
OF_MODES = {"reducer", "input_axes", "no_sync", "reach_all", "gradient_scale", "begin_micro_batch", "move_statistics"}


def _attributes(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]


def _calls(path, name):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == name]


def test_backward_is_called_in_one_file():
    """Also our own method of this name, which users call, is called nowhere in the source."""
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if _calls(path, "backward")}
    assert files == {"parallel/gradients.py"}


def test_modes_are_asked_and_not_looked_into():
    assert {field.name for field in fields(NetworkOnMesh)} >= OF_MODES
    others = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "parallel"]
    found = {f"{path.relative_to(SOURCE)}: {one.attr}" for path in others for one in _attributes(path)} & {
        f"{path.relative_to(SOURCE)}: {name}" for path in others for name in OF_MODES
    }
    assert not found

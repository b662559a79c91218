"""One update: who trains, tries, times, rehearses or proves goes through parallel/gradients.py, and asks modes."""

import ast
from dataclasses import fields
from pathlib import Path

from torch import nn

import manyhands
from manyhands.parallel.network import ModeTraits, ParallelNetwork
from manyhands.parallel.on_mesh import NetworkOnMesh

SOURCE = Path(manyhands.__file__).parent
# How a network is split and which process sums what: only `parallel` uses these attributes.
OF_TRAITS = {"no_sync", "reach_all", "gradient_scale"}
OF_MODES = {"reducer", "loss_axes", "begin_micro_batch", *OF_TRAITS}


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
    assert {field.name for field in fields(ModeTraits)} >= OF_TRAITS
    assert {*NetworkOnMesh.__init__.__code__.co_names, *vars(NetworkOnMesh)} >= OF_MODES - OF_TRAITS
    others = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "parallel"]
    found = {f"{path.relative_to(SOURCE)}: {one.attr}" for path in others for one in _attributes(path)} & {
        f"{path.relative_to(SOURCE)}: {name}" for path in others for name in OF_MODES
    }
    assert not found


def test_the_interface_of_a_parallel_network_is_small():
    members = {*vars(ParallelNetwork), *vars(ParallelNetwork(nn.Linear(1, 1)))}
    assert len([name for name in members if not name.startswith("_")]) <= 14

"""What the processes of a run import before its first update: each import is time that the user waits."""

import re

import pytest

from tests.e2e.command import finish, start

# Each takes as long as torch itself, or a third of that.
SLOW = {"torchvision.models", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"}


def _imported(folder):
    """What the agent and the processes imported, by log; Python writes it there."""
    logs = {path.name: path.read_text() for path in (folder / "ranks").glob("*.log")}
    return {name: set(re.findall(r"^import time:.*\| +(\S+)$", text, re.MULTILINE)) for name, text in logs.items()}


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_network_and_data_of_ours_need_neither_torchvision_nor_the_compiler(tmp_path, optimizer):
    words = ["train", "digits", "mlp", "-n", "2", "--epochs", "1", "--set", f"train.optimizer={optimizer}"]
    done = finish(start(*words, "--out", tmp_path / "run", PYTHONPROFILEIMPORTTIME="1"))
    assert done.code == 0, done.err
    imported = _imported(tmp_path / "run")
    assert imported.keys() == {"agent.log", "0.log", "1.log"}
    assert "torch" in imported["agent.log"]
    assert not {f"{name}: {slow}" for name, modules in imported.items() for slow in modules & SLOW}


@pytest.mark.slow
def test_what_the_processes_of_torchvisions_networks_need_is_imported_before_they_are_forked(tmp_path):
    words = ["train", "synthetic:64x3x32x32x4", "resnet18", "-n", "2", "--batch", "8", "--set", "train.max_steps=1"]
    done = finish(start(*words, "--out", tmp_path / "run", PYTHONPROFILEIMPORTTIME="1"))
    assert done.code == 0, done.err
    imported = _imported(tmp_path / "run")
    assert {"torchvision.models", "torch._dynamo"} <= imported["agent.log"]
    assert not {"torchvision.models", "torch._dynamo"} & (imported["0.log"] | imported["1.log"])

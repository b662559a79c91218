"""manyhands checkpoint info, merge, split, reshard: on files of real runs.

Most are run within this process, since each of its own would import torch anew.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from manyhands.checkpoint.read import load
from manyhands.cli.main import main
from manyhands.core.mesh import TensorLayout
from tests.checkpoint.cuts import assert_same
from tests.e2e.command import QUICK, Ended, assert_equal_weights, assert_one_screen, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of one short training."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ("train", "synthetic:64x1x8x8x5", "mlp", "--epochs", "1", "--out", folder, *QUICK)
    ended = run(*words)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def checkpoint(capsys):
    """Runs `manyhands checkpoint …` to its end."""

    def typed(*words):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *map(str, words)])
        said = capsys.readouterr()
        return Ended(ended.value.code, said.out, said.err)

    return typed


def plan(path, shapes, mesh):
    """A plan that cuts each matrix by its rows over the last axis."""
    last = len(mesh) - 1
    layouts = {
        name: TensorLayout(tuple(shape), tuple(shape), ((0, (last,)),)).as_plain()
        for name, shape in shapes.items()
        if len(shape) > 1
    }
    path.write_text(json.dumps({"format": "plan/1", "mesh": mesh, "ops": {}, "layouts": layouts}))
    return path


def shapes_of(weights):
    return {name: list(tensor.shape) for name, tensor in weights.items()}


def test_there_and_back(trained, tmp_path, checkpoint):
    """Run, pieces over 2x2, pieces over 3, whole folder, one file: the same bits all along."""
    newest = max((trained / "checkpoints").glob("step-*"))
    wanted = load(newest)
    shapes = shapes_of(wanted.model)
    one = plan(tmp_path / "plan.json", shapes, {"dp": 2, "tp": 2})
    other = plan(tmp_path / "other.json", shapes, {"tp": 3})
    for words in (
        ("split", trained, tmp_path / "pieces", "--plan", one),
        ("reshard", tmp_path / "pieces", tmp_path / "three", "--plan", other),
        ("merge", tmp_path / "three", tmp_path / "whole"),
        ("merge", tmp_path / "three", tmp_path / "w.safetensors"),
        ("merge", tmp_path / "pieces", tmp_path / "w.pth"),
        ("split", tmp_path / "w.pth", tmp_path / "weights", "--plan", other),
    ):
        ended = checkpoint(*words)
        assert ended.code == 0, ended.err
        assert ended.out == ""
        assert f"wrote {words[2]}" in ended.err
    for name in ("pieces", "three", "whole"):
        assert_same(load(tmp_path / name), wanted)
    assert_equal_weights(load_file(tmp_path / "w.safetensors"), wanted.model)
    assert_equal_weights(torch.load(tmp_path / "w.pth", weights_only=True), wanted.model)
    assert_equal_weights(load(tmp_path / "weights").model, wanted.model)

    found = json.loads(checkpoint("info", tmp_path / "pieces", "--json").out)
    assert (found["format"], found["mesh"], found["step"]) == ("pieces", {"dp": 2, "tp": 2}, wanted.state["step"])
    assert {name: entry["shape"] for name, entry in found["model"].items()} == shapes
    matrix = next(name for name, shape in shapes.items() if len(shape) == 2)
    assert found["model"][matrix]["cuts"] == {"0": ["tp"]}
    assert found["optimizer"][f"state/{matrix}/momentum_buffer"]["cuts"] == {"0": ["tp"]}
    assert found["size_bytes"]["model"] == sum(tensor.nbytes for tensor in wanted.model.values())
    for name in ("pieces", "whole", "w.safetensors", "w.pth"):
        shown = checkpoint("info", tmp_path / name)
        assert shown.code == 0
        assert matrix in shown.out
        assert ("0@tp" in shown.out) == (name == "pieces")


@pytest.mark.slow
def test_a_checkpoint_in_pieces_is_evaluated_as_the_whole_one_is(trained, tmp_path, checkpoint):
    newest = max((trained / "checkpoints").glob("step-*"))
    other = plan(tmp_path / "plan.json", shapes_of(load(newest).model), {"tp": 3})
    pieces = trained / "pieces"
    assert checkpoint("split", trained, pieces, "--plan", other).code == 0
    found = [json.loads(run("eval", path, "--json").out) for path in (newest, pieces)]
    assert found[0]["loss"] == found[1]["loss"]


def test_an_evaluation_that_the_agent_refuses_says_why(trained, tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('of another build')")
    ended = run("eval", trained, PYTHONPATH=str(tmp_path))
    assert ended.code == 2
    assert ended.err.startswith("manyhands: torchvision can't be imported: RuntimeError: of another build\n")
    assert "manyhands doctor" in ended.err


def test_mistakes_are_one_screen_and_nothing_is_lost(trained, tmp_path, checkpoint):
    (tmp_path / "mine.pth").write_text("mine")
    (tmp_path / "plan.json").write_text(
        '{"mesh": {"tp": 2}, "layouts": {"nowhere": {"shape": [2], "view": [2], "cuts": []}}}'
    )
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "noise.safetensors").write_bytes(b"noise" * 100)
    for words, said in (
        (("merge", trained, tmp_path / "mine.pth"), "already exists"),
        (("merge", trained, trained), "already exists"),
        (("merge", trained, tmp_path / "a.pth.tar"), "unsupported file type"),
        (("merge", trained, tmp_path / "no" / "a.pth"), "no folder"),
        (("split", trained, tmp_path / "a", "--plan", tmp_path / "plan.json"), "nowhere"),
        (("reshard", trained, tmp_path / "a", "--plan", tmp_path / "none.json"), 'no "mesh"'),
        (("split", trained, tmp_path / "a", "--plan", tmp_path / "gone.json"), "can't be read"),
        (("info", tmp_path / "noise.safetensors"), "damaged"),
    ):
        ended = checkpoint(*words)
        assert ended.code == 2, ended.err
        assert_one_screen(ended.err)
        assert said in ended.err
    assert checkpoint("split", trained, tmp_path / "a").code == 2
    assert (tmp_path / "mine.pth").read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "mine.pth", "noise.safetensors", "none.json", "plan.json"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_changed_piece_is_named(trained, tmp_path, checkpoint):
    newest = max((trained / "checkpoints").glob("step-*"))
    other = plan(tmp_path / "plan.json", shapes_of(load(newest).model), {"tp": 2})
    ended = run("checkpoint", "split", newest, tmp_path / "pieces", "--plan", other)
    assert (ended.code, ended.out, ended.err) == (0, "", f"manyhands: wrote {tmp_path / 'pieces'}\n")
    file = tmp_path / "pieces" / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = checkpoint("merge", tmp_path / "pieces", tmp_path / "whole")
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert file.name in ended.err
    assert not (tmp_path / "whole").exists()

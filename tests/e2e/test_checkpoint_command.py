"""manyhands checkpoint info, merge, split, reshard, on files of a real run; and what earlier versions have written.

older.tar.xz was written before identifiers were renamed, by `train digits net.py:Net -n 2 --batch 64`: two runs of 20
updates, data parallel (whole/) and local steps (local/); and a plan for two processes and a pack of 12 pictures.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyhands.checkpoint.read import load
from manyhands.core.mesh import TensorLayout
from manyhands.core.records import Failure
from tests.checkpoint.cuts import assert_same
from tests.e2e.command import QUICK, assert_equal_weights, done, final_weights, inside, metrics, refused, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of one short training."""
    folder = tmp_path_factory.mktemp("trained")
    done("train synthetic:64x1x8x8x5 mlp --epochs 1 --out run", QUICK, cwd=folder)
    return folder / "run"


def checkpoint(*given):
    return done("checkpoint", *given, by=inside)


def plan(path, shapes, mesh):
    """A plan that cuts each matrix by its rows over the last axis."""
    cuts = ((0, (len(mesh) - 1,)),)
    matrices = {name: tuple(shape) for name, shape in shapes.items() if len(shape) > 1}
    layouts = {name: TensorLayout(shape, shape, cuts).as_plain() for name, shape in matrices.items()}
    Path(path).write_text(json.dumps({"format": "plan/1", "mesh": mesh, "ops": {}, "layouts": layouts}))


def test_there_and_back(trained):
    """Run, pieces over 2x2, pieces over 3, whole folder, one file: the same bits all along."""
    newest = max((trained / "checkpoints").glob("step-*"))
    wanted = load(newest)
    shapes = {name: list(tensor.shape) for name, tensor in wanted.model.items()}
    plan("plan.json", shapes, {"dp": 2, "tp": 2})
    plan("other.json", shapes, {"tp": 3})
    for line in (
        f"split {trained} pieces --plan plan.json",
        "reshard pieces three --plan other.json",
        "merge three whole",
        "merge three w.safetensors",
        "merge pieces w.pth",
        "split w.pth weights --plan other.json",
    ):
        ended = checkpoint(line)
        assert ended.out == ""
        assert f"wrote {line.split()[2]}" in ended.err
    for name in ("pieces", "three", "whole"):
        assert_same(load(Path(name)), wanted)
    assert_equal_weights(load_file("w.safetensors"), wanted.model)
    assert_equal_weights(torch.load("w.pth", weights_only=True), wanted.model)
    assert_equal_weights(load(Path("weights")).model, wanted.model)

    found = json.loads(checkpoint("info pieces --json").out)
    assert (found["format"], found["mesh"], found["step"]) == ("pieces", {"dp": 2, "tp": 2}, wanted.state["step"])
    assert {name: entry["shape"] for name, entry in found["model"].items()} == shapes
    matrix = next(name for name, shape in shapes.items() if len(shape) == 2)
    assert found["model"][matrix]["cuts"] == {"0": ["tp"]}
    assert found["optimizer"][f"state/{matrix}/momentum_buffer"]["cuts"] == {"0": ["tp"]}
    assert found["size_bytes"]["model"] == sum(tensor.nbytes for tensor in wanted.model.values())
    for name in ("pieces", "whole", "w.safetensors", "w.pth"):
        shown = checkpoint("info", name).out
        assert matrix in shown
        assert ("0@tp" in shown) == (name == "pieces")

    # Pieces beside a run's checkpoints are evaluated as the whole one is.
    checkpoint("split", trained, trained / "pieces", "--plan other.json")
    losses = [json.loads(done("eval", path, "--json").out)["loss"] for path in (newest, trained / "pieces")]
    assert losses[0] == losses[1]


def test_an_evaluation_that_the_agent_refuses_says_why(trained, tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('of another build')")
    ended = done("eval", trained, by=start, PYTHONPATH=str(tmp_path), code=2)
    assert ended.err.startswith("manyhands: torchvision can't be imported: RuntimeError: of another build\n")
    assert "manyhands doctor" in ended.err


NOWHERE = '{"mesh": {"tp": 2}, "layouts": {"nowhere": {"shape": [2], "view": [2], "cuts": []}}}'


def test_mistakes_are_one_screen_and_nothing_is_lost(trained, here):
    files = {"mine.pth": "mine", "plan.json": NOWHERE, "none.json": "{}", "noise.safetensors": "noise" * 100}
    for name, text in files.items():
        Path(name).write_text(text)
    for line, says in (
        (f"merge {trained} mine.pth", "already exists"),
        (f"merge {trained} {trained}", "already exists"),
        (f"merge {trained} a.pth.tar", "unsupported file type"),
        (f"merge {trained} no/a.pth", "no folder"),
        (f"split {trained} a --plan plan.json", "nowhere"),
        (f"reshard {trained} a --plan none.json", 'no "mesh"'),
        (f"split {trained} a --plan gone.json", "can't be read"),
        ("info noise.safetensors", "damaged"),
    ):
        refused("checkpoint", line, says=says)
    done(f"checkpoint split {trained} a", by=inside, code=2)
    assert {path.name: path.read_text() for path in here.iterdir()} == files


@pytest.fixture
def older(here):
    with tarfile.open(Path(__file__).with_name("older.tar.xz")) as archive:
        archive.extractall(here, filter="data")


OLDER_JOB = f"train digits net.py:Net -n 2 --batch 64 --device cpu {' '.join(QUICK)}"


@pytest.mark.slow
@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("name", ["whole", "local"])
def test_an_older_run_resumes(name):
    done("resume", name, "--set train.max_steps=40")
    assert max(line["step"] for line in metrics(name, None)) == 40
    if name == "whole":
        done(OLDER_JOB, "--set train.max_steps=40 --out anew")
        for key, value in final_weights("anew").items():
            torch.testing.assert_close(final_weights(name)[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("older")
def test_an_older_plan_and_an_older_pack_are_read():
    done(OLDER_JOB, "--parallel.plan plan.json --set train.max_steps=2 --out planned")
    done("pack packed --check", by=start)


def test_an_older_failure_record_is_read():
    place = {"time": 1.0, "rank": 0, "host": "n1", "pid": 7}
    record = {**place, "error": "ValueError", "what": "no", "mend": ["try again"]}
    assert Failure.model_validate(record).hints == ["try again"]

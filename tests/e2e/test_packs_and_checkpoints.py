"""manyhands pack, and checkpoint info, merge, split, reshard on files of a real run; what earlier versions wrote.

older.tar.xz was written before identifiers were renamed, by `train digits net.py:Net -n 2 --batch 64`: two runs of 20
updates, data parallel (whole/) and local steps (local/); and a plan for two processes and a pack of 12 pictures.
"""

import functools
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from manyhands.checkpoint.read import load_checkpoint
from manyhands.core.mesh import TensorLayout
from manyhands.core.records import Failure
from tests.checkpoint.cuts import assert_same
from tests.data.sets import make
from tests.e2e.command import QUICKLY, assert_equal_weights, done, final_weights, fit, inside, metrics, refused, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of one short training."""
    return fit("mlp", "synthetic:64x1x8x8x5", out=tmp_path_factory.mktemp("trained") / "run", precision="fp32").path


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
    wanted = load_checkpoint(max((trained / "checkpoints").glob("step-*")))
    shapes = {name: list(tensor.shape) for name, tensor in wanted.model.items()}
    plan("plan.json", shapes, {"dp": 2, "tp": 2})
    plan("other.json", shapes, {"tp": 3})
    for line in (
        f"split {trained} pieces --plan plan.json",
        "reshard pieces three --plan other.json",
        "merge three whole",
        "merge three w.safetensors",
    ):
        ended = checkpoint(line)
        assert f"wrote {line.split()[2]}" in ended.err
    for name in ("pieces", "three", "whole"):
        assert_same(load_checkpoint(Path(name)), wanted)
    assert_equal_weights(load_file("w.safetensors"), wanted.model)
    found = json.loads(checkpoint("info pieces --json").out)
    assert (found["format"], found["mesh"], found["step"]) == ("pieces", {"dp": 2, "tp": 2}, wanted.state["step"])
    assert {name: entry["shape"] for name, entry in found["model"].items()} == shapes
    matrix = next(name for name, shape in shapes.items() if len(shape) == 2)
    for entry in (found["model"][matrix], found["optimizer"][f"state/{matrix}/momentum_buffer"]):
        assert entry["cuts"] == {"0": ["tp"]}
    assert found["size_bytes"]["model"] == sum(tensor.nbytes for tensor in wanted.model.values())
    for name in ("pieces", "whole", "w.safetensors"):
        shown = checkpoint("info", name).out
        assert matrix in shown
        assert ("0@tp" in shown) == (name == "pieces")

    refused("checkpoint merge three whole", says="already exists")
    done(f"checkpoint split {trained} a", by=inside, code=2)

    # Pieces beside a run's checkpoints are evaluated as the whole one is.
    checkpoint("split", trained, trained / "pieces", "--plan other.json")
    found = json.loads(done("eval", trained / "pieces", "--json", by=inside).out)
    assert found["loss"] == pytest.approx(metrics(trained, "evaluation")[-1]["loss"], rel=1e-6)


@pytest.mark.slow
def test_an_evaluation_that_the_agent_refuses_says_why(trained, here):
    (here / "torchvision.py").write_text("raise RuntimeError('of another build')")
    ended = done("eval", trained, by=start, PYTHONPATH=str(here), code=2, says="manyhands doctor")
    assert ended.err.startswith("manyhands: torchvision can't be imported: RuntimeError: of another build\n")


@pytest.fixture
def older(here):
    with tarfile.open(Path(__file__).with_name("older.tar.xz")) as archive:
        archive.extractall(here, filter="data")


OLDER_JOB = f"train digits net.py:Net -n 2 --batch 64 --device cpu {QUICKLY}"


@pytest.mark.slow
@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("name", ["whole", "local"])
def test_an_older_run_is_read_and_resumes(name):
    assert "s of work, at step 20 of 20" in done("why", name, by=inside).out
    evaluated = json.loads(done("eval", name, "--json").out)
    assert evaluated["top1"] == metrics(name, "evaluation")[-1]["top1"]
    Image.new("L", (8, 8)).save("a.png")
    assert done("predict", name, "a.png").out
    done("report", name, by=inside)
    sync = "--sync local --set sync.codec=lowrank --set sync.every=1 --set sync.delay=1" * (name == "local")
    done(OLDER_JOB, sync, "--set train.max_steps=20 --out anew")
    for folder in (name, "anew"):
        done("resume", folder, "--set train.max_steps=40")
        assert max(line["step"] for line in metrics(folder, None)) == 40
        assert '"warning"' not in Path(folder, "events.jsonl").read_text()
    for key, value in final_weights("anew").items():
        torch.testing.assert_close(final_weights(name)[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("older")
def test_an_older_plan_and_an_older_pack_are_read():
    done(OLDER_JOB, "--parallel.plan plan.json --set train.max_steps=2 --out planned")
    done("pack packed --check", by=start)
    done("train packed mlp --batch 4 --data.image-size 8 --device cpu --set train.max_steps=2 --out trained", QUICKLY)
    assert metrics("trained", None)[-1]["step"] == 2


def test_an_older_failure_record_is_read():
    place = {"time": 1.0, "rank": 0, "host": "n1", "pid": 7}
    record = {**place, "error": "ValueError", "what": "no", "mend": ["try again"]}
    assert Failure.model_validate(record).hints == ["try again"]


JOB = ["cnn", *f"--epochs 1 --batch 4 --device cpu --data.image-size 16 {QUICKLY}".split()]
# Packing starts processes, which a fork of the tests' own process may not be able to.
pack = functools.partial(done, "pack", by=start)
pack_refused = functools.partial(refused, "pack", where=False)


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 8), ("val", 3)):
        make(tmp_path / "宠物" / part, classes=("猫", "狗"), count=count, size=(90, 70))
    return tmp_path / "宠物"


@pytest.mark.slow
def test_training_reads_the_packed_copy_and_gets_equal_weights_without_the_folder(folder, tmp_path):
    """tests/data/test_packed.py compares batches of folder and copy."""
    pack(folder)
    assert "is up to date" in pack(folder).out
    reported = json.loads(pack(folder, "--replace --processes 2 --json").out.splitlines()[-1])
    assert "is intact: 22 pictures in 2 shards" in pack(folder, "--check").out
    copy = folder.with_name("宠物.pack")
    assert (reported["pictures"], reported["made"], reported["pack"]) == (22, True, str(copy))
    ended = done("train", folder, JOB, "--out", tmp_path / "from-pack", "-n 2")
    assert "reading pictures from the packed copy 宠物.pack" in ended.err
    folder.rename(tmp_path / "away")
    done("train", copy, JOB, "--out", tmp_path / "from-pack-alone", "-n 1")
    expected, found = final_weights(tmp_path / "from-pack"), final_weights(tmp_path / "from-pack-alone")
    assert all(torch.allclose(found[key], expected[key], atol=1e-6) for key in expected)


def test_what_cannot_be_packed_or_written_is_said(folder, tmp_path):
    for given, says in (
        ([tmp_path / "none"], "there is no folder"),
        ([folder, "--quality 90"], "--size 0 with --quality 90 is not valid"),
        ([folder, "--size 20 --quality 99"], "is not valid"),
        ([folder, "--to", folder / "pack"], "would be inside the folder"),
        ([folder, "--check"], "no packed copy"),
    ):
        pack_refused(*given, says=says)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "--data-dir" not in pack_refused(folder, "--to", place, says=("can't be written", "--to"))
    (folder / "train/猫/gone.png").symlink_to("nowhere.png")
    pack_refused(folder, says="gone.png")

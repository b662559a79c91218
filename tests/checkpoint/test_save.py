import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint import files, folders, write
from manyhands.checkpoint.files import verify_checkpoint
from manyhands.checkpoint.folders import prune_checkpoints
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.write import SaveError, save_unsharded
from manyhands.core.errors import RunError


def test_every_kind_of_tensor_comes_back(tmp_path: Path):
    tied, whole = torch.randn(4, 5), torch.randn(10, 10)
    model = {
        "z_tied": tied,
        "a_tied": tied,
        "view": whole[2:4],
        "transposed": whole.t(),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "empty": torch.empty(0, 3),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    loaded = load_checkpoint(save_unsharded(tmp_path, 1, Snapshot(model))).model
    assert list(loaded) == list(model)
    torch.testing.assert_close(loaded, {name: one.detach() for name, one in model.items()}, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_not_finite_or_no_plain_data_is_refused_and_leaves_nothing(tmp_path: Path, kind: torch.dtype):
    for bad in (float("nan"), float("inf")):
        model = {"good": torch.ones(3), "head.bias": torch.tensor([1.0, bad], dtype=kind)}
        with pytest.raises(RunError, match=r"head\.bias") as caught:
            save_unsharded(tmp_path, 1, Snapshot(model))
        assert not isinstance(caught.value, SaveError)
    with pytest.raises(TypeError):
        save_unsharded(tmp_path, 1, Snapshot({"w": torch.ones(1)}, None, {"object": object()}))
    with pytest.raises(TypeError, match="exp_avg"):
        save_unsharded(tmp_path, 1, Snapshot({}, {"state": {"w": {"exp_avg": object()}}, "param_groups": []}))
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_there_and_verifies_is_left_and_a_torn_one_is_replaced(tmp_path: Path, snapshot: Snapshot):
    path = save_unsharded(tmp_path, 5, snapshot)
    before = (path / "manifest.json").stat().st_ino
    assert (save_unsharded(tmp_path, 5, snapshot) / "manifest.json").stat().st_ino == before
    (path / "state.json").write_text("{}")
    save_unsharded(tmp_path, 5, snapshot)
    verify_checkpoint(path)
    prune_checkpoints(tmp_path, 1, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def test_prune_keeps_the_newest_and_the_best_of_what_verifies(tmp_path: Path, snapshot: Snapshot):
    paths = [save_unsharded(tmp_path, step, snapshot) for step in (1, 2, 3, 4, 5, 6)]
    (paths[5] / "model.safetensors").write_bytes(b"")
    assert sorted(prune_checkpoints(tmp_path, 2, paths[1])) == [paths[0], paths[2]]
    assert prune_checkpoints(tmp_path, 1, None) == [paths[3], paths[1]]
    assert prune_checkpoints(tmp_path, 2, None) == []
    assert files.step_folders(tmp_path) == [paths[5], paths[4]]
    verify_checkpoint(paths[4])


def test_prune_hashes_each_checkpoint_once(tmp_path: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch):
    hashed = []
    monkeypatch.setattr(files, "verify_checkpoint", hashed.append)
    for step in range(5):
        save_unsharded(tmp_path, step, snapshot)
        prune_checkpoints(tmp_path, 2, None)
    assert hashed == []
    monkeypatch.setattr(folders, "_known_good", {})
    prune_checkpoints(tmp_path, 2, None)
    prune_checkpoints(tmp_path, 2, None)
    assert hashed == files.step_folders(tmp_path)


def test_prune_deletes_only_what_save_made_and_sweeps_leftovers_but_no_live_save(tmp_path: Path, snapshot: Snapshot):
    old = save_unsharded(tmp_path, 1, snapshot)
    (old / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    outside = save_unsharded(elsewhere, 2, snapshot)
    (tmp_path / "step-00000002").symlink_to(outside)
    for name in ("step-00000003", ".tmp-mine", ".tmp-step-00000001-0123456789", "step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    save_unsharded(tmp_path, 9, snapshot)
    left = tmp_path / files.temporary_name(3)
    left.mkdir()
    for name in ("state.json", ".tmpAbC123"):
        (left / name).write_bytes(b"half")
    with folders.staging_folder(tmp_path, 10) as live:
        assert left in prune_checkpoints(tmp_path, 1, None)
        assert live.is_dir()
        assert not left.exists()
    assert not live.exists()
    assert (old / "notes.txt").read_text() == "mine"
    assert not (old / "model.safetensors").exists()
    verify_checkpoint(outside)
    assert sum((entry / "file").exists() for entry in tmp_path.iterdir()) == 4


@pytest.mark.parametrize("foresight", [True, False], ids=["checked first", "full while writing"])
def test_a_full_disk_keeps_the_older_checkpoint(small_disk: Path, monkeypatch: pytest.MonkeyPatch, foresight: bool):
    if not foresight:
        monkeypatch.setattr(write, "refuse_too_little_space", lambda folder, size_bytes: None)
    old = save_unsharded(small_disk, 1, Snapshot({"w": torch.zeros(200_000)}))
    with pytest.raises(SaveError, match="disk is full"):
        save_unsharded(small_disk, 2, Snapshot({"w": torch.zeros(1_600_000)}))
    assert [path.name for path in small_disk.iterdir()] == [old.name]
    verify_checkpoint(old)


@pytest.mark.slow
def test_what_is_torn_is_never_loaded():
    """Kills while checkpoints are written, in short; `make soak` does as many as are wanted."""
    seed = str(random.randrange(10**6))
    command = [sys.executable, "-m", "tests.faults.soak_saves", "kills", "--count", "20", "--seed", seed]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["holds"]

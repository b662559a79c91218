import json
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.checkpoint import files
from manyhands.checkpoint.files import TornCheckpointError, verify_checkpoint
from manyhands.checkpoint.folders import choose_checkpoint, find_checkpoint
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.trained import Preprocessing, TrainedNetwork, find_record, parse_record
from manyhands.checkpoint.write import save_unsharded
from manyhands.core.errors import UserError


@settings(max_examples=150)
@given(name=st.sampled_from(files.FILES), place=st.floats(0, 1, exclude_max=True), mask=st.integers(0, 255))
def test_a_flipped_byte_or_a_cut_anywhere_is_refused(tmp_path: Path, snapshot: Snapshot, name, place, mask):
    path = save_unsharded(tmp_path, 5, snapshot)
    file = path / name
    whole = file.read_bytes()
    where = int(place * len(whole))
    for spoilt in (whole[:where], whole[:where] + bytes([whole[where] ^ (mask or 1)]) + whole[where + 1 :]):
        file.write_bytes(spoilt)
        with pytest.raises(TornCheckpointError, match=name):
            load_checkpoint(path)
    file.unlink()
    with pytest.raises(TornCheckpointError, match=f"{name} is missing"):
        load_checkpoint(path)
    file.write_bytes(whole)
    verify_checkpoint(path)


def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path, snapshot: Snapshot):
    path = save_unsharded(tmp_path, 5, snapshot)
    (path / "model.pkl").write_bytes(pickle.dumps(print))
    content = json.loads((path / "manifest.json").read_bytes())
    content["files"]["model.pkl"] = content["files"]["model.safetensors"]
    (path / "manifest.json").write_bytes(files.manifest_text(content))
    with pytest.raises(TornCheckpointError, match=r"model\.pkl"):
        load_checkpoint(path)


def test_a_newer_format_asks_for_a_newer_manyhands(tmp_path: Path, snapshot: Snapshot):
    path = save_unsharded(tmp_path, 5, snapshot)
    content = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(files.manifest_text({**content, "format": 99, "manyhands": "7.0"}))
    with pytest.raises(UserError, match="newer manyhands") as caught:
        load_checkpoint(path)
    assert "7.0" in str(caught.value)


def test_resolve_takes_what_users_have(tmp_path: Path, snapshot: Snapshot):
    checkpoints = tmp_path / "checkpoints"
    best, last = save_unsharded(checkpoints, 5, snapshot), save_unsharded(checkpoints, 8, snapshot)
    for reference in (tmp_path, checkpoints):
        assert find_checkpoint(reference, "last") == last
        assert find_checkpoint(reference, "best") == best
    assert find_checkpoint(best, "last") == best
    for name in ("a.pth.tar", "a.pth", "a.pt", "a.safetensors"):
        (tmp_path / name).touch()
        assert find_checkpoint(tmp_path / name, "best") == tmp_path / name
    unevaluated = save_unsharded(tmp_path / "other", 5, Snapshot(snapshot.model, None, {"step": 5, "best": None}))
    assert find_checkpoint(tmp_path / "other", "best") == unevaluated


def test_resolve_refuses_the_rest(tmp_path: Path, snapshot: Snapshot):
    (tmp_path / "weights.pkl").touch()
    (tmp_path / "empty").mkdir()
    for name in ("weights.pkl", "empty", "nowhere"):
        with pytest.raises(UserError, match=name):
            find_checkpoint(tmp_path / name, "last")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "__0_0.distcp").touch()
    with pytest.raises(UserError, match=r"torch\.distributed\.checkpoint folders(.|\n)*format_utils dcp_to_torch"):
        find_checkpoint(tmp_path / "dcp", "last")
    torn = save_unsharded(tmp_path / "torn", 5, snapshot)
    (torn / "manifest.json").unlink()
    with pytest.raises(TornCheckpointError):
        find_checkpoint(torn, "last")
    with pytest.raises(UserError, match="no checkpoint") as caught:
        find_checkpoint(tmp_path / "torn", "last")
    assert "manifest.json is missing" in str(caught.value)


def _save_as(folder: Path, step: int, best: int | None, snapshot: Snapshot) -> Path:
    state = {"step": step, "best": {"step": best, "top1": step / 100}}
    return save_unsharded(folder, step, Snapshot(snapshot.model, None, state))


def test_for_a_damaged_best_the_best_of_the_others_is_taken_and_said(tmp_path: Path, snapshot: Snapshot):
    second = _save_as(tmp_path, 3, 3, snapshot)
    best = _save_as(tmp_path, 5, 5, snapshot)
    last = _save_as(tmp_path, 8, 5, snapshot)
    assert choose_checkpoint(tmp_path, "best") == (best, [])
    (best / "model.safetensors").write_bytes(b"")
    path, reported = choose_checkpoint(tmp_path, "best")
    assert path == second
    assert reported[0].startswith("the best checkpoint, step-00000005, was skipped: model.safetensors has 0 bytes")
    assert reported[1:] == ["step-00000003 is used instead"]
    shutil.rmtree(second)
    shutil.rmtree(best)
    assert choose_checkpoint(tmp_path, "best")[0] == last


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"files": 5},
        {"format": 1, "files": {"model.safetensors": {"size": "1", "sha256": 2}, "state.json": {}}},
        {"format": {}, "files": {"../x": {}}},
    ],
)
def test_a_manifest_or_a_state_of_wrong_types_is_passed_over(tmp_path: Path, snapshot: Snapshot, content):
    older, newer = _save_as(tmp_path, 5, 5, snapshot), _save_as(tmp_path, 8, 8, snapshot)
    sealed = files.manifest_text(content) if isinstance(content, dict) else json.dumps(content).encode()
    (newer / "manifest.json").write_bytes(sealed)
    path, (skipped, used) = choose_checkpoint(tmp_path, "last")
    assert path == older
    assert skipped.startswith("step-00000008 was skipped: manifest.json ")
    assert used == "step-00000005 is used instead"
    save_unsharded(tmp_path, 9, Snapshot(snapshot.model, None, {"step": "nine", "best": 3}))
    assert choose_checkpoint(tmp_path, "best")[0] == older


def test_a_file_of_a_damaged_checkpoint_is_refused(tmp_path: Path, snapshot: Snapshot):
    file = save_unsharded(tmp_path, 5, snapshot) / "model.safetensors"
    assert choose_checkpoint(file, "best") == (file, [])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TornCheckpointError):
        choose_checkpoint(file, "best")


PICTURES = Preprocessing(size=8, resize=9, channels=1, mean=(0.5,), std=(0.25,))
RECORD = TrainedNetwork(name="cnn", num_classes=2, pictures=PICTURES, classes=("cat", "dog"))


def test_the_record_of_a_trained_network_is_read_again(tmp_path: Path):
    plain = json.loads(RECORD.model_dump_json())
    assert parse_record(plain, "here") == find_record(tmp_path, {"trained": plain}) == RECORD
    assert find_record(tmp_path / "checkpoints" / "step-1", {}) is None
    (tmp_path / "job.toml").touch()
    (tmp_path / "network.json").write_text(json.dumps(plain))
    assert find_record(tmp_path / "checkpoints" / "step-1", {}) == RECORD


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pictures": {**PICTURES.model_dump(), "std": [0.0]}}, "can't be read"),
        ({"pictures": {**PICTURES.model_dump(), "mean": [float("nan")]}}, "can't be read"),
        ({"pictures": {**PICTURES.model_dump(), "channels": 3}}, "can't be read"),
        ({"pictures": {**PICTURES.model_dump(), "size": 1 << 40}}, "can't be read"),
        ({"classes": []}, "can't be read"),
        ({"v": 99}, "newer version"),
    ],
)
def test_a_record_that_can_not_be_true_is_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_record({**RECORD.model_dump(), **change}, "here")

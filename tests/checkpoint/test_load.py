import json
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.checkpoint import layout
from manyhands.checkpoint.load import TornCheckpointError, load, newest, resolve, verify
from manyhands.checkpoint.save import save
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.core.errors import UserError

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(name=st.sampled_from(layout.FILES), place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_refused(tmp_path: Path, snapshot: Snapshot, name: str, place: float, mask: int):
    path = save(tmp_path, 5, snapshot)
    file = path / name
    whole = file.read_bytes()
    where = int(place * len(whole))
    file.write_bytes(whole[:where] + bytes([whole[where] ^ mask]) + whole[where + 1 :])
    with pytest.raises(TornCheckpointError, match=name):
        load(path)
    file.write_bytes(whole)
    verify(path)


@PROPERTY
@given(name=st.sampled_from(layout.FILES), place=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, snapshot: Snapshot, name: str, place: float):
    path = save(tmp_path, 5, snapshot)
    file = path / name
    whole = file.read_bytes()
    file.write_bytes(whole[: int(place * len(whole))])
    with pytest.raises(TornCheckpointError, match=name):
        load(path)
    file.write_bytes(whole)


@pytest.mark.parametrize("name", layout.FILES)
def test_a_missing_file_is_named(tmp_path: Path, snapshot: Snapshot, name: str):
    path = save(tmp_path, 5, snapshot)
    (path / name).unlink()
    with pytest.raises(TornCheckpointError, match=f"{name} is missing"):
        load(path)


def test_the_error_has_what_was_expected_and_found(tmp_path: Path, snapshot: Snapshot):
    path = save(tmp_path, 5, snapshot)
    file = path / "state.json"
    size, digest = file.stat().st_size, layout.digest(file)
    file.write_bytes(b"?" * size)
    with pytest.raises(TornCheckpointError, match=f"{layout.digest(file)}, expected {digest}"):
        verify(path)
    file.write_bytes(b"?")
    with pytest.raises(TornCheckpointError, match=f"1 bytes, expected {size}"):
        verify(path)


def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path, snapshot: Snapshot):
    path = save(tmp_path, 5, snapshot)
    (path / "model.pkl").write_bytes(pickle.dumps(print))
    content = json.loads((path / "manifest.json").read_bytes())
    content["files"]["model.pkl"] = content["files"]["model.safetensors"]
    (path / "manifest.json").write_bytes(layout.manifest_text(content))
    with pytest.raises(TornCheckpointError, match=r"model\.pkl"):
        load(path)


def test_a_newer_format_asks_for_a_newer_manyhands(tmp_path: Path, snapshot: Snapshot):
    path = save(tmp_path, 5, snapshot)
    content = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(layout.manifest_text({**content, "format": 99, "manyhands": "7.0"}))
    with pytest.raises(UserError, match="newer manyhands") as caught:
        load(path)
    assert "7.0" in str(caught.value)


def test_newest_steps_back_and_says_why(tmp_path: Path, snapshot: Snapshot):
    paths = [save(tmp_path, step, snapshot) for step in (1, 2, 3)]
    assert newest(tmp_path) == (paths[2], [])
    (paths[2] / "model.safetensors").unlink()
    found, sentences = newest(tmp_path)
    assert found == paths[1]
    assert sentences == ["step-00000003 was passed over: model.safetensors is missing"]
    assert newest(tmp_path, step_limit=1) == (paths[0], [])
    assert newest(tmp_path, step_limit=0) == (None, [])
    assert newest(tmp_path / "nowhere") == (None, [])


def test_resolve_takes_what_users_have(tmp_path: Path, snapshot: Snapshot):
    checkpoints = tmp_path / "checkpoints"
    best, last = save(checkpoints, 5, snapshot), save(checkpoints, 8, snapshot)
    for reference in (tmp_path, checkpoints):
        assert resolve(reference, "last") == last
        assert resolve(reference, "best") == best
    assert resolve(best, "last") == best
    for name in ("a.pth.tar", "a.pth", "a.pt", "a.safetensors"):
        (tmp_path / name).touch()
        assert resolve(tmp_path / name, "best") == tmp_path / name


def test_resolve_without_an_evaluation_takes_the_newest(tmp_path: Path, snapshot: Snapshot):
    last = save(tmp_path, 5, Snapshot(snapshot.model, None, {"step": 5, "best": None}))
    assert resolve(tmp_path, "best") == last


def test_resolve_refuses_the_rest(tmp_path: Path, snapshot: Snapshot):
    (tmp_path / "weights.pkl").touch()
    (tmp_path / "empty").mkdir()
    for name in ("weights.pkl", "empty", "nowhere"):
        with pytest.raises(UserError, match=name):
            resolve(tmp_path / name, "last")
    torn = save(tmp_path / "torn", 5, snapshot)
    (torn / "manifest.json").unlink()
    with pytest.raises(TornCheckpointError):
        resolve(torn, "last")
    with pytest.raises(UserError, match="no checkpoint") as caught:
        resolve(tmp_path / "torn", "last")
    assert "manifest.json is missing" in str(caught.value)


def test_a_best_that_is_gone_is_said(tmp_path: Path, snapshot: Snapshot):
    best = save(tmp_path, 5, snapshot)
    save(tmp_path, 8, snapshot)
    shutil.rmtree(best)
    with pytest.raises(TornCheckpointError, match="step-00000005 is missing"):
        resolve(tmp_path, "best")

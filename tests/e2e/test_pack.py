"""`manyhands pack`, and training from what it made."""

import json

import pytest
import torch
from PIL import Image

from tests.data.sets import make
from tests.e2e.command import QUICKLY, done, final_weights, forked, start

JOB = ["cnn", *f"--epochs 1 --batch 4 --device cpu --data.image-size 16 {QUICKLY}".split()]


def did(command, *given, **others):
    # Packing starts processes, which a fork of the tests' own process may not be able to.
    return done(command, *given, by=start if command == "pack" else forked, **others)


def refused(*given, **others):
    ended = done(*given, code=2, **others)
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) < 8
    return ended.err


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 8), ("val", 3)):
        make(tmp_path / "宠物" / part, classes=("猫", "狗"), count=count, size=(90, 70))
    return tmp_path / "宠物"


@pytest.mark.slow
def test_training_takes_the_packed_copy_and_ends_with_the_same_weights(folder, tmp_path):
    did("train", folder, *JOB, "--out", tmp_path / "from-folder", "-n", 2)
    ended = did("pack", folder, "--json")
    told = json.loads(ended.out.splitlines()[-1])
    assert (told["pictures"], told["made"]) == (22, True)
    pack = folder.with_name("宠物.pack")
    assert told["pack"] == str(pack)
    ended = did("train", folder, *JOB, "--out", tmp_path / "from-pack", "-n", 2)
    assert "reading pictures from the packed copy 宠物.pack" in ended.err
    folder.rename(tmp_path / "away")
    did("train", pack, *JOB, "--out", tmp_path / "from-pack-alone", "-n", 1)
    expected = final_weights(tmp_path / "from-folder")
    for name in ("from-pack", "from-pack-alone"):
        found = final_weights(tmp_path / name)
        assert all(torch.allclose(found[key], expected[key], atol=1e-6) for key in expected)


@pytest.mark.slow
def test_an_altered_shard_ends_training_with_one_screen(folder):
    assert "is up to date" not in did("pack", folder).out
    assert "is up to date" in did("pack", folder).out
    assert "is intact: 22 pictures in 2 shards" in did("pack", folder, "--check").out
    shard = folder.with_name("宠物.pack") / "train-000000.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2] + b"\0" * (len(content) - len(content) // 2))
    assert "the packed copy was altered" in refused("pack", folder, "--check")
    said = refused("train", folder, *JOB, cwd=folder.parent)
    assert "the packed copy was altered" in said
    assert "--replace" in said
    assert str(shard) in said


@pytest.mark.slow
def test_a_packed_copy_is_not_overwritten(folder):
    did("pack", folder, "--size", 20)
    assert "a packed copy with other settings exists" in refused("pack", folder)
    ended = did("train", folder, *JOB, cwd=folder.parent)
    assert "holds resized pictures (shorter side 20, quality 90)" in ended.err
    did("pack", folder, "--replace", "--processes", 2)
    place = folder.parent / "elsewhere"
    did("pack", folder, "--to", place)
    Image.new("RGB", (90, 70)).save(folder / "train/猫/new.png")
    assert "1 added" in refused("pack", folder, "--to", place)


def test_a_pack_alone_is_checked_too(folder):
    did("pack", folder, "--size", 20)
    pack = folder.with_name("宠物.pack")
    folder.rename(folder.with_name("away"))
    assert "is intact: 22 pictures" in did("pack", pack, "--check").out
    (pack / "val-000000.tar").write_bytes(b"")
    assert "val-000000.tar changed after packing" in refused("pack", pack, "--check")


@pytest.mark.slow
def test_what_is_proposed_makes_the_same_kind_of_copy(folder, tmp_path):
    """A copy of smaller pictures is made anew as one, by a line that a shell takes as it is."""
    place = folder.rename(tmp_path / "my pets")
    did("pack", place, "--size", 20, "--quality", 80)
    Image.new("RGB", (90, 70)).save(place / "train/猫/new.png")
    said = did("train", place, *JOB, cwd=tmp_path).err
    line = f"manyhands pack '{place}' --size 20 --quality 80 --replace"
    assert line in " ".join(said.split())


def test_a_place_that_cannot_be_written_is_told_with_what_helps(folder, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        said = refused("pack", folder, "--to", place)
        assert "can't be written" in said
        assert "--to" in said
        assert "--data-dir" not in said


def test_what_cannot_be_packed_is_said(folder, tmp_path):
    assert "there is no folder" in refused("pack", tmp_path / "none")
    assert "--size 0 with --quality 90 is not valid" in refused("pack", folder, "--quality", 90)
    assert "is not valid" in refused("pack", folder, "--size", 20, "--quality", 99)
    assert "would be inside the folder" in refused("pack", folder, "--to", folder / "pack")
    assert "no packed copy" in refused("pack", folder, "--check")
    (folder / "train/猫/gone.png").symlink_to("nowhere.png")
    assert "gone.png" in refused("pack", folder)

"""A packed copy gives what its folder gives, and is refused or left aside where it can't."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.data.sets import make, picture
from tests.e2e.command import environment, marked, wait_until

from manyhands.core.errors import UserError
from manyhands.data.decode import CorruptImageError
from manyhands.data.folder import pack_path
from manyhands.data.loading import open_loader
from manyhands.data.open import open_data, open_unsplit_folder, resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.packed import columns_digest, digest_of, open_pack, read_columns, write_columns
from manyhands.data.packing import PackRequest, make_pack, read_contents
from manyhands.data.splits import ImagesInMemory

NAMES = ["猫", "собака", "cat 2", "a.b", "train"]


def packed(root, *, replace=False, processes=1, **options):
    """A packed copy beside the folder, in small shards."""
    request = PackRequest(root, root.with_name(f"{root.name}.pack"), **{"shard_bytes": 20_000, **options})
    return make_pack(read_contents(root), request, processes=processes, replace=replace, progress=lambda *_: None)[0]


def batches(name, pixels=None, *, train=True, **options):
    """What is opened, and a batch of each split with its labels."""
    splits = open_data(DataOptions(name=str(name), **options))
    pixels = pixels or splits.pixels
    found = []
    for _, source in splits.named_sources():
        requests = [torch.arange(len(source)).flip(0)]
        batch = next(open_loader(source, pixels, train=train, seed=3).batches(2, requests))
        found += [batch.images, batch.labels]
    return splits, found


def assert_same(*opened):
    (first, expected), *others = opened
    for splits, found in others:
        assert splits.classes == first.classes
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


SHAPES = st.fixed_dictionaries(
    {
        "classes": st.lists(st.sampled_from(NAMES), min_size=2, max_size=4, unique=True),
        "count": st.integers(1, 5),
        "parts": st.sampled_from([("",), ("train",), ("train", "val"), ("train", "val", "test")]),
        "inside": st.booleans(),  # the parts' folders lie in each class folder
        "side": st.sampled_from([8, 70]),
        "suffix": st.sampled_from(["png", "JPEG", "bmp"]),
        "shard_bytes": st.sampled_from([1, 5_000, 1 << 20]),
    }
)


@settings(max_examples=8)
@given(SHAPES, st.sampled_from(["none", "crop", "crop-flip"]))
def test_a_folder_its_pack_memory_and_files_give_the_same_batches(shape, augment):
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "宠物"
        for part in shape["parts"]:
            for label, name in enumerate(shape["classes"]):
                for number in range(shape["count"]):
                    place = f"{name}/{part}" if shape["inside"] and len(shape["parts"]) > 1 else f"{part}/{name}"
                    path = root.joinpath(*place.split("/"), f"图 {number}.{shape['suffix']}")
                    picture(path, (shape["side"], shape["side"]), seed=label * 100 + number)
        pack = packed(root, shard_bytes=shape["shard_bytes"])
        assert {name for group in pack.groups for name in pack.names.take(slice(group.start, group.stop))}
        plain, in_memory = open_data(DataOptions(name=str(root), packed=False)).pixels, shape["side"] == 8
        pixels = resolve_pixels(DataOptions(augment=augment), plain) if in_memory else plain
        opened = [
            batches(name, pixels, memory_limit_mib=limit, packed=uses)
            for limit in (2048, 0)
            for name, uses in ((root, False), (root, True), (pack.folder, True))
        ]
        assert [splits.packed for splits, _ in opened[:2]] == ["", "宠物.pack"]
        assert [isinstance(splits.train, ImagesInMemory) for splits, _ in opened] == [in_memory] * 3 + [False] * 3
        assert [len({splits.pixels for splits, _ in some}) for some in (opened[:3], opened[3:])] == [1, 1]
        assert_same(*(batches(name, pixels, packed=name is not root, train_samples=3) for name in (root, pack.folder)))
        if shape["parts"] == ("",):
            whole = [
                open_unsplit_folder(DataOptions(name=str(name), packed=name is not root))
                for name in (root, pack.folder)
            ]
            assert len(whole[0].test) == shape["count"] * len(shape["classes"])
            assert torch.equal(whole[0].test.labels, whole[1].test.labels)
            assert not in_memory or torch.equal(whole[0].test.images, whole[1].test.images)
        shutil.rmtree(root)
        assert_same(*opened, batches(pack.folder, pixels))


def test_shards_are_what_webdataset_reads(tmp_path):
    """Plain tar files; the files of one sample follow each other and have one name up to the first dot."""
    root = make(tmp_path / "set", classes=("猫", "dog"), count=30, size=(40, 30))
    pack = packed(root)
    assert len(pack.shards) > 2
    samples = []
    for shard in pack.shards:
        with tarfile.open(pack.folder / shard.name) as file:
            members = [(member.name.split(".", 1), file.extractfile(member).read()) for member in file]
        for ((key, suffix), content), ((label_key, label_suffix), label) in zip(
            members[::2], members[1::2], strict=True
        ):
            assert (key, suffix, label_suffix) == (label_key, "png", "cls")
            samples.append((key, Image.open(io.BytesIO(content)).tobytes(), int(label)))
    assert [key for key, _, _ in samples] == [f"{number:09}" for number in range(60)]
    files = [(Image.open(path).tobytes(), pack.classes.index(path.parent.name)) for path in root.rglob("*.png")]
    assert sorted(sample[1:] for sample in samples) == sorted(files)
    assert [label for *_, label in samples] != sorted(label for *_, label in samples)
    reported = json.loads((pack.folder / "pack.json").read_text())["set"]
    assert (reported["classes"], reported["order_seed"]) == (["dog", "猫"], 0)


def test_the_digest_is_of_what_is_in_it_not_of_when_or_by_whom(tmp_path):
    one, two = make(tmp_path / "one", count=20), make(tmp_path / "two", count=20)
    for path in two.rglob("*.png"):
        os.utime(path, (1, 1))
    first, second = packed(one, shard_bytes=3000), packed(two, shard_bytes=3000, processes=2)
    assert first.digest == second.digest
    assert len({shard.sha256 for shard in first.shards}) > 1
    picture(one / "cat/00.png", seed=5555)
    assert packed(one, shard_bytes=3000, replace=True).digest != first.digest


def test_a_smaller_copy_says_so(tmp_path):
    root = make(tmp_path / "set", count=4, size=(120, 90))
    packed(root, size=90, quality=50)  # pictures that are small already stay as they are
    assert_same(batches(root), batches(root, packed=False))
    pack = packed(root, size=64, quality=90, replace=True)
    assert {Image.open(io.BytesIO(pack.content(row))).size for row in range(8)} == {(85, 64)}
    splits, _ = batches(root)
    assert any("resized pictures (shorter side 64, quality 90)" in note for note in splits.notes)
    splits, _ = batches(root, image_size=80)
    assert splits.train.paths.packed is None
    assert any("are too small" in note for note in splits.notes)


@pytest.mark.parametrize("size", [0, 16])
def test_pictures_that_cannot_be_read_are_so_in_the_pack(tmp_path, size):
    root = make(tmp_path / "set", count=4, size=(90, 70))
    (root / "cat/02.png").write_bytes((root / "cat/02.png").read_bytes()[:900])
    (root / "dog/01.png").write_bytes(b"")
    request = PackRequest(root, pack_path(root), size, 90 if size else 0)
    _, bad = make_pack(read_contents(root), request, processes=1, replace=False, progress=lambda *_: None)
    assert [Path(name).name for name in bad] == ["02.png", "01.png"]
    with pytest.raises(CorruptImageError, match=r"0[12]\.png"):
        batches(root)
    splits, _ = batches(root, skip_corrupt=True)
    assert [Path(name).name for name in splits.skipped] == ["02.png", "01.png"]


def with_other_head(**values):
    """Alters the index by hand, with a digest that fits."""

    def alter(folder):
        head = json.loads((folder / "pack.json").read_text())
        content = {name: value for name, value in (head["set"] | values).items() if value is not None}
        (folder / "pack.json").write_text(json.dumps({"digest": digest_of(content), "set": content}))

    return alter


def with_other_columns(name, **values):
    def alter(folder):
        columns = {**read_columns(folder / name), **values}
        write_columns(folder / name, {word: value for word, value in columns.items() if value is not None})
        if name == "samples.npz":
            with_other_head(samples_sha256=columns_digest(read_columns(folder / name)))(folder)

    return alter


def alter_bytes(file, place):
    content = bytearray(file.read_bytes())
    content[place(content)] ^= 1
    file.write_bytes(content)


ALTERED = [
    lambda folder: alter_bytes(folder / "pack.json", lambda _: 200),
    lambda folder: alter_bytes(
        next(folder.glob("*.tar")), lambda _: int(read_columns(folder / "samples.npz")["offset"][0]) + 300
    ),
    lambda folder: [os.truncate(shard, shard.stat().st_size - 1000) for shard in [*folder.glob("*.tar")][:1]],
    lambda folder: next(folder.glob("*.tar")).unlink(),
    lambda folder: (folder / "folder.npz").unlink(),
    with_other_head(shards=[["../outside.tar", 12, 20_000, ""]]),
    with_other_head(shards=[["all-000000.tar", "many"]]),
    with_other_head(groups=[["", 0, 13]]),
    with_other_head(groups=[["../..", 0, 12]]),
    with_other_head(classes=["cat"]),
    with_other_head(size="large"),
    with_other_columns("samples.npz", names=numpy.zeros(3, numpy.uint8)),
    with_other_columns("samples.npz", crc=None),
    with_other_columns("samples.npz", offset=numpy.zeros(12)),
    with_other_columns("samples.npz", shard=numpy.zeros(12, numpy.uint32) + 9),
    with_other_columns("folder.npz", bytes=numpy.zeros((12, 12), numpy.int64)),
    # zipfile takes this flag for encryption.
    lambda folder: alter_bytes(folder / "folder.npz", lambda content: content.index(b"PK\x01\x02") + 8),
]


@pytest.mark.parametrize("alter", ALTERED)
def test_an_altered_pack_is_refused(tmp_path, alter):
    """Also where its digest is made to fit: what it says never leads outside of the pack, or to a traceback."""
    root = make(tmp_path / "set", count=6, size=(90, 70))
    pack = packed(root, shard_bytes=1 << 20)
    alter(pack.folder)
    for name in (root, pack.folder):
        with pytest.raises(UserError, match="packed copy was altered") as caught:
            batches(name)
        assert any("--replace" in line for line in caught.value.hints)
    batches(root, packed=False)
    batches(packed(root, replace=True).folder)


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("1 added", lambda root: picture(root / "cat/new.png", (90, 70))),
        ("1 removed", lambda root: (root / "dog/01.png").unlink()),
        ("1 changed", lambda root: picture(root / "dog/02.png", (90, 70), seed=99)),
        ("other class folders", lambda root: picture(root / "emu/1.png", (90, 70))),
    ],
)
def test_a_folder_that_has_changed_is_read_itself(tmp_path, word, change):
    root = make(tmp_path / "my set", count=5, size=(90, 70))
    packed(root)
    change(root)
    splits, _ = batches(root)
    assert splits.train.paths.packed is None
    line = f"manyhands pack '{root}' --replace"  # as a shell takes it
    assert any(word in note and line in note for note in splits.notes)
    with pytest.raises(UserError, match=word):
        packed(root)
    packed(root, replace=True)
    assert batches(root)[0].train.paths.packed is not None
    assert_same(batches(root, packed=False), batches(root.with_name("my set.pack")))


def test_a_pack_is_never_overwritten_silently_and_files_of_others_stay_where_they_are(tmp_path):
    root = make(tmp_path / "set", count=5, size=(90, 70))
    first = packed(root)
    before = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    packed(root)
    with pytest.raises(UserError, match="a packed copy with other settings exists"):
        packed(root, size=20, quality=90)
    assert {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    (first.folder / "backup.tar").write_text("dear")
    assert packed(root, size=20, quality=90, replace=True).size == 20
    assert (first.folder / "backup.tar").read_text() == "dear"
    project = tmp_path / "project"
    project.mkdir()
    (project / "pack.json").write_text('{"name": "mine"}')
    (project / "index.js").write_text("")
    request = PackRequest(root, project)
    with pytest.raises(UserError, match=r"belong to a pack, such as index\.js"):
        make_pack(read_contents(root), request, processes=1, replace=True, progress=lambda *_: None)
    assert (project / "pack.json").read_text() == '{"name": "mine"}'


PACKING = """
import sys
from pathlib import Path
from manyhands.data.packing import PackRequest, make_pack, read_contents

if __name__ == "__main__":
    root, wait = Path(sys.argv[1]), sys.argv[2:]
    request = PackRequest(root, root.with_name("set.pack"), shard_bytes=20_000)
    progress = lambda *done: print(*done, flush=True) or (wait and sys.stdin.read())
    make_pack(read_contents(root), request, processes=2, replace=False, progress=progress)
"""


@pytest.mark.slow
def test_killed_pack_resumes(tmp_path):
    root = make(tmp_path / "set", count=80, size=(40, 30))
    script = tmp_path / "packs.py"
    script.write_text(PACKING)
    pack = root.with_name("set.pack")
    command, streams = [sys.executable, script, root, "wait"], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(PACKS=str(root)), **streams) as one:
        assert one.stdout.readline()
        one.send_signal(signal.SIGKILL)
    wait_until(lambda: not marked(f"{root}"))  # the processes that pack go with it
    assert not (pack / "pack.json").exists()
    assert not batches(root)[0].packed
    shards = {path: path.stat().st_mtime_ns for path in pack.glob("*.tar") if (pack / f".{path.name}.npz").exists()}
    assert shards
    done = subprocess.run([sys.executable, script, root], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) > 1
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert {path.name for path in pack.iterdir() if path.suffix != ".tar"} == {
        "pack.json", "samples.npz", "folder.npz", ".pack.json.lock"
    }  # fmt: skip
    assert_same(batches(root, packed=False), batches(pack))
    shutil.copytree(root, tmp_path / "again" / "set")
    assert packed(tmp_path / "again" / "set").digest == open_pack(pack).digest


def test_an_unfinished_pack_of_a_folder_that_changed_begins_anew(tmp_path):
    root = make(tmp_path / "set", count=20, size=(40, 30))
    pack = packed(root)
    (pack.folder / "pack.json").unlink()
    (pack.folder / "unfinished.json").write_text('{"key": "of another state", "ratio": 1.0}')
    stale = pack.folder / "all-000099.tar"
    stale.write_bytes(b"x")
    picture(root / "cat/03.png", (40, 30), seed=4242)
    packed(root)
    assert not stale.exists()
    assert_same(batches(root, packed=False), batches(pack.folder))


def test_a_smaller_copy_of_before_pictures_were_drawn_by_their_alpha_channel_is_noticed(tmp_path):
    """Such pictures were black."""
    root = make(tmp_path / "set", count=4, size=(120, 90))
    alpha = Image.linear_gradient("L").resize((120, 90))
    Image.merge("RGBA", [Image.new("L", alpha.size)] * 3 + [alpha]).save(root / "cat" / "icon.png")
    with_other_head(decoding=None)(packed(root, size=64, quality=90).folder)
    splits, _ = batches(root)
    assert not splits.packed
    line = f"manyhands pack {root} --size 64 --quality 90 --replace"
    assert any("only in the alpha channel" in note and line in note for note in splits.notes)
    with pytest.raises(UserError, match="by an older version"):
        packed(root, size=64, quality=90)
    pack = packed(root, size=64, quality=90, replace=True)
    icon = pack.content(list(pack.names).index("cat/icon.png"))
    assert Image.open(io.BytesIO(icon)).convert("L").getextrema()[1] > 200
    assert batches(root)[0].packed

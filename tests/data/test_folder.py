"""Folders of pictures: divided, listed, corrupt, linked, and refused; listings of millions are shared."""

import multiprocessing
import os
import shutil
import sys
import tarfile
import tracemalloc
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.sets import make, opened, picture

from manyhands.core.errors import UserError
from manyhands.core.records import FAILURE_FILE
from manyhands.data import gallery
from manyhands.data.decode import CorruptImageError, decode, read_content
from manyhands.data.folder import Listing, split_listing
from manyhands.data.loading import open_loader
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions
from manyhands.data.packed import PictureNames
from manyhands.data.splits import ImageFiles
from manyhands.run.tasks import list_pictures

COUNTS = st.lists(st.integers(1, 30), min_size=2, max_size=9)


@given(COUNTS, st.floats(0.01, 0.99))
def test_a_split_is_disjoint_complete_and_of_the_names_alone(counts, share):
    names = [f"c{label}/{number}.png" for label, count in enumerate(counts) for number in range(count)]
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    listing = Listing(
        "a", tuple(f"c{n}" for n in range(len(counts))), PictureNames.from_strings(names), numpy.array(labels)
    )
    train, test = split_listing(listing, share)
    assert sorted([*train.names, *test.names]) == sorted(names)
    assert len(set(train.names) & set(test.names)) == 0
    assert len(test) >= 1
    moved = split_listing(Listing("b", listing.classes, listing.names, listing.labels), share)
    assert (moved[0].names, moved[1].names) == (train.names, test.names)
    for label, count in enumerate(counts):
        kept = (test.labels == label).sum()
        assert count == 1 or count - kept >= 1
        assert abs(kept - count * share) <= 1.001 or kept == count - 1 or sum(counts) * share < 1


def test_a_second_opening_decodes_nothing(tmp_path, monkeypatch):
    make(tmp_path)
    with monkeypatch.context() as unwritable:
        unwritable.setenv("MANYHANDS_CACHE", str(tmp_path / "cat" / "03.png" / "cache"))
        with pytest.raises(UserError, match="can't be written"):
            opened(tmp_path)
    first = opened(tmp_path)
    monkeypatch.setattr("manyhands.data.gallery.decode", None)
    assert torch.equal(opened(tmp_path).train.images, first.train.images)
    monkeypatch.undo()
    picture(tmp_path / "cat" / "03.png", seed=77)
    changed = opened(tmp_path)
    assert not torch.equal(
        torch.cat([changed.train.images, changed.test.images]), torch.cat([first.train.images, first.test.images])
    )


def test_small_equal_pictures_are_in_memory_grey_until_a_color_appears_and_others_are_files(tmp_path):
    make(tmp_path / "small", count=40, mode="L")
    assert opened(tmp_path / "small").train.images.shape[1] == 1
    assert opened(tmp_path / "small", channels=3).train.images.shape[1] == 3
    picture(tmp_path / "small" / "cat" / "17.png")
    splits = opened(tmp_path / "small")
    assert splits.train.images.shape[1] == splits.pixels.channels == 3
    picture(tmp_path / "small" / "cat" / "17.png", size=(9, 8))
    splits = opened(tmp_path / "small")
    assert isinstance(splits.train, ImageFiles)
    assert splits.pixels.augment == "crop-flip"
    assert splits.pixels.size <= 9
    splits = opened(make(tmp_path / "large", count=3, size=(90, 70)))
    assert isinstance(splits.train, ImageFiles)
    assert (splits.pixels.size, splits.pixels.augment) == (224, "resized-crop-flip")


def read_all(root, **options):
    splits = opened(root, **options)
    for source in (splits.train, splits.test):
        list(open_loader(source, splits.pixels, train=False, seed=0).batches(0, [torch.arange(len(source))]))


@pytest.mark.parametrize("broken_link", [False, True])
@pytest.mark.parametrize("limit", [0, 2048])
def test_corrupt_pictures_are_errors_or_left_out_and_named(tmp_path, limit, broken_link):
    bad = make(tmp_path, count=10) / "cat" / "04.png"
    content = bad.read_bytes()
    bad.unlink()
    if broken_link:
        bad.symlink_to(tmp_path / "nowhere")
    else:
        bad.write_bytes(content[:60])
    options = {"memory_limit_mib": limit}
    # Found, and found in the cache; what was left out before is an error again.
    for skips in (False, True, True, False):
        if skips:
            splits = opened(tmp_path, skip_corrupt=True, **options)
            assert splits.skipped == (str(bad),)
            assert len(splits.train) + len(splits.test) == 19
            assert "1 unreadable pictures skipped" in splits.description
        else:
            with pytest.raises(CorruptImageError, match=r"04\.png"):
                read_all(tmp_path, **options)


def folders_of(root, words, count=1):
    """Makes folders of pictures; those that end in / are empty."""
    for word in words.split():
        if word.endswith("/"):
            (root / word).mkdir()
            continue
        for number in range(count):
            picture(root / word / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("folders", "word"),
    [
        ("", "has no class folders"),
        (". cat", 'only one class folder, "cat"'),
        ("cat dog/", 'the class folder "dog" has no pictures'),
        ("train test", '"test", "train" have names of splits, but hold no class folders'),
        ("seg_train seg_test seg_pred", "hold no class folders"),
        ("val/cat test/cat", "no training split"),
        ("Train/cat TRAIN/cat val/cat", "for the same split"),
        ("train/cat train/dog val", '"val" has no class folders'),
        ("train/steam bus/s car/s", "may be the training split, or a class"),
        ("cat/train cat/test dog", r"nothing else: cat/ holds test, train; dog/ holds pictures"),
        ("cat/train cat/test cat/odd dog/train dog/test dog/odd", "nothing else: cat/ holds odd, test, train"),
        ("cat/train dog/test", "class folders hold splits, but not each holds"),
        ("cat/train cat/val cat/valid dog/train dog/val dog/valid", "class folders hold splits, but not each holds"),
    ],
)
def test_folders_without_classes_and_splits_that_allow_several_readings_are_refused(tmp_path, folders, word):
    with pytest.raises(UserError, match=word) as caught:
        opened(folders_of(tmp_path, folders))
    assert caught.value.hints


def test_folders_inside_class_folders_are_splits_only_if_some_are_for_training_and_others_are_not(tmp_path):
    for number, folders in enumerate(("cat/train dog/train", "cat/bus cat/train dog/rail", "cat/test dog/val")):
        splits = opened(folders_of(tmp_path / f"plain{number}", folders, 2))
        assert (splits.classes, splits.notes) == (("cat", "dog"), ())
        assert len(splits.train) + len(splits.test) == 2 * len(folders.split())
    other = folders_of(tmp_path / "other", "cat/train cat/Testing dog/train dog/Testing", 3)
    assert len(opened(tmp_path / "plain0", held_out=str(other)).held_out) == 6


def test_names_that_look_the_same_are_distinguished(tmp_path):
    composed, parts = "caf\u00e9", "cafe\u0301"
    make(tmp_path / "train", classes=("bar", parts, "pub"), count=1)
    make(tmp_path / "val", classes=("bar", composed), count=1)
    (tmp_path / "val" / "empty").mkdir()
    with pytest.raises(UserError, match=rf"val/ has class folders that train/ lacks \(1\): {composed}") as caught:
        opened(tmp_path)
    assert caught.value.hints[0] == f"{composed!a} and {parts!a} differ in Unicode form (such as NFC, NFD)"
    shutil.rmtree(tmp_path / "val")
    make(tmp_path / "train", classes=("bar ",), count=1)
    with pytest.raises(UserError, match=r"two class folders look the same: 'bar' and 'bar ' differ in spaces"):
        opened(tmp_path)


def test_cifar_as_pictures_in_an_archive(tmp_path):
    make(tmp_path / "made" / "train", count=4, size=(32, 32))
    make(tmp_path / "made" / "test", count=2, size=(32, 32))
    archive = tmp_path / "data" / "cifar10" / "pictures.tar.xz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:xz") as file:
        for part in ("train", "test"):
            file.add(tmp_path / "made" / part, part)
    options = DataOptions(name="cifar10", dir=str(tmp_path / "data"), download=False)
    splits = open_data(options)
    assert (len(splits.train), len(splits.test)) == (8, 4)
    assert splits.pixels.augment == "crop-flip"
    assert splits.pixels.mean == (0.4914, 0.4822, 0.4465)
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(UserError, match="can't be unpacked"):
        open_data(options)


def test_processes_of_a_host_decode_once(tmp_path):
    """Each process writes what it decoded; one decodes all, the others nothing."""
    root = make(tmp_path / "set", count=20)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        found = pool.map(count_decoded, [root] * 3, chunksize=1)
    assert sum(number for number, _ in found) == 40
    assert len({total for _, total in found}) == 1


def count_decoded(root):
    decoded = []

    def counting(*arguments):
        decoded.append(arguments)
        return decode(*arguments)

    gallery.decode = counting
    total = int(opened(root).train.images.sum())
    return len(decoded), total


def test_links_neither_multiply_samples_nor_carry_them_into_another_class_or_split(tmp_path):
    make(tmp_path / "one", count=5)
    make(tmp_path / "elsewhere", classes=("more",), count=2)
    (tmp_path / "one" / "cat" / "loop").symlink_to("..")
    (tmp_path / "one" / "cat" / "itself").symlink_to("itself")
    (tmp_path / "one" / "cat" / "dogs").symlink_to("../dog")
    (tmp_path / "one" / "cat" / "up").symlink_to("../..")
    (tmp_path / "one" / "dog" / "more").symlink_to(tmp_path / "elsewhere" / "more")
    (tmp_path / "one" / "dog" / "again").symlink_to(tmp_path / "elsewhere" / "more")
    splits = opened(tmp_path / "one", memory_limit_mib=0)
    assert sorted(torch.cat([splits.train.labels, splits.test.labels]).tolist()) == [0] * 5 + [1] * 7
    paths = [os.path.realpath(path) for path in (*splits.train.paths, *splits.test.paths)]
    assert len(set(paths)) == len(paths) == 12
    assert "4 links to folders that are already included (such as cat/dogs)" in splits.notes[0]
    (tmp_path / "one" / "kitten").symlink_to("cat")
    with pytest.raises(UserError, match='"cat" and "kitten" are the same folder'):
        opened(tmp_path / "one")
    make(tmp_path / "two" / "train", count=2)
    (tmp_path / "two" / "val").symlink_to("train")
    assert any("val/ and train/ share 2 class folder(s)" in note for note in opened(tmp_path / "two").notes)


def test_a_pipe_with_a_pictures_name_is_not_waited_for(tmp_path):
    os.mkfifo(make(tmp_path) / "cat" / "f.png")
    (tmp_path / "cat" / "link.png").symlink_to("f.png")
    splits = opened(tmp_path)
    assert len(splits.train) + len(splits.test) == 20
    assert "unused files and folders (2): 2 pipes or devices (such as cat/f.png)" in splits.notes
    picture(tmp_path / "cat" / "@eaDir" / "thumb.png")
    assert len(list_pictures([tmp_path])) == 20  # what `predict` takes
    with pytest.raises(CorruptImageError, match="a folder, a pipe or a device"):
        read_content(str(tmp_path / "cat" / "f.png"))


def test_a_class_folder_whose_name_is_not_utf8_is_refused_and_a_picture_of_such_a_name_is_taken(tmp_path):
    make(tmp_path)
    (tmp_path / "cat" / "00.png").rename(tmp_path / "cat" / "\udce9.png")
    splits = opened(tmp_path)
    assert len(splits.train) + len(splits.test) == 20
    (tmp_path / "cat").rename(tmp_path / "caf\udce9")
    with pytest.raises(UserError, match=r'class folder "caf\\xe9" isn\'t UTF-8'):
        opened(tmp_path)


# As the file system has them: any bytes, also such as are no text.
NAME = st.binary(min_size=1).filter(lambda name: name[:1] != b"/" and b"\0" not in name).map(os.fsdecode)


def linked(root, classes, count):
    root.mkdir()
    Image.new("RGB", (80, 70)).save(root / "one.jpg")
    for label in range(classes):
        (root / f"n{label:08}").mkdir()
        for number in range(count):
            os.link(root / "one.jpg", root / f"n{label:08}" / f"n{label:08}_{number}.jpg")
    return root


@given(st.lists(NAME), st.data())
def test_names_are_what_a_tuple_of_them_is(paths, data):
    names = PictureNames.from_strings(paths)
    assert (len(names), list(names), list(reversed(names))) == (len(paths), paths, paths[::-1])
    chosen = data.draw(st.lists(st.integers(0, len(paths) - 1)) if paths else st.just([]))
    part, again = names.take(chosen), [paths[index] for index in chosen]
    assert list(part) == again
    assert list(part.take(slice(1, None, 2))) == again[1::2]
    assert part == PictureNames.from_strings(again)
    assert (part == names) == (again == paths)
    assert b"".join(part.blocks()) == b"".join(os.fsencode(name) + b"\0" for name in again)
    assert list(PictureNames(part.names, "a/b")) == [os.path.join("a/b", name) for name in again]  # noqa: PTH118
    with pytest.raises(IndexError):
        names[len(paths)]


def test_a_picture_takes_some_dozens_of_bytes(tmp_path):
    """Held: its name (30 bytes), where that ends, its label, which part it is of; while it is listed, twice that."""
    pictures = 10_000
    linked(tmp_path / "set", 10, pictures // 10)
    options = DataOptions(name=str(tmp_path / "set"))
    open_data(options)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    splits = open_data(options)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(splits.train) + len(splits.test) == pictures
    assert (after - before) / pictures < 80
    assert (peak - before) / pictures < 240


def test_a_full_disk_leaves_each_process_its_own_listing(tmp_path, monkeypatch):
    root = linked(tmp_path / "set", 2, 10)
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "start" / "0.json"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    opened = open_data(DataOptions(name=str(root), memory_limit_mib=0))
    assert len(opened.train) == 18
    assert "no room" in opened.notes[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_of_one_start_map_one_listing_though_the_folder_changes(tmp_path, monkeypatch):
    root, context = linked(tmp_path / "set", 2, 10), multiprocessing.get_context("fork")
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "start" / "0.json"))
    (tmp_path / "start" / "ranks").mkdir(parents=True)

    def open_as_often_as_asked(pipe):
        while pipe.recv():
            train = open_data(DataOptions(name=str(root), memory_limit_mib=0)).train
            pipe.send((len(train), int(train.labels.sum()), "listed" in Path("/proc/self/maps").read_text()))

    pipes, ends = zip(*(context.Pipe() for _ in range(2)), strict=True)
    processes = [context.Process(target=open_as_often_as_asked, args=(end,)) for end in ends]
    for process in processes:
        process.start()

    def opened(pipe):
        pipe.send(True)
        return pipe.recv()

    first = opened(pipes[0])
    for number in range(40):
        os.link(root / "one.jpg", root / "n00000001" / f"more-{number}.jpg")
    assert first == opened(pipes[1]) == (18, 9, True)
    assert opened(pipes[0]) == opened(pipes[1]) != first  # asked again, it is listed again
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join(30)

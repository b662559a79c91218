import multiprocessing
import os
import shutil
import tarfile

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from manyhands.core.errors import UserError
from manyhands.data import memory
from manyhands.data.decode import CorruptImageError, decode
from manyhands.data.folder import Listing, split
from manyhands.data.loader import Loader
from manyhands.data.names import PictureNames
from manyhands.data.open import open_data, resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.splits import ImageFiles, ImagesInMemory


def picture(path, size=(8, 8), mode="RGB", seed=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = numpy.random.default_rng(abs(hash(path.name)) if seed is None else seed)
    values = generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    Image.fromarray(values).convert(mode).save(path)


def make(root, classes=("cat", "dog"), count=10, **options):
    for label, name in enumerate(classes):
        for number in range(count):
            picture(root / name / f"{number:02}.png", seed=label * 1000 + number, **options)
    return root


def opened(root, **options):
    return open_data(DataOptions(name=str(root), **options))


COUNTS = st.lists(st.integers(1, 30), min_size=2, max_size=9)


@given(COUNTS, st.floats(0.01, 0.99))
def test_a_split_is_disjoint_complete_and_of_the_names_alone(counts, share):
    names = [f"c{label}/{number}.png" for label, count in enumerate(counts) for number in range(count)]
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    listing = Listing("a", tuple(f"c{n}" for n in range(len(counts))), PictureNames.of(names), numpy.array(labels))
    train, test = split(listing, share)
    assert sorted([*train.names, *test.names]) == sorted(names)
    assert len(set(train.names) & set(test.names)) == 0
    assert len(test) >= 1
    moved = split(Listing("b", listing.classes, listing.names, listing.labels), share)
    assert (moved[0].names, moved[1].names) == (train.names, test.names)
    for label, count in enumerate(counts):
        kept = (test.labels == label).sum()
        assert count == 1 or count - kept >= 1
        assert abs(kept - count * share) <= 1.001 or kept == count - 1 or sum(counts) * share < 1


def test_a_folder_without_val_is_split_alike_each_time(tmp_path):
    first, second = opened(make(tmp_path / "a")), opened(make(tmp_path / "b"))
    assert first.classes == ("cat", "dog")
    assert (len(first.train), len(first.test)) == (18, 2)
    assert torch.equal(first.test.images, second.test.images)
    assert sorted(first.test.labels.tolist()) == [0, 1]


@pytest.mark.parametrize("word", ["val", "test", "valid", "validation"])
def test_train_and_val(tmp_path, word):
    make(tmp_path / "train", count=3)
    make(tmp_path / word, count=2)
    splits = opened(tmp_path)
    assert (len(splits.train), len(splits.test)) == (6, 4)
    assert splits.description.startswith(f"{tmp_path.name}: 6 + 4 pictures")


def test_a_class_may_be_called_train(tmp_path):
    assert opened(make(tmp_path, classes=("bus", "train"))).classes == ("bus", "train")


def test_small_equal_pictures_are_in_memory_and_equal_the_files(tmp_path):
    """Pixels, order and augmentation don't depend on the way they took."""
    make(tmp_path, count=6)
    memory, files = opened(tmp_path), opened(tmp_path, memory_limit_mib=0)
    assert isinstance(memory.train, ImagesInMemory)
    assert isinstance(files.train, ImageFiles)
    assert memory.train.labels.tolist() == files.train.labels.tolist()
    for augment in ("none", "crop", "crop-flip"):
        pixels = resolve_pixels(DataOptions(augment=augment), memory.pixels)
        batches = [
            next(Loader(splits.train, pixels, train=True, seed=1).batches(3, [torch.arange(10)]))
            for splits in (memory, files)
        ]
        assert torch.equal(batches[0].images, batches[1].images)


def test_a_second_opening_decodes_nothing(tmp_path, monkeypatch):
    make(tmp_path)
    first = opened(tmp_path)
    monkeypatch.setattr("manyhands.data.memory.decode", None)
    assert torch.equal(opened(tmp_path).train.images, first.train.images)
    monkeypatch.undo()
    picture(tmp_path / "cat" / "03.png", seed=77)
    changed = opened(tmp_path)
    assert not torch.equal(
        torch.cat([changed.train.images, changed.test.images]), torch.cat([first.train.images, first.test.images])
    )


def test_one_different_size_makes_them_files(tmp_path):
    make(tmp_path, count=40)
    picture(tmp_path / "cat" / "17.png", size=(9, 8))
    splits = opened(tmp_path)
    assert isinstance(splits.train, ImageFiles)
    assert splits.pixels.augment == "crop-flip"
    assert splits.pixels.size <= 9


def test_grey_sets_stay_grey_until_a_colour_appears(tmp_path):
    make(tmp_path, count=40, mode="L")
    assert opened(tmp_path).train.images.shape[1] == 1
    assert opened(tmp_path, channels=3).train.images.shape[1] == 3
    picture(tmp_path / "cat" / "17.png")
    splits = opened(tmp_path)
    assert splits.train.images.shape[1] == splits.pixels.channels == 3


def test_large_pictures_are_files(tmp_path):
    splits = opened(make(tmp_path, count=3, size=(90, 70)))
    assert isinstance(splits.train, ImageFiles)
    assert (splits.pixels.size, splits.pixels.augment) == (224, "resized-crop-flip")
    pixels = resolve_pixels(DataOptions(image_size=20), splits.pixels)
    for train in (True, False):
        batch = next(Loader(splits.train, pixels, train=train, seed=0).batches(0, [torch.arange(4)]))
        assert batch.images.shape == (4, 3, 20, 20)


def read_all(root, **options):
    splits = opened(root, **options)
    for source in (splits.train, splits.test):
        list(Loader(source, splits.pixels, train=False, seed=0).batches(0, [torch.arange(len(source))]))


@pytest.mark.parametrize("limit", [0, 2048])
def test_corrupt_pictures_are_errors_or_left_out_and_named(tmp_path, limit):
    make(tmp_path, count=10)
    bad = tmp_path / "cat" / "04.png"
    bad.write_bytes(bad.read_bytes()[:60])
    options = {"memory_limit_mib": limit}
    with pytest.raises(CorruptImageError, match=r"04\.png"):
        read_all(tmp_path, **options)
    for _ in range(2):  # found, and found in the cache
        splits = opened(tmp_path, skip_corrupt=True, **options)
        assert splits.skipped == (str(bad),)
        assert len(splits.train) + len(splits.test) == 19
        assert "1 unreadable pictures left out" in splits.description
    with pytest.raises(CorruptImageError):  # what was left out before is an error again
        read_all(tmp_path, **options)


def test_other_files_are_counted(tmp_path):
    make(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / ".DS_Store").write_text("x")
    (tmp_path / "README").write_text("x")
    assert "1 other files ignored" in opened(tmp_path).description


def test_pictures_lie_at_any_depth_in_any_spelling(tmp_path):
    make(tmp_path, count=2)
    picture(tmp_path / "cat" / "more" / "x.PNG")
    splits = opened(tmp_path)
    assert len(splits.train) + len(splits.test) == 5


def test_bad_folders_say_what_is_wrong(tmp_path):
    def refuses(word, path=tmp_path):
        with pytest.raises(UserError, match=word) as caught:
            opened(path)
        assert caught.value.mend

    refuses("there is no folder", tmp_path / "none")
    refuses("has no class folders")
    picture(tmp_path / "x.png")
    refuses("1 pictures lie in it directly")
    picture(tmp_path / "cat" / "x.png")
    refuses('only one class folder, "cat"')
    (tmp_path / "dog").mkdir()
    refuses('the class folder "dog" has no pictures')


def test_val_must_have_the_same_classes(tmp_path):
    make(tmp_path / "train", classes=("a", "b", "c"), count=1)
    make(tmp_path / "val", classes=("a", "b"), count=1)
    with pytest.raises(UserError, match="train/ has 1 class folders that val/ lacks: c"):
        opened(tmp_path)


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    make(tmp_path / "set")
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="can't be written") as caught:
        opened(tmp_path / "set")
    assert "MANYHANDS_CACHE" in caught.value.mend[0]


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
    make(tmp_path / "set", count=20)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=count_decoded, args=(tmp_path / "set", results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join(30)
    assert sum(number for number, _ in found) == 40
    assert len({total for _, total in found}) == 1


def count_decoded(root, results):
    decoded = []

    def counting(*arguments):
        decoded.append(arguments)
        return decode(*arguments)

    memory.decode = counting
    splits = opened(root)
    results.put((len(decoded), int(splits.train.images.sum())))


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
    assert any("4 link(s)" in note and "one/cat/loop" in note for note in splits.notes)


def test_links_between_the_splits(tmp_path):
    make(tmp_path / "train", count=3)
    make(tmp_path / "val", count=2)
    (tmp_path / "train" / "cat" / "val").symlink_to("../../val")
    (tmp_path / "val" / "dog" / "train").symlink_to("../../train/dog")
    splits = opened(tmp_path)
    assert (len(splits.train), len(splits.test)) == (6, 4)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").symlink_to("train")
    assert "2 class folder(s) of val/ are those of train/" in opened(tmp_path).notes[0]
    (tmp_path / "train" / "kitten").symlink_to("cat")
    with pytest.raises(UserError, match='"cat" and "kitten" are one folder'):
        opened(tmp_path)


def test_a_pipe_with_a_pictures_name_is_not_waited_for(tmp_path):
    os.mkfifo(make(tmp_path) / "cat" / "f.png")
    (tmp_path / "cat" / "link.png").symlink_to("f.png")
    splits = opened(tmp_path)
    assert len(splits.train) + len(splits.test) == 20
    assert "2 other files ignored" in splits.description
    with pytest.raises(CorruptImageError, match="a folder, a pipe or a device"):
        decode(str(tmp_path / "cat" / "f.png"), 3)


def test_a_class_folder_whose_name_is_not_utf8_is_refused_and_a_picture_of_such_a_name_is_taken(tmp_path):
    make(tmp_path)
    (tmp_path / "cat" / "00.png").rename(tmp_path / "cat" / "\udce9.png")
    splits = opened(tmp_path)
    assert len(splits.train) + len(splits.test) == 20
    (tmp_path / "cat").rename(tmp_path / "caf\udce9")
    with pytest.raises(UserError, match=r'class folder "caf\\xe9" isn\'t UTF-8'):
        opened(tmp_path)

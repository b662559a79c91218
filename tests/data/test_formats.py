"""Published files: what was written is read; any other content is the user's error, never another one."""

import contextlib
import gzip
import io
import os
import pickle
import shutil
import tarfile

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.sets import write_idx, write_mnist

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.data.datasets import published
from manyhands.data.known import CifarForm, find_choice, recognize_data_set
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions

BINARY = CifarForm("bin", "bin.tar.gz", ("a.bin", "b.bin"), "test.bin", "names.txt", label_bytes=1)
FINE = CifarForm("bin", "bin.tar.gz", ("a.bin",), "test.bin", "names.txt", label_bytes=2)
PYTHON = CifarForm("py", "py.tar.gz", ("a",), "test", "meta")


def values(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_that_are_cut_anywhere_or_changed_are_refused_or_read_as_they_were(tmp_path, packed):
    file = tmp_path / ("x.gz" if packed else "x")
    write_idx(file, values(3, 4, 4))
    whole = file.read_bytes()
    assert torch.equal(published.read_idx(file, 3), values(3, 4, 4))
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match="x"):
            published.read_idx(file, 3)
        if length < (len(whole) if packed else 16):  # no pixel of the plain one, which has no checksum
            file.write_bytes(whole[:length] + bytes([whole[length] ^ 0x55]) + whole[length + 1 :])
            with contextlib.suppress(UserError):
                assert torch.equal(published.read_idx(file, 3), values(3, 4, 4))  # gzip's date and the like may differ


def test_idx_says_what_it_expected_and_found(tmp_path):
    path = tmp_path / "images"
    write_idx(path, values(3, 4, 4))
    write_idx(tmp_path / "two", torch.tensor([0, 1], dtype=torch.uint8))
    write_idx(tmp_path / "wrong", torch.tensor([0, 9, 11], dtype=torch.uint8))
    (tmp_path / "longer").write_bytes(path.read_bytes() + b"x")
    (tmp_path / "longer.gz").write_bytes(gzip.compress(path.read_bytes()) + gzip.compress(b"x"))
    for read, sentence in (
        (lambda: published.read_idx(path, 1), r"expected an IDX file .first bytes 00 00 08 01., found 00 00 08 03"),
        (lambda: published.read_idx(tmp_path / "longer", 3), r"expected 48 values .3 x 4 x 4., found more"),
        (lambda: published.read_idx(tmp_path / "longer.gz", 3), "found more"),  # a second member
        (lambda: published.read_mnist_split(path, tmp_path / "two", 10), "3 pictures and two 2 labels"),
        (lambda: published.read_mnist_split(path, tmp_path / "wrong", 10), "sample 2 is 11, but there are 10 classes"),
    ):
        with pytest.raises(UserError, match=sentence):
            read()


def read_cifar(content, form=PYTHON, classes=10):
    """Reads one file, called a."""
    return published.read_cifar_split({"a": content}, ("a",), form, classes)


def records(*labels, seed=0):
    pictures = values(len(labels), 3072, seed=seed).numpy()
    return b"".join(bytes(label) + picture.tobytes() for label, picture in zip(labels, pictures, strict=True))


def test_cifar_records_and_pickles_are_read():
    files = {"a.bin": records((1,), (2,)), "b.bin": records((9,), seed=1)}
    split = published.read_cifar_split(files, ("a.bin", "b.bin"), BINARY, 10)
    assert split.labels.tolist() == [1, 2, 9]
    assert torch.equal(split.images.view(3, -1), torch.cat([values(2, 3072), values(1, 3072, seed=1)]))
    assert read_cifar(records((3, 77)), FINE, 100).labels.tolist() == [77]
    for protocol in (2, 4):
        split = read_cifar(batch(protocol))
        assert split.labels.tolist() == [3, 4]
        assert torch.equal(split.images.view(2, -1), values(2, 3072))
        assert published.read_cifar_names(pickle.dumps({"label_names": ["cat", "dog"]}, protocol), PYTHON) == (
            "cat",
            "dog",
        )


def batch(protocol=2, **change):
    content = {"data": values(2, 3072).numpy(), "labels": [3, 4], "batch_label": "one", "filenames": ["a", "b"]}
    return pickle.dumps(content | change, protocol=protocol)


def test_a_pickle_of_python_2_is_read():
    """Text and array bytes are Python 2's str there; this is its numpy's own spelling, by hand."""
    content = b"\x00\x07" * 1536
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01bt"
        b"R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + content + b"tb"
    )
    old = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x05eu."
    split = read_cifar(old)
    assert split.labels.tolist() == [5]
    assert split.images.flatten().numpy().tobytes() == content


@given(st.integers(0, 7000), st.integers(0, 255))
@settings(max_examples=200)
def test_a_torn_or_changed_pickle_is_the_users_error(place, byte):
    changed = bytearray(batch())
    with pytest.raises(UserError):
        read_cifar(bytes(changed[: place % len(changed)]))
    changed[place % len(changed)] = byte
    try:
        split = read_cifar(bytes(changed))
    except UserError:
        return
    assert split.images.shape == (2, 3, 32, 32)


class _Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


@pytest.mark.parametrize("evil", [_Evil(), {"data": _Evil()}, pytest.approx, io.BytesIO(b"")])
def test_a_pickle_with_code_is_refused(evil, capsys):
    with pytest.raises(UserError, match=r"not allowed|not a pickle of plain data"):
        read_cifar(pickle.dumps(evil, protocol=2))
    assert capsys.readouterr().out == ""


ARRAY = r"\[n, 3,072\]|not allowed|not a pickle of plain data"


@pytest.mark.parametrize(
    ("content", "form", "sentence"),
    [
        (batch(data=numpy.zeros((2, 3072), "i1")), PYTHON, ARRAY),
        (batch(data=numpy.array([["a"] * 3072, [{}] * 3072], dtype=object)), PYTHON, ARRAY),
        (batch(data=numpy.asfortranarray(numpy.zeros((2, 3072), "u1"))), PYTHON, ARRAY),
        (batch(data=numpy.zeros((2, 3, 1024), "u1")), PYTHON, ARRAY),
        (batch(data=numpy.zeros((0, 3072), "u1")), PYTHON, ARRAY),
        (batch(labels=[1]), PYTHON, "2 pictures, but 1 labels"),
        (batch(labels="ab"), PYTHON, "list of whole numbers"),
        (batch(data=[1]), PYTHON, '"data"'),
        (batch(labels=[3, 10]), PYTHON, "sample 1 is 10"),
        (pickle.dumps([1]), PYTHON, 'has no "data"'),
        (b"", BINARY, "expected whole records of 3,073 bytes"),
        (records((1,), (2,))[:-1], BINARY, "expected whole records of 3,073 bytes"),
    ],
)
def test_cifar_files_of_other_content_are_refused(content, form, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        read_cifar(content, form)
    assert caught.value.where == "a"


def test_the_digits_are_whole():
    splits = open_data(DataOptions())
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert splits.test.labels[:5].tolist() == [0, 5, 0, 5, 0]
    pixels = splits.train.images.double() / 255
    assert splits.pixels.mean == (round(float(pixels.mean()), 4),)
    assert splits.pixels.std == (round(float(pixels.std(correction=0)), 4),)


@pytest.mark.parametrize("layout", ["mnist", "mnist/MNIST/raw"])
def test_mnist_is_found_in_its_usual_places(tmp_path, layout):
    for path in [*write_mnist(tmp_path / layout, (6, 2), suffix="").glob("*-labels-*")]:
        path.rename(path.with_name(path.name.replace("-idx1", ".idx1")))
    splits = open_data(DataOptions(name="mnist", dir=str(tmp_path), download=False))
    assert splits.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert splits.description.startswith("MNIST: 6 + 2 pictures")


def test_a_cifar_file_of_another_size_is_refused_before_it_is_read(tmp_path):
    layout = CifarForm("x", "x.tar.gz", ("a.bin",), "b.bin", "names", label_bytes=1)
    for name in ("a.bin", "b.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)  # a hole, which takes no room on the disk
    with pytest.raises(UserError, match=r"a\.bin has 1,073,741,824 bytes"):
        published.read_cifar_files(tmp_path, layout)


# A folder that holds a known set's published files is that set, however it is named.
MNIST = (7, 2, 1, 0, 4, 1, 4, 9, 5, 9)
FASHION = (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)


def cifar10_bin(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        pixels = [bytes([label]) + bytes([number * 16 + label]) * 3072 for label in range(10)]
        (folder / name).write_bytes(b"".join(pixels))
    (folder / "batches.meta.txt").write_text("\n".join(["aeroplane", *map(str, range(1, 10))]))
    return folder


def cifar10_py(folder):
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        data = numpy.arange(10, dtype=numpy.uint8).repeat(3072).reshape(10, 3072)
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": list(range(10))}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"n%d" % n for n in range(10)]}, protocol=2))
    return folder


def cifar100_bin(folder):
    folder.mkdir(parents=True)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(b"".join(bytes([0, label]) + bytes(3072) for label in range(100)))
    return folder


def test_cifar_opens_from_a_folder_and_from_its_archive(tmp_path):
    folder = cifar10_bin(tmp_path / "cifar10" / "cifar-10-batches-bin")
    (folder / "batches.meta.txt").unlink()
    options = DataOptions(name="cifar10", dir=str(tmp_path), download=False)
    splits = open_data(options)
    assert (len(splits.train), len(splits.test)) == (50, 10)
    assert splits.classes[3] == "cat"
    archive = folder.parent / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    shutil.rmtree(folder)
    for again in (open_data(options), open_data(DataOptions(name=str(archive)))):
        assert torch.equal(again.train.images, splits.train.images)
        assert torch.equal(again.test.images, splits.test.images)
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(UserError, match="can't be read"):
        open_data(options)


def idx(folder, first, suffix=".gz"):
    return write_mnist(folder, (20, 20), (*first, *range(10)), suffix)


CASES = {
    "cifar10 binary": ("cifar10", lambda at: cifar10_bin(at / "cifar-10-batches-bin")),
    "cifar10 under another name": ("cifar10", lambda at: cifar10_bin(at / "pictures")),
    "cifar10 in the folder of torchvision": ("cifar10", lambda at: cifar10_py(at / "cifar-10-batches-py").parent),
    "cifar100 binary": ("cifar100", lambda at: cifar100_bin(at / "cifar-100-binary")),
    "mnist packed": ("mnist", lambda at: idx(at / "files", MNIST)),
    "mnist above it": ("mnist", lambda at: idx(at / "MNIST" / "raw", MNIST, "").parents[1]),
    "fashion-mnist": ("fashion-mnist", lambda at: idx(at / "files", FASHION)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_published_files_is_that_set(case, tmp_path):
    name, make = CASES[case]
    place = make(tmp_path / "data")
    os.utime(tmp_path)
    for options in (DataOptions(name=str(place)), DataOptions(name=name, dir=str(place), download=False)):
        opened = open_data(options)
        assert len(opened.test) in {10, 20, 100}
        assert name != "cifar10" or opened.classes[0] in {"aeroplane", "n0"}  # as the files say
    loaded = load_job({"data.name": str(place)}, environment={})
    assert (loaded.job.data.name, loaded.job.data.dir) == (name, str(place))
    assert loaded.origins["data.dir"] == "flag"
    assert loaded.origins["train.epochs"] == f"recipe {name}"


def test_folders_that_are_several_sets_a_part_of_one_or_none_are_not_taken_for_one(tmp_path):
    (cifar10_bin(tmp_path / "part") / "data_batch_3.bin").unlink()
    cifar10_bin(tmp_path / "both" / "cifar-10-batches-bin")
    idx(tmp_path / "both" / "MNIST" / "raw", MNIST)
    idx(tmp_path / "kuzushiji", range(10))
    idx(tmp_path / "fashion", FASHION)
    for name, place, sentence in (
        (None, "part", r"has no data_batch_3\.bin"),
        ("cifar10", "part", r"has no data_batch_3\.bin"),
        (None, "both", f"several data sets: cifar10 and mnist(.|\n)*mnist --data-dir {tmp_path / 'both'}"),
        (None, "kuzushiji", "neither MNIST nor Fashion-MNIST"),
        ("mnist", "fashion", "mnist has no train-images"),
    ):
        folder = str(tmp_path / place)
        with pytest.raises(UserError, match=sentence):
            open_data(DataOptions(name=name, dir=folder, download=False) if name else DataOptions(name=folder))
    for name in ("mnist", "cifar10", "train"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "picture.png").touch()
    assert recognize_data_set(tmp_path / "pictures") == ""
    assert find_choice(str(tmp_path / "pictures")) == "user"

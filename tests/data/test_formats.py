"""IDX and CIFAR files: what was written is read; anything else is the user's error, never another one."""

import gzip
import io
import pickle
import struct
import tarfile
import tracemalloc

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.sets import write_idx

from manyhands.core.errors import UserError
from manyhands.data.datasets.published import (
    read_cifar_files,
    read_cifar_names,
    read_cifar_split,
    read_idx,
    read_mnist_split,
)
from manyhands.data.known import CifarForm
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions

BINARY = CifarForm("bin", "bin.tar.gz", ("a.bin", "b.bin"), "test.bin", "names.txt", label_bytes=1)
FINE = CifarForm("bin", "bin.tar.gz", ("a.bin",), "test.bin", "names.txt", label_bytes=2)
PYTHON = CifarForm("py", "py.tar.gz", ("a",), "test", "meta")


def values(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_idx_round_trip(tmp_path_factory, shape, packed, seed):
    path = tmp_path_factory.mktemp("idx") / ("x.gz" if packed else "x")
    write_idx(path, values(*shape, seed=seed))
    assert torch.equal(read_idx(path, 3), values(*shape, seed=seed))


@pytest.mark.parametrize("packed", [True, False])
def test_idx_cut_anywhere_is_the_users_error(tmp_path, packed):
    path = tmp_path / ("x.gz" if packed else "x")
    write_idx(path, values(3, 4, 4))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="x"):
            read_idx(path, 3)


@given(st.binary(max_size=80), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_are_the_users_error(tmp_path_factory, content, packed):
    path = tmp_path_factory.mktemp("idx") / ("x.gz" if packed else "x")
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_idx(path, 3)


@given(st.integers(0, 63), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_changed_byte_never_ends_in_another_error(tmp_path_factory, place, byte):
    path = tmp_path_factory.mktemp("idx") / "x.gz"
    write_idx(path, values(3, 4, 4))
    content = bytearray(path.read_bytes())
    content[place] = byte
    path.write_bytes(content)
    try:
        read = read_idx(path, 3)
    except UserError:
        return
    assert torch.equal(read, values(3, 4, 4))  # only the gzip header's date and the like may differ


def test_idx_says_what_it_expected_and_found(tmp_path):
    path = tmp_path / "images"
    write_idx(path, values(3, 4, 4))
    write_idx(tmp_path / "two", torch.tensor([0, 1], dtype=torch.uint8))
    write_idx(tmp_path / "wrong", torch.tensor([0, 9, 11], dtype=torch.uint8))
    (tmp_path / "longer").write_bytes(path.read_bytes() + b"x")
    (tmp_path / "longer.gz").write_bytes(gzip.compress(path.read_bytes()) + gzip.compress(b"x"))
    for read, sentence in (
        (lambda: read_idx(path, 1), r"expected an IDX file .first bytes 00 00 08 01., found 00 00 08 03"),
        (lambda: read_idx(tmp_path / "longer", 3), r"expected 48 values .3 x 4 x 4., found more"),
        (lambda: read_idx(tmp_path / "longer.gz", 3), "found more"),  # a second member
        (lambda: read_idx(tmp_path / "none", 3), "can't be read: No such file"),
        (lambda: read_mnist_split(path, tmp_path / "two", 10), "3 pictures and two 2 labels"),
        (lambda: read_mnist_split(path, tmp_path / "wrong", 10), "sample 2 is 11, but there are 10 classes"),
    ):
        with pytest.raises(UserError, match=sentence):
            read()


def records(labels, seed=0):
    pictures = values(len(labels), 3072, seed=seed).numpy()
    return b"".join(bytes(label) + picture.tobytes() for label, picture in zip(labels, pictures, strict=True))


def test_cifar_records_round_trip():
    files = {"a.bin": records([(1,), (2,)]), "b.bin": records([(9,)], seed=1)}
    split = read_cifar_split(files, ("a.bin", "b.bin"), BINARY, 10)
    assert split.labels.tolist() == [1, 2, 9]
    assert torch.equal(split.images.view(3, -1), torch.cat([values(2, 3072), values(1, 3072, seed=1)]))
    fine = read_cifar_split({"a.bin": records([(3, 77)])}, ("a.bin",), FINE, 100)
    assert fine.labels.tolist() == [77]


@given(st.integers(0, 2 * 3073 + 5))
@settings(max_examples=60, deadline=None)
def test_cut_cifar_records_are_the_users_error(length):
    content = (records([(1,), (2,)]) + b"12345")[:length]
    if length and length % 3073 == 0:
        assert len(read_cifar_split({"a.bin": content}, ("a.bin",), BINARY, 10)) == length // 3073
    else:
        with pytest.raises(UserError, match=r"a\.bin: expected whole records of 3,073 bytes"):
            read_cifar_split({"a.bin": content}, ("a.bin",), BINARY, 10)


def test_a_cifar_label_out_of_range_names_file_and_sample():
    with pytest.raises(UserError, match="sample 1 is 10") as caught:
        read_cifar_split({"a.bin": records([(1,), (10,)])}, ("a.bin",), BINARY, 10)
    assert caught.value.where == "a.bin"


def batch(protocol=2, **change):
    content = {"data": values(2, 3072).numpy(), "labels": [3, 4], "batch_label": "one", "filenames": ["a", "b"]}
    return pickle.dumps(content | change, protocol=protocol)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_cifar_pickles_are_read(protocol):
    split = read_cifar_split({"a": batch(protocol)}, ("a",), PYTHON, 10)
    assert split.labels.tolist() == [3, 4]
    assert torch.equal(split.images.view(2, -1), values(2, 3072))
    meta = pickle.dumps({"label_names": ["cat", "dog"]}, protocol=protocol)
    assert read_cifar_names(meta, PYTHON) == ("cat", "dog")


def test_a_pickle_of_python_2_is_read():
    """Text and array bytes are Python 2's str there; this is its numpy's own spelling, by hand."""
    content = b"\x00\x07" * 1536
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01bt"
        b"R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + content + b"tb"
    )
    old = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x05eu."
    split = read_cifar_split({"a": old}, ("a",), PYTHON, 10)
    assert split.labels.tolist() == [5]
    assert split.images.flatten().numpy().tobytes() == content


@given(st.integers(0, 7000), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_torn_or_changed_pickle_is_the_users_error(place, byte):
    whole = bytearray(batch())
    torn, changed = whole[: place % len(whole)], whole
    changed[place % len(whole)] = byte
    with pytest.raises(UserError):
        read_cifar_split({"a": bytes(torn)}, ("a",), PYTHON, 10)
    try:
        split = read_cifar_split({"a": bytes(changed)}, ("a",), PYTHON, 10)
    except UserError:
        return
    assert split.images.shape == (2, 3, 32, 32)


class _Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


@pytest.mark.parametrize("evil", [_Evil(), {"data": _Evil()}, pytest.approx, numpy.float64(1), io.BytesIO(b"")])
def test_a_pickle_with_code_is_refused(evil, capsys):
    with pytest.raises(UserError, match=r"not allowed|not a pickle of plain data"):
        read_cifar_split({"a": pickle.dumps(evil, protocol=2)}, ("a",), PYTHON, 10)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros((2, 3072)),
        numpy.zeros((2, 3072), "i1"),
        numpy.array([["a"] * 3072, [{}] * 3072], dtype=object),
        numpy.asfortranarray(numpy.zeros((2, 3072), "u1")),
        numpy.zeros((2, 3, 1024), "u1"),
        numpy.zeros((2, 3071), "u1"),
        numpy.zeros((0, 3072), "u1"),
    ],
)
def test_only_arrays_of_bytes_are_read(array):
    with pytest.raises(UserError, match=r"\[n, 3,072\]|not allowed|not a pickle of plain data"):
        read_cifar_split({"a": batch(data=array)}, ("a",), PYTHON, 10)


def test_wrong_fields_are_named():
    for change, word in (
        ({"labels": [1]}, "2 pictures, but 1 labels"),
        ({"labels": "ab"}, "list of whole numbers"),
        ({"data": [1]}, '"data"'),
    ):
        with pytest.raises(UserError, match=word):
            read_cifar_split({"a": batch(**change)}, ("a",), PYTHON, 10)
    with pytest.raises(UserError, match='has no "data"'):
        read_cifar_split({"a": pickle.dumps([1])}, ("a",), CifarForm("", "", ("a",), "", ""), 10)


def cifar_folder(base):
    folder = base / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(records([(number,), (0,)], seed=number))
    (folder / "test_batch.bin").write_bytes(records([(7,)], seed=9))
    return folder


def test_cifar_opens_from_a_folder_and_from_its_archive(tmp_path):
    folder = cifar_folder(tmp_path)
    options = DataOptions(name="cifar10", dir=str(tmp_path), download=False)
    splits = open_data(options)
    assert (len(splits.train), len(splits.test)) == (10, 1)
    assert splits.classes[3] == "cat"
    archive = folder.parent / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    for again in (open_data(options), open_data(DataOptions(name=str(archive)))):
        assert torch.equal(again.train.images, splits.train.images)
        assert torch.equal(again.test.images, splits.test.images)
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(UserError, match="can't be read"):
        open_data(options)


def test_the_digits_are_whole():
    splits = open_data(DataOptions())
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert splits.test.labels[:5].tolist() == [0, 5, 0, 5, 0]
    pixels = splits.train.images.double() / 255
    assert splits.pixels.mean == (round(float(pixels.mean()), 4),)
    assert splits.pixels.std == (round(float(pixels.std(correction=0)), 4),)


@pytest.mark.parametrize("layout", ["mnist", "mnist/raw", "MNIST/raw", "mnist/MNIST/raw"])
def test_mnist_is_found_in_its_usual_places(tmp_path, layout):
    folder = tmp_path / layout
    folder.mkdir(parents=True)
    for part, number in (("train", 6), ("t10k", 2)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", values(number, 28, 28))
        write_idx(folder / f"{part}-labels.idx1-ubyte", torch.arange(number, dtype=torch.uint8))
    splits = open_data(DataOptions(name="mnist", dir=str(tmp_path), download=False))
    assert splits.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert splits.description.startswith("MNIST: 6 + 2 pictures")


def test_a_packed_file_that_claims_far_more_than_it_can_hold_takes_no_memory(tmp_path):
    header = struct.pack(">HBBIII", 0, 8, 3, 1 << 16, 1 << 8, 1 << 7)
    (tmp_path / "x.gz").write_bytes(gzip.compress(header + bytes(4 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="the header says 2,147,483,648 values"):
            read_idx(tmp_path / "x.gz", 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_cifar_file_of_another_size_is_refused_before_it_is_read(tmp_path):
    layout = CifarForm("x", "x.tar.gz", ("a.bin",), "b.bin", "names", label_bytes=1)
    for name in ("a.bin", "b.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)  # a hole, which takes no room on the disk
    with pytest.raises(UserError, match=r"a\.bin has 1,073,741,824 bytes"):
        read_cifar_files(tmp_path, layout)

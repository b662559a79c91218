"""A folder that holds a known set's published files is that set, however it is named."""

import io
import os
import pickle

import numpy
import pytest
import torch
from tests.data.sets import write_idx

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.data.known import find_choice, recognise
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions

MNIST = (7, 2, 1, 0, 4, 1, 4, 9, 5, 9)
FASHION = (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)


def cifar10_bin(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        records = [bytes([label]) + bytes([number * 16 + label]) * 3072 for label in range(10)]
        (folder / name).write_bytes(b"".join(records))
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


def idx(folder, first, *, packed=True):
    folder.mkdir(parents=True)
    labels = torch.tensor([*first, *range(10)], dtype=torch.uint8)
    for part in ("train", "t10k"):
        for kind, values in (("images-idx3", torch.zeros(20, 28, 28, dtype=torch.uint8)), ("labels-idx1", labels)):
            write_idx(folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}", values)
    return folder


CASES = {
    "cifar10 binary": ("cifar10", lambda at: cifar10_bin(at / "cifar-10-batches-bin")),
    "cifar10 under another name": ("cifar10", lambda at: cifar10_bin(at / "pictures")),
    "cifar10 python": ("cifar10", lambda at: cifar10_py(at / "cifar-10-batches-py")),
    "cifar10 in the folder of torchvision": ("cifar10", lambda at: cifar10_py(at / "cifar-10-batches-py").parent),
    "cifar100 binary": ("cifar100", lambda at: cifar100_bin(at / "cifar-100-binary")),
    "mnist packed": ("mnist", lambda at: idx(at / "files", MNIST)),
    "mnist in the folder of torchvision": ("mnist", lambda at: idx(at / "MNIST" / "raw", MNIST, packed=False).parent),
    "mnist above it": ("mnist", lambda at: idx(at / "MNIST" / "raw", MNIST, packed=False).parents[1]),
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


def test_a_part_of_the_files_is_named_and_nothing_fetched(tmp_path):
    (cifar10_bin(tmp_path / "bin") / "data_batch_3.bin").unlink()
    for options in (DataOptions(name=str(tmp_path / "bin")), DataOptions(name="cifar10", dir=str(tmp_path / "bin"))):
        with pytest.raises(UserError, match=r"has no data_batch_3\.bin"):
            open_data(options)


def test_what_could_be_several_sets_is_asked_about(tmp_path):
    cifar10_bin(tmp_path / "cifar-10-batches-bin")
    idx(tmp_path / "MNIST" / "raw", MNIST)
    with pytest.raises(UserError, match="several data sets: cifar10 and mnist") as caught:
        recognise(tmp_path)
    assert caught.value.hints == (
        f"choose cifar10: cifar10 --data-dir {tmp_path}",
        f"choose mnist: mnist --data-dir {tmp_path}",
    )


def test_another_set_with_mnists_names_is_not_taken_for_it(tmp_path):
    idx(tmp_path / "kuzushiji", range(10))
    with pytest.raises(UserError, match="neither MNIST nor Fashion-MNIST"):
        recognise(tmp_path / "kuzushiji")
    idx(tmp_path / "fashion", FASHION)
    with pytest.raises(UserError, match="mnist has no train-images"):
        open_data(DataOptions(name="mnist", dir=str(tmp_path / "fashion"), download=False))


def test_a_sets_own_name_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    idx(tmp_path / "cifar10", FASHION)
    loaded = load_job({"data.name": "cifar10", "data.dir": "elsewhere"}, environment={})
    assert (loaded.job.data.name, loaded.job.data.dir) == ("cifar10", "elsewhere")


def test_folders_of_pictures_stay_that(tmp_path):
    for name in ("mnist", "cifar10", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "picture.png").write_bytes(io.BytesIO().getvalue())
    assert recognise(tmp_path) == ""
    assert find_choice(str(tmp_path)) == "user"

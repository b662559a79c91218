"""What one process sees otherwise than rank 0 is refused by name: classes, labels, names, pictures, samples."""

import random
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.train.data_setup import open_splits
from manyhands.train.objects import Objects
from tests.processes.ranks import run_on_ranks


def _told(world, train, test, settings, machines):
    """What opening the data says on this process; `machines`: each process reads disks of its own."""
    if machines:
        world = replace(world, local_rank=0, local_size=1)
    job = load_job({"data.name": "objects", **settings(world.rank)}, environment={}).job
    try:
        open_splits(job, world, Objects(train_set=train and train(world.rank), test_set=test and test(world.rank)))
    except UserError as error:
        return error.message
    return ""


def told(train=None, test=None, settings=lambda rank: {}, machines=True):
    found = set(run_on_ranks(_told, 2, train, test, settings, machines))
    assert len(found) == 1
    return found.pop()


def make_folder(root, size):
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (size, size), (number, 0, 0)).save(root / label / f"{number:02}.bmp")


def nothing(root):
    pass


def renamed(root):
    (root / "cat/03.bmp").rename(root / "cat/003.bmp")


def swapped(root):
    """Two pictures of one class, as large as each other."""
    with Image.open(root / "dog/04.bmp") as picture:
        size = picture.width
    Image.new("RGB", (size, size), (5, 0, 0)).save(root / "dog/04.bmp")
    Image.new("RGB", (size, size), (4, 0, 0)).save(root / "dog/05.bmp")


@pytest.mark.parametrize("size", [8, 80], ids=["in memory", "in files"])
@pytest.mark.parametrize(("change", "word"), [(nothing, ""), (renamed, "pictures"), (swapped, "pictures")])
def test_folders_of_two_machines(tmp_path, size, change, word):
    make_folder(tmp_path / "one", size)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    change(tmp_path / "other")
    said = told(settings=lambda rank: {"data.name": str(tmp_path / ("other" if rank else "one"))})
    assert (word in said) if word else said == "", said


@pytest.mark.parametrize("size", [8, 80], ids=["in memory", "in files"])
def test_a_machine_without_the_test_split(tmp_path, size):
    for word in ("train", "val", "test"):
        make_folder(tmp_path / "one" / word, size)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    shutil.rmtree(tmp_path / "other/test")
    said = told(settings=lambda rank: {"data.name": str(tmp_path / ("other" if rank else "one"))})
    assert said == "rank 1 has different splits and kinds of data than rank 0"


def test_a_machine_with_files_where_another_has_pixels(tmp_path):
    make_folder(tmp_path / "one", 8)
    make_folder(tmp_path / "other", 80)
    said = told(settings=lambda rank: {"data.name": str(tmp_path / ("other" if rank else "one"))})
    assert said == "rank 1 has different splits and kinds of data than rank 0"


def _tensors(rank, *, x=0, y=0):
    images = torch.arange(20 * 16, dtype=torch.float32).reshape(20, 1, 4, 4)
    images[7, 0, 0, 0] += x * rank
    labels = torch.arange(20) % 3
    labels[5] += y * rank
    return TensorDataset(images, labels)


class Own(Dataset):
    """Samples by the number, whose labels nobody knows before."""

    def __init__(self, rank, *, label=0, x=0, own_generator=False, named=True):
        self.rank, self.label, self.x = rank, label, x
        self.generator = random.Random(rank) if own_generator else None
        if named:
            self.classes = ["one", "two", "three"]

    def __len__(self):
        return 12

    def __getitem__(self, index):
        drawn = self.generator.random() if self.generator else torch.rand(()).item()
        return torch.full((1, 4, 4), index + drawn + self.x * self.rank), (index + self.label * self.rank) % 3


@pytest.mark.parametrize("machines", [False, True])
@pytest.mark.parametrize(
    ("train", "said"),
    [
        (_tensors, ""),
        (lambda rank: _tensors(rank, x=1), "rank 1 has different training samples than rank 0"),
        (lambda rank: _tensors(rank, y=-1), "rank 1 has different training data than rank 0"),
        (Own, ""),
        (lambda rank: Own(rank, own_generator=True), ""),
        (lambda rank: Own(rank, x=1), "rank 1 has different training samples than rank 0"),
        (lambda rank: Own(rank, label=1), "rank 1 has different training samples than rank 0"),
        (lambda rank: Own(rank, label=1, named=False), "rank 1 has different training data than rank 0"),
    ],
)
def test_data_sets_of_ones_own(train, said, machines):
    assert told(train, lambda rank: _tensors(0), machines=machines) == said

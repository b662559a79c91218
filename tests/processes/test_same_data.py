"""What one process sees otherwise than rank 0 is refused by name: classes, labels, names, pictures, samples."""

import random
import shutil
from dataclasses import replace

import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.train.data_setup import open_splits
from manyhands.train.objects import Objects
from tests.processes.ranks import run_on_ranks


def _said_all(world, *cases):
    """What opening the data of each case says on this process: of training and test sets, and the job's settings.

    With `machines`, each process reads disks of its own.
    """
    said = []
    for train, test, settings, machines in cases:
        here = replace(world, local_rank=0, local_size=1) if machines else world
        job = load_job({"data.name": "objects", **settings(world.rank)}, environment={}).job
        objects = Objects(train_set=train and train(world.rank), test_set=test and test(world.rank))
        try:
            open_splits(job, here, objects)
            said.append("")
        except UserError as error:
            said.append(error.message)
    return said


def said_of(*cases):
    """What both processes say of each case."""
    first, second = run_on_ranks(_said_all, 2, *cases, start="fork")
    assert first == second
    return first


def folders(one, other):
    """Two machines' folders."""
    return None, None, lambda rank: {"data.name": str(other if rank else one)}, True


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
    for old, new in (("04", "0"), ("05", "04"), ("0", "05")):
        (root / f"dog/{old}.bmp").rename(root / f"dog/{new}.bmp")


SPLITS = "rank 1 has different splits and kinds of data than rank 0"


def test_folders_of_two_machines(tmp_path):
    """In memory, and in files: the same, with a change, without the test split; and one of each."""
    cases = []
    for size in (8, 80):
        make_folder(one := tmp_path / f"{size}", size)
        for change in (nothing, renamed, swapped):
            change(other := shutil.copytree(one, tmp_path / f"{size} {change.__name__}"))
            cases.append(folders(one, other))
        for word in ("train", "val", "test"):
            make_folder(tmp_path / f"splits {size}" / word, size)
        less = shutil.copytree(tmp_path / f"splits {size}", tmp_path / f"less {size}")
        shutil.rmtree(less / "test")
        cases.append(folders(tmp_path / f"splits {size}", less))
    *said, mixed = said_of(*cases, folders(tmp_path / "8", tmp_path / "80"))
    assert mixed == SPLITS
    for same, renames, swaps, splits in (said[:4], said[4:]):
        assert all("pictures" in text for text in (renames, swaps))
        assert (same, splits) == ("", SPLITS)


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


SETS = [
    (_tensors, ""),
    (lambda rank: _tensors(rank, x=1), "rank 1 has different training samples than rank 0"),
    (lambda rank: _tensors(rank, y=-1), "rank 1 has different training data than rank 0"),
    (Own, ""),
    (lambda rank: Own(rank, own_generator=True), ""),
    (lambda rank: Own(rank, x=1), "rank 1 has different training samples than rank 0"),
    (lambda rank: Own(rank, label=1), "rank 1 has different training samples than rank 0"),
    (lambda rank: Own(rank, label=1, named=False), "rank 1 has different training data than rank 0"),
]


def test_custom_data_sets():
    both = (False, True)
    cases = [(train, lambda rank: _tensors(0), lambda rank: {}, machines) for machines in both for train, _ in SETS]
    assert said_of(*cases) == [said for _, said in SETS] * 2

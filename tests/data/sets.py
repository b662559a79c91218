"""Data sets on the disk: folders of pictures, and files in MNIST's format."""

import gzip
import struct

import numpy
import torch
from PIL import Image

from manyhands.data.open import open_data
from manyhands.data.options import DataOptions


def picture(path, size=(8, 8), mode="RGB", seed=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = numpy.random.default_rng(abs(hash(path.name)) if seed is None else seed)
    Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)).convert(mode).save(path)


def make(root, classes=("cat", "dog"), count=10, **options):
    for label, name in enumerate(classes):
        for number in range(count):
            picture(root / name / f"{number:02}.png", seed=label * 1000 + number, **options)
    return root


def opened(root, **options):
    return open_data(DataOptions(name=str(root), **options))


def write_idx(path, values):
    """Writes uint8 values of any shape as an IDX file; compressed if the name ends in .gz."""
    content = (
        struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.contiguous().numpy().tobytes()
    )
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def write_mnist(folder, counts=(20, 10), labels=None, suffix=".gz"):
    """Writes MNIST's four files; labels count from 0 to 9 again and again, if none are given."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in zip(("train", "t10k"), counts, strict=True):
        values = torch.arange(count) % 10 if labels is None else torch.tensor(labels)
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", torch.zeros(count, 28, 28, dtype=torch.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", values.to(torch.uint8))
    return folder

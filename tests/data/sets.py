"""Data sets on the disk: folders of pictures, and files in MNIST's format."""

import gzip
import struct

import numpy
from PIL import Image

from manyhands.data.open import open_data
from manyhands.data.options import DataOptions


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


def write_idx(path, values):
    """Writes uint8 values of any shape as an IDX file; compressed if the name ends in .gz."""
    content = (
        struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.contiguous().numpy().tobytes()
    )
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)

"""Data sets of every kind that is read from outside, and the function that reads each."""

import gzip
import io
import json
import lzma
import os
import pickle
import random
import tarfile
from pathlib import Path

import numpy
import torch
from PIL import Image

from bench.fuzz_mutations import spoil_tree
from manyhands.data.datasets import published
from manyhands.data.decode import probe
from manyhands.data.folder import divided, list_parts
from manyhands.data.options import DataOptions
from manyhands.data.pack_choice import of_pack, place_of_pack, with_pack
from manyhands.data.packed import HEAD, SAMPLES, STATE, columns_digest, digest_of, read_columns, write_columns
from manyhands.data.packing import PackRequest, make_pack, read_contents
from manyhands.data.pictures import read_picture
from manyhands.data.random import SampleDraws
from manyhands.data.records import read_mnist_split, write_idx
from manyhands.data.transforms import Pixels


def write_idx_pair(folder: Path, _rng: random.Random) -> None:
    write_idx(folder / "images", torch.zeros(5, 7, 7, dtype=torch.uint8))
    write_idx(folder / "labels", torch.arange(5, dtype=torch.uint8))


def pack_idx(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        for name in ("images", "labels"):
            (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes(), 1))


def read_idx(folder: Path) -> None:
    end = ".gz" if (folder / "images.gz").exists() else ""
    read_mnist_split(folder / f"images{end}", folder / f"labels{end}", 10)


def write_cifar(folder: Path, rng: random.Random) -> None:
    """Both forms of CIFAR-10, in little, as a folder or packed."""
    there = folder / "cifar10" / "cifar-10-batches-bin"
    if rng.random() < 0.5:
        record = b"\x03" + bytes(3 * 32 * 32)
        there.mkdir(parents=True)
        for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
            (there / name).write_bytes(record * 2)
        (there / "batches.meta.txt").write_text("a\nb\n")
        return
    there = there.with_name("cifar-10-batches-py")
    there.mkdir(parents=True)
    batch = {b"data": numpy.zeros((2, 3072), numpy.uint8), b"labels": [1, 2]}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (there / name).write_bytes(pickle.dumps(batch, protocol=2))
    (there / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"a"] * 10}, protocol=2))


def pack_cifar(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.4:
        (there,) = (folder / "cifar10").iterdir()
        name = "cifar-10-binary.tar.gz" if there.name.endswith("bin") else "cifar-10-python.tar.gz"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for file in there.iterdir():
                archive.add(file, f"{there.name}/{file.name}")
        for file in (*there.iterdir(), there):
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        content = bytearray(packed.getvalue())
        if rng.random() < 0.5:
            content[rng.randrange(min(2_000, len(content)))] = rng.randrange(256)
        (folder / "cifar10" / name).write_bytes(gzip.compress(bytes(content), 1))


def read_cifar(folder: Path) -> None:
    published.open("cifar10", DataOptions(name="cifar10", dir=str(folder), download=False))


def write_packed(folder: Path, _rng: random.Random) -> None:
    """A folder of two pictures and its packed copy."""
    for number, name in enumerate(("cat", "dog")):
        path = folder / "pets" / name / f"{number}.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (9, 7)).save(path)
    root = folder / "pets"
    make_pack(
        read_contents(root),
        PackRequest(root, place_of_pack(root)),
        processes=1,
        replace=False,
        progress=lambda *_: None,
    )


def seal_packed(folder: Path, rng: random.Random) -> None:
    """Gives a packed copy another value now and then, columns that fit it, and the digests of both."""
    place = place_of_pack(folder / "pets")
    content = json.loads((place / HEAD).read_bytes())["set"]
    if rng.random() < 0.6:
        content = spoil_tree(content, rng)
    else:
        file = place / rng.choice((SAMPLES, STATE))
        columns = read_columns(file)
        name = rng.choice(sorted(columns))
        values = (
            columns[name][:-1],
            columns[name].astype(numpy.float64),
            columns[name].astype(numpy.int64) + 2**40,
            None,
        )
        columns[name] = rng.choice(values)
        with file.open("wb") as stream:
            write_columns(stream, {key: value for key, value in columns.items() if value is not None})
        content["samples_sha256"] = columns_digest(read_columns(place / SAMPLES))
    (place / HEAD).write_text(json.dumps({"digest": digest_of(content), "set": content}))


def read_packed(folder: Path) -> None:
    for listings, _ in (
        of_pack(place_of_pack(folder / "pets")),
        with_pack(folder / "pets", list_parts(folder / "pets"), DataOptions(name=str(folder / "pets"))),
    ):
        for listing in listings:
            for index in range(len(listing)):
                probe(listing.path(index), listing.packed.content(index) if listing.packed else None)


def write_archive(folder: Path, _rng: random.Random) -> None:
    with tarfile.open(folder / "pictures.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("train/a/1.png", "train/b/2.png", "test/a/3.png"):
            entry = tarfile.TarInfo(name)
            entry.size = 100
            archive.addfile(entry, io.BytesIO(bytes(100)))


def pack_archive(folder: Path, rng: random.Random) -> None:
    kind = rng.choice(("xz", "gz", ""))
    content = (folder / "pictures.tar").read_bytes()
    packed = {"xz": lzma.compress(content, preset=0), "gz": gzip.compress(content, 1), "": content}[kind]
    (folder / "pictures.tar").write_bytes(packed)


def read_archive(folder: Path) -> None:
    os.environ["MANYHANDS_CACHE"] = str(folder / "cache")
    published.unpack_once(folder / "pictures.tar")


KINDS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".gif": "GIF",
    ".bmp": "BMP",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".ppm": "PPM",
    ".jp2": "JPEG2000",
}


def write_pictures(folder: Path, rng: random.Random) -> None:
    for number, name in enumerate(("cat", "dog", "cat")):
        suffix = rng.choice(list(KINDS))
        mode = rng.choice(("RGB", "L"))
        path = folder / name / f"{number}{suffix}"
        path.parent.mkdir(exist_ok=True)
        Image.new(mode, (9, 7 + number)).save(path, KINDS[suffix])


def read_pictures(folder: Path) -> None:
    pixels = Pixels(8, 3, (0.5,) * 3, (0.5,) * 3, "resized-crop-flip")
    for listing in divided(list_parts(folder), 0.3):
        for index in range(len(listing)):
            probe(listing.path(index))
            for draws in (None, SampleDraws(0, index)):
                read_picture(listing.path(index), pixels, draws)

"""A folder's file names, and its packed copy: tar files in WebDataset's format with an index. Imports no torch.

pets.pack/
    pack.json           written last: classes, settings, each shard's digest, the digest of the set
    samples.npz         columns with an entry for each picture: label, shard, offset, length, CRC, name
    folder.npz          sizes and times of the folder's files, to detect changes
    train-000000.tar    000000000.jpg, 000000000.cls, 000000001.jpg …

Rows of samples.npz have the folder's order. Shards hold the pictures in a random order, whose seed is in pack.json.
Each read of a picture verifies its CRC, so that shards needn't be hashed at startup.

Millions of file names form one array, which processes share by memory-mapping a file. Python strings would need four
times the memory, and their reference counts would make each process copy the pages that it reads.
"""

import hashlib
import json
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from manyhands.core.errors import UserError
from manyhands.core.files import open_file, read_object, replaced_on_success
from manyhands.data.decode import read_content

FORMAT = 1
DECODING = 2  # decoding of resized pictures; 1: content only in the alpha channel became black
_WITH_ALPHA = (b".png", b".gif", b".webp", b".tif", b".tiff", b".bmp", b".avif", b".jp2")
HEAD, SAMPLES, STATE = "pack.json", "samples.npz", "folder.npz"
SHARD_NAME = r"[a-z]+-[0-9]{6,}\.tar"
# Columns of samples.npz except the names, and of folder.npz, with the kinds of their NumPy types.
_OF_SAMPLES, _OF_STATE = dict.fromkeys(("label", "shard", "offset", "length", "crc"), "u"), {"bytes": "i", "time": "i"}
_BLOCK = 1 << 12
_OPEN_SHARDS = 256  # mapped at once in each process; a mapping needs a file descriptor

Columns = dict[str, numpy.ndarray]

# Errors of zipfile, zlib and numpy for a damaged .npz.
DAMAGED = (ValueError, EOFError, KeyError, TypeError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class PictureNames:
    """Paths of pictures in a folder or its packed copy. Equal if the paths relative to the folder are equal."""

    names: numpy.ndarray  # bytes [n]
    root: str = ""  # the prefix of each path
    packed: "PackedRows | None" = None  # copies to read instead of the files

    @classmethod
    def from_strings(cls, names: Iterable[str]) -> "PictureNames":
        return cls(numpy.array([name.encode(errors="surrogateescape") for name in names], numpy.bytes_))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> str:
        return os.path.join(self.root, self.names[place].decode(errors="surrogateescape"))  # noqa: PTH118 - a million

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return numpy.array_equal(self.names, other.names) if isinstance(other, PictureNames) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def read(self, place: int) -> bytes:
        """Returns a picture's bytes, from the packed copy if there is one. Raises UserError if they can't be read."""
        return self.packed.pack.content(int(self.packed.rows[place])) if self.packed else read_content(self[place])

    def file_states(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the sizes and the modification times (ns) of the files, int64 [n], with -1 for unreadable files."""

        def state(path: str) -> tuple[int, int]:
            try:
                found = os.stat(path)  # noqa: PTH116 - a million of these
            except OSError:
                return -1, -1
            return found.st_size, found.st_mtime_ns

        found = numpy.fromiter(map(state, self), numpy.dtype((numpy.int64, 2)))
        return found[:, 0], found[:, 1]

    def take(self, chosen: slice | Sequence[int] | numpy.ndarray) -> "PictureNames":
        rows = chosen if isinstance(chosen, slice) else numpy.asarray(chosen, numpy.int64)
        packed = PackedRows(self.packed.pack, self.packed.rows[rows]) if self.packed else None
        return PictureNames(self.names[rows], self.root, packed)

    def blocks(self) -> Iterator[bytes]:
        """Yields blocks of some thousand names, as bytes with a zero byte after each name."""
        for first in range(0, len(self), _BLOCK):
            yield b"".join(name + b"\0" for name in self.names[first : first + _BLOCK].tolist())


class PackedSplit(NamedTuple):
    """The consecutive rows of a pack with the pictures of one split, such as train/."""

    word: Annotated[str, Field(pattern="^[a-z]*$")]  # the split's name; empty: the folder has no splits
    start: NonNegativeInt
    stop: NonNegativeInt


class ShardEntry(NamedTuple):
    """The entry of one tar file in pack.json."""

    name: Annotated[str, Field(pattern=f"^{SHARD_NAME}$")]
    samples: NonNegativeInt
    size_bytes: NonNegativeInt
    sha256: str


class PackedSet(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """An open pack: the content of pack.json, and the columns of both .npz files."""

    folder: Path
    classes: tuple[str, ...]
    groups: tuple[PackedSplit, ...]
    shards: tuple[ShardEntry, ...]
    size: NonNegativeInt  # limit of the shorter side; 0: pictures are unchanged
    quality: NonNegativeInt  # of resized JPEGs; 0: pictures are unchanged
    decoding: NonNegativeInt = 1
    samples_sha256: str
    digest: str  # of the content, not of the time and place of packing
    columns: Columns  # label, shard, offset, length, crc; bytes and time of the folder's files
    names: PictureNames  # paths below the group's folder

    def is_consistent(self) -> bool:
        count, bounds = len(self.names), [0, *(group.stop for group in self.groups)]
        return (
            all(name in self.columns and self.columns[name].shape == (count,) and self.columns[name].dtype.kind == kind
                for name, kind in (_OF_SAMPLES | _OF_STATE).items())
            and [group.start for group in self.groups] == bounds[:-1]
            and sorted({*bounds, count}) == bounds
            and int(self.columns["label"].max()) < len(self.classes)
            and int(self.columns["shard"].max()) < len(self.shards)
        )  # fmt: skip

    def content(self, row: int) -> bytes:
        """Returns the bytes of a picture's file. Raises UserError if the shard was altered."""
        shard, offset, length, crc = (int(self.columns[name][row]) for name in ("shard", "offset", "length", "crc"))
        entry = self.shards[shard]
        path = self.folder / entry.name
        try:
            content = _map_shard(str(path), entry.size_bytes)[offset : offset + length]
        except (OSError, ValueError) as error:
            raise altered_error(path, str(error)) from error
        if zlib.crc32(content) != crc:
            raise altered_error(path, f"the checksum of the picture {self.names[row]} doesn't match")
        return content

    @property
    def outdated_reason(self) -> str:
        """The reason why a folder should be packed again even if it hasn't changed, or ""."""
        if not self.size or self.decoding >= DECODING:
            return ""
        blocks = (block.lower() for block in self.names.blocks())
        affected = any(suffix + b"\0" in block for block in blocks for suffix in _WITH_ALPHA)
        return "pictures with content only in the alpha channel are black in the copy" if affected else ""

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def resizing(self) -> str:
        return f"shorter side {self.size}, quality {self.quality}" if self.size else ""


class PackedRows(NamedTuple):
    """Selected pictures of a pack, in any order."""

    pack: PackedSet
    rows: numpy.ndarray  # int64 [n]


def altered_error(path: Path, reason: str) -> UserError:
    again = "pack the folder again: manyhands pack FOLDER --replace"
    hints = (again, "or remove the packed copy to train from the folder itself")
    return UserError(f"the packed copy was altered: {reason}", str(path), hints)


@lru_cache(maxsize=_OPEN_SHARDS)
def _map_shard(path: str, size_bytes: int) -> mmap.mmap:
    with open_file(Path(path)) as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(view) != size_bytes:
        raise ValueError(f"{len(view):,} bytes found, expected {size_bytes:,}")
    return view


def is_pack(folder: Path) -> bool:
    return (folder / HEAD).is_file()


def open_pack(folder: Path) -> PackedSet:
    """Reads the index of a pack. Raises UserError if the index was altered or its version is unknown."""
    head = read_object(folder / HEAD)
    content = head.get("set") if head else None
    if head is None or not isinstance(content, dict) or head.get("digest") != digest_of(content):
        raise altered_error(folder / HEAD, "the index is incomplete")
    if content.get("format") != FORMAT:
        hints = ("use the version of manyhands that packed the folder, or pack the folder again: --replace",)
        raise UserError(f"format {content.get('format')} of the packed copy is not supported", str(folder), hints)
    read: list[Columns] = []
    for name in (SAMPLES, STATE):
        try:
            read.append(read_columns(folder / name))
        except (OSError, ValueError) as error:
            raise altered_error(folder / name, str(error)) from error
    samples, state = read
    if columns_digest(samples) != content.get("samples_sha256"):
        raise altered_error(folder / SAMPLES, "the checksum of the file doesn't match")
    columns = samples | {name: state[name] for name in _OF_STATE if name in state}
    try:
        names = PictureNames(numpy.array(bytes(columns.pop("names", numpy.zeros(0))).split(b"\0")))
        opened = {"folder": folder, "digest": head["digest"], "columns": columns, "names": names}
        pack = PackedSet.model_validate(content | opened)
    except (ValidationError, MemoryError) as error:
        raise altered_error(folder / HEAD, "the index is incomplete") from error
    if not pack.is_consistent():
        raise altered_error(folder, f"{HEAD}, {SAMPLES} and {STATE} don't match each other")
    return pack


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def columns_digest(columns: Columns) -> str:
    """Returns the SHA-256 of the values, because that of the .npz file depends on the time of writing."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(f"{name} {columns[name].dtype.str} {columns[name].shape}".encode())
        digest.update(columns[name].tobytes())
    return digest.hexdigest()


def read_columns(path: Path) -> Columns:
    """Reads a .npz file as {column: array}. Raises OSError or ValueError if the file can't be read."""
    try:
        with open_file(path) as file:
            found = numpy.load(file, allow_pickle=False)
            if isinstance(found, numpy.ndarray):
                raise ValueError("the file holds a single array, not an .npz archive")
            with found:
                return {name: found[name] for name in found.files}
    except DAMAGED as error:
        raise ValueError(str(error)) from error


def write_columns(path: Path, columns: Columns) -> None:
    arrays: dict[str, Any] = dict(columns)
    with replaced_on_success(path) as part, part.open("wb") as file:
        numpy.savez(file, **arrays)


def altered_shards(pack: PackedSet) -> list[str]:
    """Hashes all shards. Returns the names of the shards that differ from the index."""
    bad: list[str] = []
    for entry in pack.shards:
        digest = ""
        with suppress(OSError), (pack.folder / entry.name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        bad += [entry.name] if digest != entry.sha256 else []
    return bad

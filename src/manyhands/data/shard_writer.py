"""Writes one shard of a packed copy; runs in processes of its own. No torch."""

import hashlib
import io
import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy
from PIL import Image

from manyhands.core.errors import UserError
from manyhands.core.files import replacing
from manyhands.data.decode import CorruptImageError, decode, is_grey, is_readable
from manyhands.data.packed import Columns, read_columns, write_columns

_TAR_BLOCK = 512


@dataclass(frozen=True)
class PictureFile:
    """A picture that is to be packed."""

    row: int
    path: str
    label: int
    size_bytes: int
    time_ns: int


@dataclass(frozen=True)
class ShardTask:
    """What one shard is to hold."""

    target: Path
    first: int  # the number of its first picture among all of its group
    members: tuple[PictureFile, ...]
    size: int  # the shorter side at most; 0: pictures as they are
    quality: int

    @property
    def report_file(self) -> Path:
        """What was written, for who puts the index together; there once the shard is whole."""
        return self.target.with_name(f".{self.target.name}.npz")


def write_shard(task: ShardTask) -> int:
    """Writes the shard, then what is in it; returns its bytes. Raises UserError: a picture changed, or the disk."""
    try:
        with replacing(task.target) as part:
            columns, size_bytes, digest = _write(task, part)
        with replacing(task.report_file) as part, part.open("wb") as file:
            write_columns(file, columns | {"sha256": numpy.array(digest), "bytes": numpy.array(size_bytes)})
    except OSError as error:
        what = f"{task.target.name} can't be written: {error.strerror or error}"
        hints = ("free disk space and run the same command again", "or choose another folder: --to")
        raise UserError(what, str(task.target), hints) from error
    return size_bytes


def _write(task: ShardTask, part: Path) -> tuple[Columns, int, str]:
    digest = hashlib.sha256()
    rows: list[tuple[int, int, int, int, bool]] = []
    with part.open("wb") as file:

        def put(content: bytes) -> int:
            start = file.tell()
            digest.update(content)
            file.write(content)
            return start

        def add(name: str, content: bytes) -> int:
            info = tarfile.TarInfo(name)  # of no time and no user, so that equal pictures make equal shards
            info.size, info.mode = len(content), 0o644
            put(info.tobuf(tarfile.USTAR_FORMAT))
            return put(content + bytes(-len(content) % _TAR_BLOCK))

        for number, member in enumerate(task.members, task.first):
            suffix, content, readable = packed_picture(member, task.size, task.quality)
            start = add(f"{number:09}.{suffix}", content)
            add(f"{number:09}.cls", str(member.label).encode())
            rows.append((member.row, start, len(content), zlib.crc32(content), not readable))
        put(bytes(2 * _TAR_BLOCK))
        file.flush()
        os.fsync(file.fileno())
        size_bytes = file.tell()
    values = (numpy.array(values, numpy.int64) for values in zip(*rows, strict=True))
    columns: Columns = dict(zip(("row", "offset", "length", "crc", "bad"), values, strict=True))
    return columns, size_bytes, digest.hexdigest()


def packed_picture(member: PictureFile, size: int, quality: int) -> tuple[str, bytes, bool]:
    """The kind of file and its bytes, as they go into a pack; False where they are no picture that can be read."""
    content = _read(member)
    suffix = Path(member.path).suffix.lower()[1:]
    if not size:
        return suffix, content, is_readable(member.path, content)
    try:
        image = decode(member.path, 3, content)
    except CorruptImageError:
        return suffix, content, False  # is refused, or left out, where the folder's own would be
    shorter = min(image.size)
    if shorter <= size:
        return suffix, content, True
    if is_grey(Image.open(io.BytesIO(content))):
        image = image.convert("L")
    wide, high = (round(side * size / shorter) for side in image.size)
    made = io.BytesIO()
    smaller = image.resize((wide, high), Image.Resampling.BILINEAR)
    smaller.save(made, "JPEG", quality=quality)
    return "jpg", made.getvalue(), True


def _read(member: PictureFile) -> bytes:
    try:
        with open(member.path, "rb") as file:  # noqa: PTH123 - a million of these
            state = os.fstat(file.fileno())
            content = file.read(member.size_bytes + 1)
    except OSError as error:
        hints = ("repair or remove the file, then run the same command again",)
        raise UserError(f"a picture can't be read: {error.strerror or error}", member.path, hints) from error
    if (len(content), state.st_mtime_ns) != (member.size_bytes, member.time_ns):
        raise UserError("a picture changed while it was packed", member.path, ("run the same command again",))
    return content


def written(task: ShardTask) -> Columns | None:
    """What a shard holds that was written before, or None where it isn't whole."""
    try:
        columns = read_columns(task.report_file)
        whole = task.target.stat().st_size == int(columns["bytes"])
        return columns if whole and len(columns["row"]) == len(columns["bad"]) == len(task.members) else None
    except (OSError, ValueError, KeyError):
        return None

"""Makes the packed copy of a folder in several processes. Can resume after an interruption. Imports no torch."""

import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
from PIL import Image

from manyhands.core.errors import RunError, UserError
from manyhands.core.files import locked, read_object, replaced_on_success, write_atomic
from manyhands.core.seeds import derive_seed, mix
from manyhands.data import packed
from manyhands.data.child import set_up_worker
from manyhands.data.decode import CorruptImageError, decode, is_grey, is_readable
from manyhands.data.folder import Listing, describe_pack_difference, list_splits
from manyhands.data.packed import HEAD, SAMPLES, STATE, Columns, columns_digest, digest_of, open_pack, write_columns

_TAR_BLOCK = 512
_NO_SPACE = ("free disk space and run the same command again", "or choose another folder: --to")
_TAR_ADDS = 3 * 512 + 256  # bytes per picture: two headers, the label, and padding
SHARD_BYTES = 40 << 20  # large sets have shards of 30 to 60 MB
_SEED = 0
_BEGUN = "unfinished.json"
_TRIED = 64
_COLUMN_TYPES = {"shard": numpy.uint32, "offset": numpy.uint64, "length": numpy.uint32, "crc": numpy.uint32}


class PictureFile(NamedTuple):
    """A picture file to pack."""

    row: int  # index in the folder's order
    path: str
    label: int  # class index
    size_bytes: int
    time_ns: int


@dataclass(frozen=True)
class PackRequest:
    """The folder, target and settings of a packed copy."""

    root: Path  # the folder of pictures
    target: Path
    size: int = 0  # largest shorter side; 0: unchanged pictures
    quality: int = 0  # of resized JPEGs
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class ShardTask:
    """The content of one shard to write."""

    target: Path
    first: int  # index of the shard's first picture in its group
    members: tuple[PictureFile, ...]
    request: PackRequest

    @property
    def report_file(self) -> Path:
        """The file with the shard's columns for the index. It exists as soon as the shard is complete."""
        return self.target.with_name(f".{self.target.name}.npz")


def write_shard_and_report(task: ShardTask) -> None:
    """Writes a shard, then its report file. Raises UserError if a picture changed, and OSError for a full disk."""
    rows: list[tuple[int, int, int, int, bool]] = []
    with replaced_on_success(task.target) as part, part.open("w+b") as file:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(name)  # without time and user: equal pictures make equal shards
            info.size, info.mode = len(content), 0o644
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % _TAR_BLOCK))

        for number, member in enumerate(task.members, task.first):
            suffix, content, readable = packed_picture(member, task.request)
            start = file.tell() + _TAR_BLOCK
            add(f"{number:09}.{suffix}", content)
            add(f"{number:09}.cls", str(member.label).encode())
            rows.append((member.row, start, len(content), zlib.crc32(content), not readable))
        file.write(bytes(2 * _TAR_BLOCK))
        shard = {"bytes": numpy.array(file.tell())}
        file.seek(0)
        shard["sha256"] = numpy.array(hashlib.file_digest(file, "sha256").hexdigest())
        os.fsync(file.fileno())
    for name, values in zip(("row", "offset", "length", "crc", "bad"), zip(*rows, strict=True), strict=True):
        shard[name] = numpy.array(values, numpy.int64)
    write_columns(task.report_file, shard)


def packed_picture(member: PictureFile, request: PackRequest) -> tuple[str, bytes, bool]:
    """Returns (file suffix, bytes, True if readable) of a picture to pack, resized if the request has a size."""
    content = _read_unchanged(member)
    suffix = Path(member.path).suffix.lower()[1:]
    if not request.size:
        return suffix, content, is_readable(member.path, content)
    try:
        image = decode(member.path, 3, content)
    except CorruptImageError:
        return suffix, content, False  # refused or skipped later, like the original file
    shorter, made = min(image.size), io.BytesIO()
    if shorter <= request.size:
        return suffix, content, True
    if is_grey(Image.open(io.BytesIO(content))):
        image = image.convert("L")
    wide, high = (round(side * request.size / shorter) for side in image.size)
    image.resize((wide, high), Image.Resampling.BILINEAR).save(made, "JPEG", quality=request.quality)
    return "jpg", made.getvalue(), True


def _read_unchanged(member: PictureFile) -> bytes:
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


def read_report(task: ShardTask) -> Columns | None:
    """Reads the report file of a shard that was written earlier. Returns None if the shard is incomplete."""
    try:
        columns = packed.read_columns(task.report_file)
        whole = task.target.stat().st_size == int(columns["bytes"])
        return columns if whole and len(columns["row"]) == len(columns["bad"]) == len(task.members) else None
    except (OSError, ValueError, KeyError):
        return None


@dataclass(frozen=True)
class _Contents:
    """The pictures to pack, in the folder's order."""

    listings: tuple[Listing, ...]
    labels: numpy.ndarray  # int64 [n], like the next two
    sizes: numpy.ndarray
    times: numpy.ndarray

    def path(self, row: int) -> str:
        places = zip(self.listings, self.groups(), strict=True)
        return next(listing.names[row - start] for listing, (_, start, stop) in places if row < stop)

    def groups(self) -> Iterator[tuple[str, int, int]]:
        start = 0
        for listing in self.listings:
            yield listing.word, start, start + len(listing)
            start += len(listing)

    def member(self, row: int) -> PictureFile:
        return PictureFile(row, self.path(row), int(self.labels[row]), int(self.sizes[row]), int(self.times[row]))


def read_contents(root: Path) -> _Contents:
    """Lists a folder's pictures as training does. Raises UserError if the folder or a picture can't be read."""
    listings = list_splits(root)
    states = [listing.names.file_states() for listing in listings]
    sizes, times = (numpy.concatenate([state[column] for state in states]) for column in (0, 1))
    contents = _Contents(listings, numpy.concatenate([listing.labels for listing in listings]), sizes, times)
    if (sizes < 0).any():
        missing = contents.path(int(numpy.argmax(sizes < 0)))
        hints = ("repair or remove the file or link, then run the same command again",)
        raise UserError("a picture can't be read", missing, hints)
    return contents


def is_up_to_date(contents: _Contents, request: PackRequest) -> bool:
    """Returns True if the pack matches the folder, False if there is no pack. Raises UserError if it differs."""
    if not packed.is_pack(request.target):
        return False
    pack = open_pack(request.target)
    if changed := describe_pack_difference(pack, contents.listings):
        what = f"the folder has changed since the packed copy was made: {changed}"
    elif pack.outdated_reason:
        what = f"the packed copy was made by an older version: {pack.outdated_reason}"
    elif (pack.size, pack.quality) != (request.size, request.quality):
        what = f"a packed copy with other settings exists ({pack.resizing or 'unchanged pictures'})"
    else:
        return True
    again = f"replace the packed copy: manyhands pack {shlex.quote(str(request.root))} … --replace"
    raise UserError(what, str(request.target), (again, "or choose another folder: --to"))


def make_pack(
    contents: _Contents, request: PackRequest, *, processes: int, replace: bool, progress: Callable[[int, int], None]
) -> tuple[packed.PackedSet, tuple[str, ...]]:
    """Packs a folder, or resumes packing. Returns (pack, paths of unreadable pictures). Raises ManyhandsError."""
    target = request.target
    try:
        with locked(target / HEAD, ("choose a writable folder: --to",)):
            if not replace and is_up_to_date(contents, request):
                return open_pack(target), ()
            _refuse_foreign_files(target)
            (target / HEAD).unlink(missing_ok=True)
            tasks = _start_or_resume(contents, request)
            missing = [task for task in tasks if read_report(task) is None]
            for done, _ in enumerate(_write_shards(missing, processes), 1 + len(tasks) - len(missing)):
                progress(done, len(tasks))
            bad = _write_index(contents, request, tasks)
    except OSError as error:
        raise UserError(f"the packed copy can't be made: {error.strerror or error}", str(target), _NO_SPACE) from error
    return open_pack(target), bad


def _refuse_foreign_files(target: Path) -> None:
    if (target / SAMPLES).exists() or (target / _BEGUN).exists():
        return
    strange = sorted(path.name for path in target.iterdir() if not (path.name.startswith(".") or _is_pack_file(path)))
    if strange:
        what = f"the folder holds files that don't belong to a pack, such as {strange[0]}"
        raise UserError(what, str(target), ("choose another folder: --to",))


def _is_pack_file(path: Path) -> bool:
    return path.name in {HEAD, SAMPLES, STATE, _BEGUN} or re.fullmatch(packed.SHARD_NAME, path.name) is not None


def _start_or_resume(contents: _Contents, request: PackRequest) -> list[ShardTask]:
    """Returns the tasks of all shards. Deletes shards of an interrupted call that had other files or settings."""
    columns = {"labels": contents.labels, "sizes": contents.sizes, "times": contents.times, "names": _joined(contents)}
    made = {"format": packed.FORMAT, "size": request.size, "quality": request.quality, "shard": request.shard_bytes}
    made |= {"decoding": packed.DECODING} if request.size else {}
    words = [listing.word for listing in contents.listings]
    key = digest_of(made | {"words": words, "files": columns_digest(columns)})
    begun = read_object(request.target / _BEGUN)
    if begun is None or begun.get("key") != key or not isinstance(begun.get("ratio"), float):
        for path in (*filter(_is_pack_file, request.target.glob("*.tar")), *request.target.glob(".*.tar*")):
            path.unlink(missing_ok=True)
        ratio = 1.0
        if request.size:  # resized bytes / file bytes, estimated from some pictures spread over the folder
            tried = [contents.member(row) for row in sorted(_shuffled_rows(len(contents.sizes), "tried")[:_TRIED])]
            sizes = [len(packed_picture(member, request)[1]) for member in tried]
            ratio = sum(sizes) / max(1, sum(member.size_bytes for member in tried))
        begun = {"key": key, "ratio": ratio}
        write_atomic(request.target / _BEGUN, json.dumps(begun))
    for path in request.target.glob(".*.part"):
        path.unlink(missing_ok=True)
    return list(_shard_tasks(contents, request, begun["ratio"]))


def _joined(contents: _Contents) -> numpy.ndarray:
    """Returns all names, separated by zero bytes, as uint8."""
    text = b"".join(block for listing in contents.listings for block in listing.names.blocks())
    return numpy.frombuffer(text[:-1], numpy.uint8)


def _shard_tasks(contents: _Contents, request: PackRequest, ratio: float) -> Iterator[ShardTask]:
    """Shuffles the pictures of each split, divides them into shards of about equal size, and yields a task for each."""
    for word, start, stop in contents.groups():
        order = start + numpy.array(_shuffled_rows(stop - start, word), numpy.int64)
        upto = numpy.cumsum(contents.sizes[order] * ratio + _TAR_ADDS)
        count = min(len(order), max(1, round(float(upto[-1]) / request.shard_bytes)))
        ends = numpy.searchsorted(upto, upto[-1] * numpy.arange(1, count) / count, side="right")
        first = 0
        for number, rows in enumerate(part for part in numpy.split(order, ends) if len(part)):
            target = request.target / f"{word or 'all'}-{number:06}.tar"
            members = tuple(map(contents.member, rows.tolist()))
            yield ShardTask(target, first, members, request)
            first += len(rows)


def _shuffled_rows(count: int, word: str) -> list[int]:
    key = derive_seed(_SEED, "pack", word)
    return sorted(range(count), key=lambda row: mix(key ^ row))


def _write_shards(tasks: Sequence[ShardTask], processes: int) -> Iterator[object]:
    if min(processes, len(tasks)) <= 1:
        yield from map(write_shard_and_report, tasks)
        return
    begin = functools.partial(set_up_worker, 0, parent=os.getpid(), end_with_thread=True)
    pool = ProcessPoolExecutor(min(processes, len(tasks)), multiprocessing.get_context("spawn"), begin)
    try:
        for future in as_completed([pool.submit(write_shard_and_report, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool as error:
        hints = ("free memory or use --processes 1, then run the same command again",)
        raise RunError("a packing process ended unexpectedly", "--processes", hints) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write_index(contents: _Contents, request: PackRequest, tasks: Sequence[ShardTask]) -> tuple[str, ...]:
    """Writes the index, pack.json last, which completes the pack. Returns the paths of unreadable pictures."""
    count, target = len(contents.sizes), request.target
    columns: Columns = {name: numpy.zeros(count, kind) for name, kind in _COLUMN_TYPES.items()}
    columns |= {"label": contents.labels.astype(numpy.uint32), "names": _joined(contents)}
    shards: list[tuple[str, int, int, str]] = []
    bad: list[int] = []
    for number, task in enumerate(tasks):
        shard = read_report(task)
        if shard is None:
            raise UserError(f"{task.target.name} is missing", str(target), ("run the same command again",))
        columns["shard"][shard["row"]] = number
        for name in ("offset", "length", "crc"):
            columns[name][shard["row"]] = shard[name]
        bad += shard["row"][shard["bad"] != 0].tolist()
        shards.append((task.target.name, len(task.members), int(shard["bytes"]), str(shard["sha256"])))
    write_columns(target / SAMPLES, columns)
    write_columns(target / STATE, {"bytes": contents.sizes, "time": contents.times})
    content = {
        "format": packed.FORMAT,
        "classes": contents.listings[0].classes,
        "groups": list(contents.groups()),
        "size": request.size,
        "quality": request.quality,
        "order_seed": _SEED,
        "shards": shards,
        "samples_sha256": columns_digest(columns),
        **({"decoding": packed.DECODING} if request.size else {}),
    }
    head = {"digest": digest_of(content), "set": content}
    write_atomic(target / HEAD, json.dumps(head, ensure_ascii=False, indent=1))
    for path in (target / _BEGUN, *(task.report_file for task in tasks)):
        path.unlink(missing_ok=True)
    return tuple(map(contents.path, sorted(bad)))

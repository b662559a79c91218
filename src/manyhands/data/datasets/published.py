"""Opens or downloads the published files of MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and UCI digits.

The readers are strict: a deviation from the published format raises UserError.
IDX (MNIST): two zero bytes, a type (8: bytes), the number of dimensions, each size in four bytes (big-endian), then the
values. A file that ends in .gz is compressed with gzip.
CIFAR's binary record: one label byte (CIFAR-100: coarse, then fine), then 3,072 bytes: red, green, blue, row by row.
CIFAR's Python batch: a pickle of {"data": uint8 [n, 3072], "labels" or "fine_labels": list}.

Sources: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits"; A. Krizhevsky, "Learning
multiple layers of features from tiny images", 2009.
"""

import gzip
import hashlib
import io
import lzma
import math
import os
import pickle
import shutil
import struct
import tarfile
import time
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.files import locked, open_file
from manyhands.data import digits
from manyhands.data.known import KNOWN, MNIST_KINDS, CifarForm, KnownSet, cifar_files, find_file, mnist_folders
from manyhands.data.options import DataOptions, cache_folder, data_folder
from manyhands.data.splits import ImagesInMemory, Splits, check_labels, describe
from manyhands.data.transforms import Pixels

NAMES = ("cifar10", "cifar100", "mnist", "fashion-mnist", "digits")  # the keys of KNOWN, readable without an import

_HINTS = ("delete the file, then download or copy the file again",)
_IDX_BYTES = 0x08
_MOST_IDX_BYTES = 1 << 32
_BLOCK = 1 << 20
_CIFAR_PIXELS = 3 * 32 * 32
_MOST_CIFAR_BYTES = 1 << 29  # of one file; the largest published one has 150 MB
_MOST_ARCHIVE_BYTES = 1 << 31  # of all files in an archive
# Pictures hardly compress: a file or archive that unpacks to more than both limits is refused.
_MOST_COMPRESSION = 100
_LIKELY_IDX_BYTES, _LIKELY_ARCHIVE_BYTES = 64 << 20, 1 << 30
_MOST_MEMBERS = 400_000


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens the training and test splits. Downloads missing files. Raises UserError if a file is missing or invalid."""
    known = KNOWN[name]
    if known.forms:
        return _open_cifar(name, known, options)
    if name == "digits":
        parts, places, text = ("train", "test"), [Path(digits.__path__[0])], "UCI, in the package"
    else:
        folder = data_folder(options)
        parts, places, text = ("train", "t10k"), mnist_folders(folder, name), str(folder)
    splits = []
    for part in parts:
        files = [find_file(f"{part}-{kind}", places) or _fetch(name, f"{part}-{kind}", options) for kind in MNIST_KINDS]
        splits.append(read_mnist_split(files[0], files[1], len(known.classes)))
    train, test = splits
    return Splits(train, test, known.classes, describe(known.title, train, test, text), Pixels(*known.pixels))


def _open_cifar(name: str, known: KnownSet, options: DataOptions) -> Splits:
    found = cifar_files(data_folder(options), name)
    if found is None:
        folder = data_folder(options) / name
        archives = sorted(folder.glob("*.tar.xz")) if folder.is_dir() else []
        if (folder / "train").is_dir() or len(archives) == 1:  # class folders, or an archive of them
            from manyhands.data.gallery import open_folder

            pictures = folder if (folder / "train").is_dir() else unpack_once(archives[0])
            return open_folder(pictures, options, known.title, Pixels(*known.pixels))
        found = known.forms[0], _fetch(name, known.forms[0].archive, options)
    form, place = found
    files = read_cifar_files(place, form)
    train = read_cifar_split(files, form.train, form, len(known.classes))
    test = read_cifar_split(files, (form.test,), form, len(known.classes))
    names = read_cifar_names(files[form.names], form) if form.names in files else ()
    if len(names) != len(known.classes):
        names = known.classes
    return Splits(train, test, names, describe(known.title, train, test, str(place)), Pixels(*known.pixels))


def _fetch(name: str, file: str, options: DataOptions) -> Path:
    folder = data_folder(options) / name
    if not options.download:
        hints = (f"put {file} into {folder}", "or allow the download: --data.download")
        raise UserError(f"{folder} has no {file}", str(folder), hints)
    urls = tuple(url + file for url in KNOWN[name].urls)
    return fetch(f"{name}/{file}", urls, dict(KNOWN[name].md5)[file], folder / file)


def fetch(name: str, urls: tuple[str, ...], md5: str, into: Path) -> Path:
    """Downloads `name`, such as "mnist/train-images-idx3-ubyte.gz", to the path `into`, unless that file exists.

    One process per host downloads. If it fails, waiting processes report its errors instead of trying again. Tries
    `urls` in order, or only the server that MANYHANDS_MIRROR names. Raises UserError if every download failed.
    """
    from manyhands.core.download import Digest, download, without_password

    began = time.time()
    mirror = os.environ.get("MANYHANDS_MIRROR", "")
    tried: list[str] = []
    failure = into.with_name(f".{into.name}.failed")
    with locked(into):
        if into.is_file():
            return into
        if failure.is_file() and failure.stat().st_mtime >= began:
            tried = failure.read_text(encoding="utf-8").splitlines()
        else:
            for url in (f"{mirror.rstrip('/')}/{name}",) if mirror else urls:
                problem = download(url, into, Digest("md5", md5))
                if not problem:
                    failure.unlink(missing_ok=True)
                    return into
                tried.append(f"{without_password(url)}: {problem}")
            failure.write_text("\n".join(tried), encoding="utf-8")
    hints = (
        *(f"tried {line}" for line in tried),
        f"download {into.name} by hand into {into.parent}",
        f"or give the folder that holds {name.partition('/')[0]}/: --data-dir DIR, or MANYHANDS_DATA=DIR",
    )
    raise UserError(f"{name} can't be downloaded", str(into), hints)


def unpack_once(archive: Path) -> Path:
    """Unpacks an archive to this host's cache, once. Returns the folder. Raises UserError if the archive is damaged."""
    try:
        state = archive.stat()
    except OSError as error:
        raise UserError(f"{archive.name} can't be read: {error.strerror}", str(archive), ("copy it again",)) from error
    key = hashlib.sha256(f"{archive.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:32]
    target = cache_folder() / "unpacked" / key
    with locked(target):
        if not target.is_dir():
            part = target.with_name(f"{key}.part")
            shutil.rmtree(part, ignore_errors=True)  # remains of a process that died: this one holds the lock
            try:
                with open_file(archive) as stored, tarfile.open(fileobj=stored) as file:
                    _extract(file, part, stored)
                part.replace(target)
            except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError, MemoryError) as error:
                shutil.rmtree(part, ignore_errors=True)
                reason = str(error) or "unpacking needs more memory than is available"
                hints = ("copy the archive again, or unpack the archive by hand in its folder",)
                raise UserError(f"{archive.name} can't be unpacked: {reason}", str(archive), hints) from error
    return target


def _extract(file: tarfile.TarFile, folder: Path, compressed: IO[bytes]) -> None:
    """Extracts regular files and folders. Raises TarError if the archive has other entries or is too large."""
    most_bytes = max(_LIKELY_ARCHIVE_BYTES, os.fstat(compressed.fileno()).st_size * _MOST_COMPRESSION)
    members: list[tarfile.TarInfo] = []
    total = 0
    for member in file:
        members.append(member)
        total += member.size + tarfile.BLOCKSIZE
        if total > most_bytes or len(members) > _MOST_MEMBERS:
            raise tarfile.TarError(f"the content exceeds {most_bytes >> 20:,} MiB or {_MOST_MEMBERS:,} files")
        inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
        if not inside or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is not a regular file inside the archive")
        member.mode = 0o755 if member.isdir() else 0o644
    file.extraction_filter = lambda member, _: member  # named filters need Python 3.11.4; without any, newer ones warn
    file.extractall(folder, members)


def _refuse_file(what: str, place: Path | str) -> NoReturn:
    raise UserError(what, str(place), _HINTS)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads an IDX file, plain or .gz, as uint8: [N, H, W] if `dimensions` is 3, [N] if it is 1."""
    try:
        with open_file(path) as stored, gzip.open(stored) if path.suffix == ".gz" else stored as file:
            shape = _read_idx_shape(file, path, dimensions)
            expected, content = math.prod(shape), bytearray()
            # In blocks: needs memory for the file's actual content, whatever its header claims.
            while len(content) <= expected and (block := file.read(min(_BLOCK, expected + 1 - len(content)))):
                content += block
    except (EOFError, OSError, ValueError, zlib.error) as error:
        what = f"{path.name} can't be read: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, str(path), _HINTS) from error
    if len(content) != expected:
        found = "more" if len(content) > expected else f"{len(content):,}"
        _refuse_file(f"{path.name}: expected {expected:,} values ({_shape_text(shape)}), found {found}", path)
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _read_idx_shape(file: IO[bytes] | gzip.GzipFile, path: Path, dimensions: int) -> tuple[int, ...]:
    length = 4 + 4 * dimensions
    header = file.read(length)
    expected = struct.pack(">HBB", 0, _IDX_BYTES, dimensions)
    if header[:4] != expected:
        found = header[:4].hex(" ")
        _refuse_file(f"{path.name}: expected an IDX file (first bytes {expected.hex(' ')}), found {found}", path)
    if len(header) < length:
        _refuse_file(f"{path.name}: expected a header of {length} bytes, found {len(header)}", path)
    shape = struct.unpack(f">{dimensions}I", header[4:])
    values, stored = math.prod(shape), path.stat().st_size
    if not 0 < values <= _MOST_IDX_BYTES:
        what = f"{path.name}: expected 1 to {_MOST_IDX_BYTES:,} values, found {_shape_text(shape)} in the header"
        raise UserError(what, str(path))
    if path.suffix == ".gz" and values > max(_LIKELY_IDX_BYTES, stored * _MOST_COMPRESSION):
        _refuse_file(f"{path.name}: the header says {values:,} values, too many for {stored:,} compressed bytes", path)
    return shape


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def read_mnist_split(images: Path, labels: Path, classes: int) -> ImagesInMemory:
    pictures, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(numbers):
        counts = f"{len(pictures):,} pictures and {labels.name} {len(numbers):,} labels"
        _refuse_file(f"{images.name} holds {counts}", images.parent)
    return ImagesInMemory(pictures.unsqueeze(1), check_labels(numbers, classes, str(labels)))


def read_cifar_files(place: Path, form: CifarForm) -> dict[str, bytes]:
    """Returns {file name: content} of the files of a CIFAR format in a folder or tar archive."""
    needed = (*form.train, form.test)
    names = (*needed, form.names)
    found: dict[str, bytes] = {}
    try:
        if place.is_dir():
            for name in names:
                if name and (place / name).exists():
                    with open_file(place / name) as file:
                        _refuse_large_file(name, os.fstat(file.fileno()).st_size, place)
                        found[name] = file.read()
        else:
            with open_file(place) as stored, tarfile.open(fileobj=stored) as archive:
                for member in archive:
                    _refuse_large_file(place.name, member.offset_data + member.size, place, _MOST_ARCHIVE_BYTES)
                    name = PurePosixPath(member.name).name
                    content = archive.extractfile(member) if member.isfile() and name in names else None
                    if content is not None:
                        _refuse_large_file(name, member.size, place)
                        found[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{place.name} can't be read: {error}", str(place), _HINTS) from error
    if missing := [name for name in needed if name not in found]:
        _refuse_file(f"{place.name} has no {', '.join(missing)}", place)
    return found


def _refuse_large_file(name: str, size: int, place: Path, most: int = _MOST_CIFAR_BYTES) -> None:
    if size > most:
        _refuse_file(f"{name} has {size:,} bytes, expected at most {most:,}", place)


def read_cifar_split(files: dict[str, bytes], names: tuple[str, ...], form: CifarForm, classes: int) -> ImagesInMemory:
    read = _read_records if form.label_bytes else _read_batch
    parts = [read(files[name], name, form) for name in names]
    labels = [check_labels(labels, classes, name) for name, (_, labels) in zip(names, parts, strict=True)]
    return ImagesInMemory(torch.cat([images for images, _ in parts]).view(-1, 3, 32, 32), torch.cat(labels))


def read_cifar_names(content: bytes, form: CifarForm) -> tuple[str, ...]:
    """Parses class names: one in each line (binary format), or a list in a pickle (Python format)."""
    if form.label_bytes:
        return tuple(content.decode("utf-8", "replace").split())
    names = _get_field(_read_pickle(content, form.names), form.key.removesuffix("s") + "_names", form.names)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        _refuse_file(f"{form.names}: expected a list of class names, found {type(names).__name__}", form.names)
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)


def _read_records(content: bytes, file: str, form: CifarForm) -> tuple[Tensor, Tensor]:
    length = form.label_bytes + _CIFAR_PIXELS
    if not content or len(content) % length:
        found = f"{len(content):,} bytes ({len(content) / length:,.3f} records)"
        _refuse_file(f"{file}: expected whole records of {length:,} bytes, found {found}", file)
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, length)
    return records[:, form.label_bytes :], records[:, form.label_bytes - 1]


def _read_batch(content: bytes, file: str, form: CifarForm) -> tuple[Tensor, Tensor]:
    batch = _read_pickle(content, file)
    data, labels = _get_field(batch, "data", file), _get_field(batch, form.key, file)
    try:
        _, shape, kind, by_columns, stored = data.state
        if kind.arguments[0] not in ("u1", b"u1") or by_columns or not isinstance(stored, bytes):
            raise ValueError("the array is not uint8 in C order")
        images = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(*shape)
        if images.ndim != 2 or images.shape[1] != _CIFAR_PIXELS:
            raise ValueError(f"the array is not [n, {_CIFAR_PIXELS:,}]")
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        what = f'{file}: expected "data" to be bytes [n, {_CIFAR_PIXELS:,}], row by row'
        raise UserError(what, file, _HINTS) from error
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 1 << 31 for label in labels):
        _refuse_file(f'{file}: expected "{form.key}" to be a list of whole numbers', file)
    if len(labels) != len(images):
        _refuse_file(f"{file}: {len(images):,} pictures, but {len(labels):,} labels", file)
    return images, torch.tensor(labels)


def _get_field(content: Any, key: str, file: str) -> Any:
    for word in (key, key.encode()):
        if isinstance(content, dict) and word in content:
            return content[word]
    _refuse_file(f'{file} has no "{key}"', file)


class _Inert:
    """Stands in for NumPy arrays and dtypes while unpickling, because NumPy crashes on some damaged pickles."""

    def __init__(self, *arguments: object) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: str, encoding: str) -> bytes:
    """Replaces _codecs.encode, which pickles of bytes call if Python 3 wrote them with protocol 0, 1 or 2."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Inert,
    ("numpy._core.multiarray", "_reconstruct"): _Inert,
    ("numpy", "ndarray"): _Inert,
    ("numpy", "dtype"): _Inert,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that imports nothing, because the few allowed names map to harmless replacements."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]


def _read_pickle(content: bytes, file: str) -> Any:
    """Reads a pickle of plain data and byte arrays. Strings that Python 2 wrote become bytes."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        raise UserError(f"{file} is not a pickle of plain data: {error}", file, _HINTS) from error

"""Opens or downloads the published files of MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and the digits."""

import hashlib
import lzma
import os
import shutil
import tarfile
import time
import zlib
from pathlib import Path
from typing import IO

from manyhands.core.errors import UserError
from manyhands.core.files import one_at_a_time, open_file
from manyhands.data import digits
from manyhands.data.known import KNOWN, MNIST_KINDS, KnownSet, cifar_files, find_file, mnist_places
from manyhands.data.options import DataOptions, cache_folder, data_folder
from manyhands.data.records import read_cifar_files, read_cifar_names, read_cifar_split, read_mnist_split
from manyhands.data.splits import Splits, describe
from manyhands.data.transforms import Pixels

NAMES = ("cifar10", "cifar100", "mnist", "fashion-mnist", "digits")  # the keys of KNOWN, readable without an import

# Pictures hardly compress: an archive that unpacks to more than both limits is refused.
_LIKELY_BYTES = 1 << 30
_MOST_COMPRESSION = 100
_MOST_MEMBERS = 400_000


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens both splits in memory; downloads missing files. Raises UserError: a file is missing or invalid."""
    known = KNOWN[name]
    if known.forms:
        return _open_cifar(name, known, options)
    if name == "digits":
        parts, places, text = ("train", "test"), [Path(digits.__path__[0])], "UCI, in the package"
    else:
        folder = data_folder(options)
        parts, places, text = ("train", "t10k"), mnist_places(folder, name), str(folder)
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
    """Downloads a file such as "mnist/train-images-idx3-ubyte.gz" unless it exists, one process per host at a time.

    Processes that waited report the failure of an attempt instead of repeating it. MANYHANDS_MIRROR names a server that
    replaces `urls`, which are tried in order. Raises UserError: no attempt succeeded.
    """
    from manyhands.core.download import Digest, download, without_password

    began = time.time()
    mirror = os.environ.get("MANYHANDS_MIRROR", "")
    tried: list[str] = []
    failure = into.with_name(f".{into.name}.failed")
    with one_at_a_time(into):
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
    """Unpacks an archive into the host's cache, if needed; returns the folder. Raises UserError: damaged archive."""
    try:
        state = archive.stat()
    except OSError as error:
        raise UserError(f"{archive.name} can't be read: {error.strerror}", str(archive), ("copy it again",)) from error
    key = hashlib.sha256(f"{archive.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:32]
    target = cache_folder() / "unpacked" / key
    with one_at_a_time(target):
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
    """Extracts regular files and folders; tarfile's filter needs Python 3.11.4. Raises TarError: anything else."""
    most_bytes = max(_LIKELY_BYTES, os.fstat(compressed.fileno()).st_size * _MOST_COMPRESSION)
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
    file.extraction_filter = lambda member, _: member  # newer versions of Python warn if none is set
    file.extractall(folder, members)

"""Where the published files of a named data set lie: found in a few usual places, or fetched; archives are unpacked."""

import hashlib
import lzma
import os
import shutil
import tarfile
import time
import warnings
import zlib
from pathlib import Path
from typing import IO

from manyhands.core.download import Digest, download, without_password
from manyhands.core.errors import UserError
from manyhands.core.once import one_at_a_time
from manyhands.core.outside import open_file
from manyhands.data.known import spelt
from manyhands.data.options import DataOptions
from manyhands.data.places import cache_folder

# Pictures hardly get smaller by packing; what says that it unpacks to a hundred times its size is none of them.
_LIKELY_BYTES = 1 << 30
_MOST_TIMES_PACKED = 100
_MOST_MEMBERS = 400_000
_NO_MEMORY = "it asks for more memory than there is"


def find_file(name: str, places: list[Path]) -> Path | None:
    """The file in the first place that has it, packed (.gz) or unpacked; "x-idx3" may be spelt "x.idx3"."""
    return next((there for place in places if (there := spelt(place, name))), None)


def fetch_file(name: str, urls: tuple[str, ...], md5: str, folder: Path, options: DataOptions) -> Path:
    """Fetches a file into a named data set's folder. Raises UserError: downloads are off, or it can't be fetched."""
    if not options.download:
        mend = (f"put {name} there", "or allow the download: --data.download")
        raise UserError(f"{folder} has no {name}", str(folder), mend)
    return fetch(f"{folder.name}/{name}", urls, md5, folder / name)


def fetch(name: str, urls: tuple[str, ...], md5: str, into: Path) -> Path:
    """Fetches a file such as "mnist/train-images-idx3-ubyte.gz", unless it is there.

    Processes of one host take turns; those that waited find the file, or learn that the attempt failed without trying
    again. MANYHANDS_MIRROR names a server that is asked instead of `urls`, which are tried in order; its files lie as
    `name` says. Raises UserError: no attempt succeeded; says what was tried and where to put the file by hand.
    """
    began = time.time()
    mirror = os.environ.get("MANYHANDS_MIRROR", "")
    tried: list[str] = []
    failure = into.with_name(f".{into.name}.failed")
    with one_at_a_time(into):
        if into.is_file():
            return into
        if failure.is_file() and failure.stat().st_mtime >= began:
            raise _unfetched(name, into, failure.read_text(encoding="utf-8").splitlines())
        for url in (f"{mirror.rstrip('/')}/{name}",) if mirror else urls:
            problem = download(url, into, Digest("md5", md5))
            if not problem:
                failure.unlink(missing_ok=True)
                return into
            tried.append(f"{without_password(url)}: {problem}")
        failure.write_text("\n".join(tried), encoding="utf-8")
    raise _unfetched(name, into, tried)


def _unfetched(name: str, into: Path, tried: list[str]) -> UserError:
    mend = (
        *(f"tried {line}" for line in tried),
        f"put {into.name} into {into.parent} by hand,",
        f"or name the folder that holds {name.partition('/')[0]}/: --data-dir DIR, or MANYHANDS_DATA",
    )
    return UserError(f"{name} can't be fetched", str(into), mend)


def unpack_once(archive: Path) -> Path:
    """Unpacks, or finds what this host unpacked before; returns the folder that holds the archive's top level.

    Links, devices and names that lead out of the folder are refused. Raises UserError: the archive is torn or unsafe,
    or the disk is full.
    """
    try:
        state = archive.stat()
    except OSError as error:
        raise UserError(f"{archive.name} can't be read: {error.strerror}", str(archive), ("copy it anew",)) from error
    key = hashlib.sha256(f"{archive.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:32]
    target = cache_folder() / "unpacked" / key
    with one_at_a_time(target):
        if not target.is_dir():
            part = target.with_name(f"{key}.part")
            shutil.rmtree(part, ignore_errors=True)  # an earlier process's, which died: this one holds the lock
            try:
                with open_file(archive) as there, tarfile.open(fileobj=there) as file:
                    _extract(file, part, there)
                part.replace(target)
            except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError, MemoryError) as error:
                shutil.rmtree(part, ignore_errors=True)
                mend = ("copy it anew, or unpack it yourself beside it",)
                what = f"{archive.name} can't be unpacked: {str(error) or _NO_MEMORY}"
                raise UserError(what, str(archive), mend) from error
    return target


def _extract(file: tarfile.TarFile, folder: Path, packed: IO[bytes]) -> None:
    """Extracts plain files and folders (tarfile's own filter came with 3.11.4). Raises TarError: there is more."""
    most_bytes = max(_LIKELY_BYTES, os.fstat(packed.fileno()).st_size * _MOST_TIMES_PACKED)
    members: list[tarfile.TarInfo] = []
    total = 0
    for member in file:
        members.append(member)
        total += member.size + tarfile.BLOCKSIZE
        if total > most_bytes or len(members) > _MOST_MEMBERS:
            raise tarfile.TarError(f"it would unpack to more than {most_bytes >> 20:,} MiB, or {_MOST_MEMBERS:,} files")
        inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
        if not inside or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"it holds {member.name}, which is no plain file within it")
        member.mode = 0o755 if member.isdir() else 0o644
    with warnings.catch_warnings():
        # Newer versions of Python want a filter named; the members have been looked at above.
        warnings.simplefilter("ignore", DeprecationWarning)
        file.extractall(folder, members)

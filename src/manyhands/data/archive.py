"""Archives of pictures, unpacked once for each host into the user's cache."""

import hashlib
import lzma
import shutil
import tarfile
import zlib
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.once import one_at_a_time
from manyhands.data.places import cache_folder


def unpack_once(archive: Path) -> Path:
    """Unpacks, or finds what this host unpacked before; returns the folder that holds the archive's top level.

    Links out of the folder, devices and absolute names are refused (tarfile's "data" filter).

    Raises:
        UserError: the archive is torn or unsafe, or the disk is full.
    """
    state = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:32]
    target = cache_folder() / "unpacked" / key
    with one_at_a_time(target):
        if not target.is_dir():
            part = target.with_name(f"{key}.part")
            shutil.rmtree(part, ignore_errors=True)  # an earlier process's, which died: this one holds the lock
            try:
                with tarfile.open(archive) as file:
                    file.extractall(part, filter="data")
                part.replace(target)
            except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
                shutil.rmtree(part, ignore_errors=True)
                mend = ("copy it anew, or unpack it yourself beside it",)
                raise UserError(f"{archive.name} can't be unpacked: {error}", str(archive), mend) from error
    return target

"""Archives of pictures, unpacked once for each host into the user's cache."""

import hashlib
import lzma
import shutil
import tarfile
import warnings
import zlib
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.once import one_at_a_time
from manyhands.data.places import cache_folder


def unpack_once(archive: Path) -> Path:
    """Unpacks, or finds what this host unpacked before; returns the folder that holds the archive's top level.

    Links, devices and names that lead out of the folder are refused.

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
                    _extract(file, part)
                part.replace(target)
            except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
                shutil.rmtree(part, ignore_errors=True)
                mend = ("copy it anew, or unpack it yourself beside it",)
                raise UserError(f"{archive.name} can't be unpacked: {error}", str(archive), mend) from error
    return target


def _extract(file: tarfile.TarFile, folder: Path) -> None:
    """Extracts plain files and folders; tarfile's own filter came only with Python 3.11.4.

    Raises:
        TarError: a member is neither, or would be written elsewhere.
    """
    members = file.getmembers()
    for member in members:
        inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
        if not inside or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"it holds {member.name}, which is no plain file within it")
        member.mode = 0o755 if member.isdir() else 0o644
    with warnings.catch_warnings():
        # Newer versions of Python want a filter named; the members have been looked at above.
        warnings.simplefilter("ignore", DeprecationWarning)
        file.extractall(folder, members)

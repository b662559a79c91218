"""What is to be there after a power cut."""

import errno
import os
from pathlib import Path

_FOLDER_SYNC_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def sync_file(path: Path) -> None:
    """Waits until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until a folder's entries (names made, renamed, removed) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems know no such order
        if error.errno not in _FOLDER_SYNC_UNKNOWN:
            raise
    finally:
        os.close(descriptor)

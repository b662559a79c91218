"""The code of a head's folder as it is written on another machine."""

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from manyhands.core.errors import UserError

# Code beyond this is data, which isn't ours to carry.
CODE_BYTES = 32 * 1024 * 1024


def write_code(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes what isn't there as it should be; a job that ran there before may have changed it."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder.parent):
        place.chmod(0o700)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(content)
            temporary.replace(path)
    os.utime(folder)


def checked_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a head's code by their path, which must stay inside the folder.

    Raises:
        UserError: one doesn't, or isn't whole, or there is too much.
    """
    found: dict[str, bytes] = {}
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise UserError(f"the path {name!r} leads out of the folder")
        try:
            found[name] = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise UserError(f"{name} is incomplete after the transfer") from None
    if sum(map(len, found.values())) > CODE_BYTES:
        raise UserError(f"the code exceeds the limit of {CODE_BYTES >> 20} MiB")
    return found

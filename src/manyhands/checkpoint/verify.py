"""Compares a checkpoint folder with its manifest. A torn or altered one is refused."""

from pathlib import Path
from typing import Any

from manyhands.checkpoint import layout
from manyhands.checkpoint.plain_files import checked_plain
from manyhands.core.errors import UserError
from manyhands.core.files import read_bytes


class TornCheckpointError(UserError):
    """A checkpoint's bytes are not those that were committed."""


def verify(path: Path) -> None:
    """Compares every file of a checkpoint folder with its manifest.

    Raises:
        TornCheckpointError: a file is missing, or its size or SHA-256 differs.
        UserError: a newer version of manyhands wrote it.
    """
    for name, entry in read_manifest(path)["files"].items():
        try:
            _verify_file(path / name, entry["size"], entry["sha256"])
        except OSError as error:
            raise torn(path / name, f"can't be read: {error.strerror or error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks the manifest itself: whole, unaltered, of a version that we know, of files that we know.

    Raises:
        TornCheckpointError: it isn't.
        UserError: a newer version of manyhands wrote it.
    """
    file = path / layout.MANIFEST
    if not path.is_dir():
        raise torn(path, "is missing")
    if not file.is_file():
        raise torn(file, "is missing")
    try:
        text = read_bytes(file)
        content = checked_plain(layout.MANIFEST, text)
    except (OSError, ValueError) as error:
        raise torn(file, f"was altered or truncated: {error}") from error
    if layout.manifest_text(content) != text:
        raise torn(file, "was altered or truncated: the SHA-256 at the end doesn't match")
    if content.get("format", 0) > layout.PIECES_FORMAT:
        hints = f"install manyhands {content.get('manyhands')} or later"
        raise UserError(f"{path.name} was written by a newer manyhands", str(file), (hints,))
    if not layout.are_contents(set(content["files"])):
        raise torn(file, f"lists files that don't belong to a checkpoint: {', '.join(content['files'])}")
    return content


def torn(path: Path, what: str) -> TornCheckpointError:
    """The error that says what is wrong with a file or folder."""
    hints = ("resume from an earlier checkpoint of the run, or copy the checkpoint again",)
    return TornCheckpointError(f"{path.name} {what}", str(path), hints)


def damaged(path: Path) -> UserError:
    """The error for a file whose bytes can't be understood."""
    return UserError(f"{path.name} is damaged or not a checkpoint", str(path), ("copy or download the file again",))


def _verify_file(file: Path, size: int, sha256: str) -> None:
    if not file.is_file():
        raise torn(file, "is missing")
    if (found := file.stat().st_size) != size:
        raise torn(file, f"has {found} bytes, expected {size}")
    if (seen := layout.digest(file)) != sha256:
        raise torn(file, f"has the SHA-256 {seen}, expected {sha256}")

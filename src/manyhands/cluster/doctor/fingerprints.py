"""Fingerprints of code and data, by which two machines can be compared without copying anything."""

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manyhands.cluster.code_files import TooManyFoldersError, code_files, revision
from manyhands.data.known import recognise
from manyhands.data.options import DataOptions
from manyhands.data.places import data_folder

# More than this is no code of a job.
MOST_FILES = 2000
MOST_FOLDERS = 5000
DATA_S = 3.0
BUILT_IN = ("digits", "synthetic", "synthetic:")


def code(folder: Path) -> dict[str, Any]:
    """A hash of each file of code, a common one, and git's revision; "whole" is false where not all was looked at."""
    if not folder.is_dir():
        return {"exists": False, "path": str(folder.absolute())}
    files: dict[str, str] = {}
    whole = True
    try:
        for path in code_files(folder, most_folders=MOST_FOLDERS):
            if len(files) == MOST_FILES:
                whole = False
                break
            files[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except TooManyFoldersError:
        whole = False
    return {
        "exists": True,
        "path": str(folder.absolute()),
        "hash": _common(f"{name} {digest}" for name, digest in files.items()),
        "files": files,
        "whole": whole,
        "revision": revision(folder),
    }


def dataset(name: str, folder: str, workdir: Path) -> dict[str, Any]:
    """Where a data set lies on this machine, and a hash of its files' names and sizes.

    "kind": none (nothing to lie anywhere), folder or named; for the others "path", "exists", and where it does "files",
    "bytes", "hash", and "whole" false where there was no time to see all.
    """
    if not name or name in BUILT_IN or name.startswith("synthetic:") or ".py:" in name:
        return {"kind": "none"}
    path = workdir / Path(name).expanduser()
    if path.is_dir() or "/" in name or name.startswith("."):
        return {"kind": "folder", "path": str(path.absolute()), **_tree([path] if path.is_dir() else [])}
    above = data_folder(DataOptions(dir=folder))
    word = _plain(name.partition(":")[2] or name)
    entries = sorted(above.iterdir()) if above.is_dir() else []
    roots = [entry for entry in entries if _plain(entry.name).startswith(word)]
    if not roots and above.is_dir() and recognise(above) == name:
        roots = [above]
    return {"kind": "named", "path": str(above / name), **_tree(roots)}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _tree(roots: list[Path]) -> dict[str, Any]:
    if not roots:
        return {"exists": False}
    until, lines, total, complete = time.monotonic() + DATA_S, list[str](), 0, True
    for root in roots:
        walked = os.walk(root, followlinks=True) if root.is_dir() else [(str(root.parent), [], [root.name])]
        for place, folders, names in walked:
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(place) / name
                if not name.startswith(".") and path.is_file():
                    size = path.stat().st_size
                    lines.append(f"{path.relative_to(root).as_posix() if path != root else name} {size}")
                    total += size
            if time.monotonic() > until:
                complete = False
                break
    return {"exists": True, "files": len(lines), "bytes": total, "hash": _common(lines), "whole": complete}


def _common(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in sorted(lines):
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()[:16]

"""The files of a checkpoint folder: their names and their digests."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

FORMAT = 1
# What only newer versions can read says so by a number of its own.
PIECES_FORMAT = 2

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_PLAN = "optimizer.json"
STATE = "state.json"
MANIFEST = "manifest.json"
PIECES = "pieces.json"
# Lies in a folder only while it is written: who sees it, sees the same disk.
TOKEN = "shared.token"

REQUIRED = (MODEL, STATE)
CONTENTS = (MODEL, OPTIMIZER, OPTIMIZER_PLAN, STATE)
FILES = (*CONTENTS, MANIFEST)

_PIECE = re.compile(r"(model|optimizer)-\d{5}-of-\d{5}\.safetensors")
_STEP = re.compile(r"step-(\d{8,})")
_SCRATCH = re.compile(r"\.tmp\w{6}")  # the safetensors library's own, while it writes
_TEMPORARY = re.compile(r"\.tmp-step-\d{8,}-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """The folder's name for one step: step-00001200."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name; None where the name isn't one of ours."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Folders of `folder` that are named as checkpoints, newest step first; links are left out."""
    if not folder.is_dir():
        return []
    found = [(step_of(path), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return [path for _, path in sorted(((step, path) for step, path in found if step is not None), reverse=True)]


def temporary_name(step: int) -> str:
    """A fresh name for a folder that isn't committed yet."""
    return f".tmp-{step_name(step)}-{os.urandom(4).hex()}"


def is_temporary(path: Path) -> bool:
    """True for a folder that `temporary_name` named."""
    return bool(_TEMPORARY.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def piece_name(kind: str, rank: int, size: int) -> str:
    """The file of one process's pieces: model-00000-of-00004.safetensors."""
    return f"{kind}-{rank:05d}-of-{size:05d}.safetensors"


def is_piece(file: Path) -> bool:
    """True for a file of pieces in a checkpoint folder."""
    return bool(_PIECE.fullmatch(file.name)) and (file.parent / PIECES).exists()


def are_contents(names: set[str]) -> bool:
    """True for the names of the files of one checkpoint, whole or in pieces."""
    if PIECES not in names:
        return set(REQUIRED) <= names <= set(CONTENTS)
    rest = {name for name in names if not _PIECE.fullmatch(name)}
    return {PIECES, STATE} <= rest <= {PIECES, STATE, OPTIMIZER_PLAN}


def is_ours(file: Path) -> bool:
    """True for a file of a checkpoint folder that a save made."""
    name = file.name
    return name in (*FILES, PIECES, TOKEN) or bool(_SCRATCH.fullmatch(name) or _PIECE.fullmatch(name))


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text(content: dict[str, Any]) -> bytes:
    """Plain data as the bytes of a .json file."""
    return (json.dumps(content, indent=1) + "\n").encode()


def manifest_text(content: dict[str, Any]) -> bytes:
    """The one spelling of a manifest: its last key is the SHA-256 of the others, so that no byte can change unseen."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": seal}, indent=1) + "\n").encode()

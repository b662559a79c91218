"""The files of a checkpoint folder: names, schemas and digests. No torch.

A torn or altered checkpoint is refused.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from manyhands.core.errors import UserError
from manyhands.core.files import parse_json, read_bytes

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


def json_text(content: dict[str, Any]) -> bytes:
    """Plain data as the bytes of a .json file."""
    return (json.dumps(content, indent=1) + "\n").encode()


def manifest_text(content: dict[str, Any]) -> bytes:
    """The one spelling of a manifest: its last key is the SHA-256 of the others, so that no byte can change unseen."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": seal}, indent=1) + "\n").encode()


# What Python's float, JavaScript and torch's int64 count exactly; no run makes so many updates.
_Count = Annotated[int, Field(ge=-1, le=2**53)]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Best(_Plain):
    step: _Count | None = None
    figure: float | None = None


class _Session(_Plain):
    epochs: _Count = 0
    scheduler: str = ""
    losses: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = Field(default_factory=list[list[float]])


class _State(_Plain):
    step: _Count = 0
    epoch: _Count = 0
    step_in_epoch: _Count = 0
    best_step: _Count = -1
    evaluated_step: _Count = -1
    saved_step: _Count = 0
    best_figure: float | None = None
    best_by: str = ""
    owed: bool = False
    best: _Best | None = None
    classes: list[str] = Field(default_factory=list)
    sync: dict[str, Any] | None = None
    schedule: str = ""
    session: _Session | None = None
    scaler: dict[str, float | int | None] | None = None
    extra_state: dict[str, Any] = Field(default_factory=dict[str, Any])


class _Group(_Plain):
    params: list[str] = Field(default_factory=list)


class _Optimizer(_Plain):
    state: dict[str, dict[str, Any]] = Field(default_factory=dict)
    param_groups: list[_Group] = Field(default_factory=list)


class _File(_Plain):
    size: _Count
    sha256: str


class _Manifest(_Plain):
    format: _Count = 0
    files: dict[str, _File]


_SCHEMAS = {
    STATE: TypeAdapter(_State),
    OPTIMIZER_PLAN: TypeAdapter(_Optimizer),
    MANIFEST: TypeAdapter(_Manifest),
}


def read_plain(file: Path) -> dict[str, Any]:
    """A .json file of a checkpoint, as it was written.

    Raises:
        OSError: it can't be read.
        ValueError: it isn't JSON, or a value is of another kind than such a file's.
    """
    return checked_plain(file.name, read_bytes(file))


def checked_plain(name: str, content: bytes) -> dict[str, Any]:
    """What the bytes of a file of this name hold. Raises ValueError: not JSON, or not such a file's."""
    found = parse_json(content, infinite=True)  # the best figure, or a scale, may be infinite
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    if name in _SCHEMAS:
        try:
            _SCHEMAS[name].validate_python(found)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ValueError(f"{field} in {name} is invalid: {first['msg'].lower()}") from None
    return found


class TornCheckpointError(UserError):
    """A checkpoint's bytes are not those that were committed."""


def verify(path: Path) -> None:
    """Compares every file of a checkpoint folder with its manifest.

    Raises:
        TornCheckpointError: a file is missing, or its size or SHA-256 differs.
        UserError: a newer version of manyhands wrote it.
    """
    for name, entry in read_manifest(path)["files"].items():
        file = path / name
        try:
            if not file.is_file():
                raise torn(file, "is missing")
            if (size := file.stat().st_size) != entry["size"]:
                raise torn(file, f"has {size} bytes, expected {entry['size']}")
            if (seen := digest(file)) != entry["sha256"]:
                raise torn(file, f"has the SHA-256 {seen}, expected {entry['sha256']}")
        except OSError as error:
            raise torn(file, f"can't be read: {error.strerror or error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks the manifest itself: whole, unaltered, of a version that we know, of files that we know.

    Raises:
        TornCheckpointError: it isn't.
        UserError: a newer version of manyhands wrote it.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise torn(path, "is missing")
    if not file.is_file():
        raise torn(file, "is missing")
    try:
        text = read_bytes(file)
        content = checked_plain(MANIFEST, text)
    except (OSError, ValueError) as error:
        raise torn(file, f"was altered or truncated: {error}") from error
    if manifest_text(content) != text:
        raise torn(file, "was altered or truncated: the SHA-256 at the end doesn't match")
    if content.get("format", 0) > PIECES_FORMAT:
        hints = f"install manyhands {content.get('manyhands')} or later"
        raise UserError(f"{path.name} was written by a newer manyhands", str(file), (hints,))
    if not are_contents(set(content["files"])):
        raise torn(file, f"lists files that don't belong to a checkpoint: {', '.join(content['files'])}")
    return content


def torn(path: Path, what: str) -> TornCheckpointError:
    """The error that says what is wrong with a file or folder."""
    hints = ("resume from an earlier checkpoint of the run, or copy the checkpoint again",)
    return TornCheckpointError(f"{path.name} {what}", str(path), hints)


def damaged(path: Path) -> UserError:
    """The error for a file whose bytes can't be understood."""
    return UserError(f"{path.name} is damaged or not a checkpoint", str(path), ("copy or download the file again",))

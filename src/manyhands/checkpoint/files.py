"""Names, schemas and digests of the files in a checkpoint folder. Imports no torch."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from manyhands.core.errors import UserError
from manyhands.core.files import parse_json, read_bytes

FORMAT = 1
PIECES_FORMAT = 2

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_PLAN = "optimizer.json"
STATE = "state.json"
MANIFEST = "manifest.json"
PIECES = "pieces.json"
TOKEN = "shared.token"  # exists only during a save, to check that all processes see the same disk

CONTENTS = (MODEL, OPTIMIZER, OPTIMIZER_PLAN, STATE)
FILES = (*CONTENTS, MANIFEST)

_PIECE = re.compile(r"(model|optimizer)-\d{5}-of-\d{5}\.safetensors")
_STEP = re.compile(r"step-(\d{8,})")
_SCRATCH = re.compile(r"\.tmp\w{6}")  # the safetensors library's temporary files
_TEMPORARY = re.compile(r"\.tmp-step-\d{8,}-[0-9a-f]{8}")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step in the name of a checkpoint folder, or None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Returns the checkpoint folders in `folder`, newest step first, without symbolic links."""
    if not folder.is_dir():
        return []
    found = [(step_of(path), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return [path for _, path in sorted(((step, path) for step, path in found if step is not None), reverse=True)]


def temporary_name(step: int) -> str:
    return f".tmp-{step_name(step)}-{os.urandom(4).hex()}"


def is_temporary(path: Path) -> bool:
    return bool(_TEMPORARY.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def piece_name(kind: str, rank: int, size: int) -> str:
    return f"{kind}-{rank:05d}-of-{size:05d}.safetensors"


def is_piece(file: Path) -> bool:
    return bool(_PIECE.fullmatch(file.name)) and (file.parent / PIECES).exists()


def are_checkpoint_files(names: set[str]) -> bool:
    if PIECES not in names:
        return {MODEL, STATE} <= names <= set(CONTENTS)
    rest = {name for name in names if not _PIECE.fullmatch(name)}
    return {PIECES, STATE} <= rest <= {PIECES, STATE, OPTIMIZER_PLAN}


def is_checkpoint_file(file: Path) -> bool:
    name = file.name
    return name in (*FILES, PIECES, TOKEN) or bool(_SCRATCH.fullmatch(name) or _PIECE.fullmatch(name))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def manifest_text(content: dict[str, Any]) -> bytes:
    """Formats a manifest. The last key is the SHA-256 of the other keys and values."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": seal}, indent=1) + "\n").encode()


# The limit is exact as a Python float, in JavaScript and as int64; no run reaches it.
_Count = Annotated[int, Field(ge=-1, le=2**53)]


def _schema(fields: dict[str, Any], needed: dict[str, Any] | None = None) -> Any:
    """Creates a pydantic model with optional `fields` and required fields `needed`, which allows other fields."""
    typed: Any = {name: (kind, None) for name, kind in fields.items()}
    typed |= {name: (kind, ...) for name, kind in (needed or {}).items()}
    return create_model("Plain", __config__=ConfigDict(extra="allow", strict=True), **typed)


_COUNTS = ("step", "epoch", "step_in_epoch", "best_step", "evaluated_step", "saved_step")
_Loss = Annotated[list[float], Field(min_length=2, max_length=2)]
_SESSION = {"epochs": _Count, "scheduler": str, "losses": list[_Loss]}
_STATE = {
    "best_figure": float | None, "best_by": str, "owed": bool, "schedule": str, "classes": list[str],
    "best": _schema({"step": _Count | None, "figure": float | None}) | None, "session": _schema(_SESSION) | None,
    "sync": dict[str, Any] | None, "scaler": dict[str, float | int | None] | None, "extra_state": dict[str, Any],
}  # fmt: skip
_SCHEMAS: dict[str, type[BaseModel]] = {
    STATE: _schema(dict.fromkeys(_COUNTS, _Count) | _STATE),
    OPTIMIZER_PLAN: _schema({"state": dict[str, dict[str, Any]], "param_groups": list[_schema({"params": list[str]})]}),
    MANIFEST: _schema({"format": _Count}, {"files": dict[str, _schema({}, {"size": _Count, "sha256": str})]}),
}


def read_plain(file: Path) -> dict[str, Any]:
    """Reads a checkpoint's .json file. Raises OSError, or ValueError for invalid JSON or a wrong value."""
    return parse_plain(file.name, read_bytes(file))


def parse_plain(name: str, content: bytes) -> dict[str, Any]:
    """Parses the content of the .json file `name`. Raises ValueError for invalid JSON or a wrong value."""
    found = parse_json(content, infinite=True)  # the best figure or the loss scale may be infinite
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    if name in _SCHEMAS:
        try:
            _SCHEMAS[name].model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ValueError(f"{field} in {name} is invalid: {first['msg'].lower()}") from None
    return found


class TornCheckpointError(UserError):
    """Raised if a file of a checkpoint is missing or differs from the manifest."""


def verify_checkpoint(path: Path) -> None:
    """Raises TornCheckpointError if a file differs from the manifest, UserError if the format is too new."""
    for name, entry in read_manifest(path)["files"].items():
        file = path / name
        try:
            if not file.is_file():
                raise torn_error(file, "is missing")
            if (size := file.stat().st_size) != entry["size"]:
                raise torn_error(file, f"has {size} bytes, expected {entry['size']}")
            if (seen := file_digest(file)) != entry["sha256"]:
                raise torn_error(file, f"has the SHA-256 {seen}, expected {entry['sha256']}")
        except OSError as error:
            raise torn_error(file, f"can't be read: {error.strerror or error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks the manifest, but not the listed files. Raises the errors of `verify_checkpoint`."""
    file = path / MANIFEST
    if not path.is_dir():
        raise torn_error(path, "is missing")
    if not file.is_file():
        raise torn_error(file, "is missing")
    try:
        text = read_bytes(file)
        content = parse_plain(MANIFEST, text)
    except (OSError, ValueError) as error:
        raise torn_error(file, f"was altered or truncated: {error}") from error
    if manifest_text(content) != text:
        raise torn_error(file, "was altered or truncated: the SHA-256 at the end doesn't match")
    if content.get("format", 0) > PIECES_FORMAT:
        hints = f"install manyhands {content.get('manyhands')} or later"
        raise UserError(f"{path.name} was written by a newer manyhands", str(file), (hints,))
    if not are_checkpoint_files(set(content["files"])):
        raise torn_error(file, f"lists files that don't belong to a checkpoint: {', '.join(content['files'])}")
    return content


def torn_error(path: Path, what: str) -> TornCheckpointError:
    hints = ("resume from an earlier checkpoint of the run, or copy the checkpoint again",)
    return TornCheckpointError(f"{path.name} {what}", str(path), hints)


def damaged_error(path: Path) -> UserError:
    return UserError(f"{path.name} is damaged or not a checkpoint", str(path), ("copy or download the file again",))

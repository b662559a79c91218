"""The .json files of a checkpoint, each read against what it may hold."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from manyhands.checkpoint import layout
from manyhands.core.files import parse_json, read_bytes

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
    layout.STATE: TypeAdapter(_State),
    layout.OPTIMIZER_PLAN: TypeAdapter(_Optimizer),
    layout.MANIFEST: TypeAdapter(_Manifest),
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

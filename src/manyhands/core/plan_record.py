"""plan.json, the only place that writes and reads it: how work is split, how that was found, what a run makes of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manyhands.core.errors import UserError
from manyhands.core.layouts import TensorLayout, layout_from_plain
from manyhands.core.mesh import Mesh, make_mesh
from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.plugins import did_you_mean
from manyhands.core.records import write_json

FORMAT = "plan/1"
_NEW_PLAN = "create a new plan: manyhands plan job.toml"
# What says who computes and holds what; all else is about it.
SPLIT = ("format", "mesh", "default", "ops", "pinned", "layouts")


class PlanRecord(BaseModel):
    """What a plan.json says; its writer leaves out what it doesn't know, and fields of others are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    format: str = Field(default=FORMAT)
    mesh: dict[str, Any] = Field(default_factory=dict, description="size of each axis, major to minor; see `make_mesh`")
    default: str = Field(default="", description="the strategy of ops that none of `ops` matches")
    ops: dict[str, str] = Field(default_factory=dict, description="strategy by op, module path or glob")
    pinned: list[str] = Field(default_factory=list[str], description="keys of `ops` that the user fixed")
    layouts: dict[str, Any] | None = Field(
        default=None, description="of the tensors that are cut, by name; see `layout_from_plain`; None where unknown"
    )
    # How it was found.
    mode: str = Field(default="", description="that runs it")
    reason: str = ""
    recommended: dict[str, Any] = Field(default_factory=dict, description="row of the table, number of processes")
    predicted: dict[str, Any] = Field(default_factory=dict, description="of an update: ms, bytes")
    measured: dict[str, Any] = Field(default_factory=dict, description="of an update: ms")
    candidates: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]], description="all that was compared")
    untimed: list[str] = Field(default_factory=list[str], description="sentences on what was left out")
    wish: list[Any] = Field(default_factory=list[Any], description="the options that it was searched for")
    graph: dict[str, Any] = Field(default_factory=dict, description="sha, input and samples of the traced network")
    network: dict[str, Any] = Field(default_factory=dict, description="model, channels, size and classes")
    sync: dict[str, Any] = Field(default_factory=dict, description="how processes agree, or what each way would cost")
    notes: list[str] = Field(default_factory=list[str], description="sentences on parts that stay whole")
    # What a run makes of it.
    batch: int = Field(default=0, description="samples of an update")
    shares: list[list[int]] = Field(default_factory=list[list[int]], description="samples by pass and process")
    passes: int = 0
    averages: str = Field(default="", description="how gradients are averaged, and why so")
    precision: str = ""
    channels_last: bool | str = False
    precision_measured: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]], description="seconds of each precision and layout, by kind of machine"
    )
    compile: bool | str = False
    norm_group: int | str = ""
    steps_per_epoch: int = 0
    total_steps: int = 0
    exceptions: list[str] = Field(default_factory=list[str], description="from: the same at any number of processes")
    resolved: dict[str, Any] = Field(default_factory=dict, description="what became of open options, by dotted key")

    def as_plain(self) -> dict[str, Any]:
        """As JSON data: what was given, in the order of the fields."""
        return {"format": self.format, **self.model_dump(exclude_unset=True)}

    def about(self) -> dict[str, Any]:
        """All that it says beside the split, as JSON data."""
        return self.model_dump(exclude_unset=True, exclude=set(SPLIT))

    def mesh_and_layouts(self, where: str) -> tuple[Mesh, Mapping[str, TensorLayout]]:
        """The processes, and how the tensors lie that are known to be cut.

        Raises:
            UserError: there are none such.
        """
        mesh = make_mesh(self.mesh, f"{where}, mesh")
        layouts = (self.layouts or {}).items()
        return mesh, {name: layout_from_plain(one, mesh, f"{where}, layouts, {name}") for name, one in layouts}


def write_plan_record(path: Path, record: PlanRecord) -> None:
    """Writes a plan.json; no reader ever sees half of it.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    write_json(path, record.as_plain())


def read_plan_record(path: Path) -> PlanRecord:
    """Reads a plan.json.

    Raises:
        UserError: there is none, or it is not a plan; says which field.
    """
    try:
        content = parse_json(read_bytes(path), once_each=True)
    except OSError as error:
        raise UserError(f"the plan can't be read: {error.strerror}", str(path), (_NEW_PLAN,)) from error
    except ValueError as error:
        raise UserError(f"the plan is not valid JSON: {error}", str(path), (_NEW_PLAN,)) from error
    return parse_plan_record(content, str(path))


def parse_plan_record(content: Any, where: str) -> PlanRecord:
    """Reads what `as_plain` gave, or a person edited.

    Raises:
        UserError: it is not a plan; says which field.
    """
    try:
        record = PlanRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field, *inner = first["loc"] or ("",)
        if not field:
            raise no_plan(where) from error
        what = f'the plan\'s "{field}"{"".join(f", {one}" for one in inner)}: {first["msg"]}'
        example = ('write "ops" as strategies by name, such as {"fc": "n@dp o@tp"}',) if field == "ops" else ()
        raise UserError(what, where, (*example, f"correct the field, or {_NEW_PLAN}")) from error
    if record.format != FORMAT:
        raise no_plan(where)
    for key in record.model_extra or {}:
        if hint := did_you_mean(key, SPLIT):
            raise UserError(f'a plan has no field "{key}"', where, (hint,))
    return record


def no_plan(where: str) -> UserError:
    """The error for a file of another kind."""
    return UserError(f'not a plan: expected "format": "{FORMAT}" and a "mesh"', where, (_NEW_PLAN,))

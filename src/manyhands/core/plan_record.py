"""The content of plan.json: the sharding of the network, the search that found it, and decisions of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manyhands.core import choices, files, records
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, layout_from_plain, make_mesh

FORMAT = "plan/1"
_NEW_PLAN = "create a new plan: manyhands plan job.toml"
SPLIT = ("format", "mesh", "default", "ops", "pinned", "layouts")  # fields that define the plan


class PlanRecord(BaseModel):
    """The content of a plan.json. Unknown fields are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    format: str = Field(default=FORMAT)
    mesh: dict[str, Any] = Field(default={}, description="size of each axis, major to minor; see `make_mesh`")
    default: str = Field(default="", description="strategy of ops that no key of `ops` matches")
    ops: dict[str, str] = Field(default={}, description="strategy by op, module path or glob")
    pinned: list[str] = Field(default=[], description="keys of `ops` whose strategy the user set")
    layouts: dict[str, Any] | None = Field(default=None, description="by tensor name; see `layout_from_plain`")
    # How the plan was found.
    mode: str = Field(default="", description="parallel mode that runs the plan")
    reason: str = ""
    recommended: dict[str, Any] = Field(default={}, description="row of the comparison table, and number of processes")
    predicted: dict[str, Any] = Field(default={}, description="time and traffic of an update, in ms and bytes")
    measured: dict[str, Any] = Field(default={}, description="time of an update in ms")
    candidates: list[dict[str, Any]] = Field(default=[], description="all compared plans")
    untimed: list[str] = Field(default=[], description="messages about ops that could not be timed")
    wish: list[Any] = Field(default=[], description="options of the search")
    graph: dict[str, Any] = Field(default={}, description="sha, input and samples of the traced network")
    network: dict[str, Any] = Field(default={}, description="model, channels, size and classes")
    sync: dict[str, Any] = Field(default={}, description="sync method, or the costs of all methods")
    notes: list[str] = Field(default=[], description="messages about ops that are not sharded")
    # What a run decided.
    batch: int = Field(default=0, description="samples per update")
    shares: list[list[int]] = Field(default=[], description="samples by micro-batch and process")
    passes: int = 0
    averages: str = Field(default="", description="method of gradient averaging, with the reason")
    precision: str = ""
    channels_last: bool | str = False
    precision_measured: list[dict[str, Any]] = Field(default=[], description="seconds by machine kind and precision")
    compile: bool | str = False
    norm_group: int | str = ""
    steps_per_epoch: int = 0
    total_steps: int = 0
    exceptions: list[str] = Field(default=[], description="reasons why results depend on the number of processes")
    resolved: dict[str, Any] = Field(default={}, description="resolved values of automatic options, by dotted key")

    def as_plain(self) -> dict[str, Any]:
        return {"format": self.format, **self.model_dump(exclude_unset=True)}

    def about(self) -> dict[str, Any]:
        """Returns the fields that describe the plan, without the fields that define the sharding."""
        return self.model_dump(exclude_unset=True, exclude=set(SPLIT))

    def mesh_and_layouts(self, where: str) -> tuple[Mesh, Mapping[str, TensorLayout]]:
        """Returns the mesh and the layouts of the sharded tensors. Raises UserError if they are invalid."""
        mesh = make_mesh(self.mesh, f"{where}, mesh")
        plain = (self.layouts or {}).items()
        return mesh, {name: layout_from_plain(layout, mesh, f"{where}, layouts, {name}") for name, layout in plain}


def write_plan_record(path: Path, record: PlanRecord) -> None:
    records.write_json(path, record.as_plain())


def read_plan_record(path: Path) -> PlanRecord:
    """Reads a plan.json. Raises UserError if the file is missing, is not a plan, or has an invalid field."""
    try:
        content = files.parse_json(files.read_bytes(path), once_each=True)
    except OSError as error:
        raise UserError(f"the plan can't be read: {error.strerror}", str(path), (_NEW_PLAN,)) from error
    except ValueError as error:
        raise UserError(f"the plan is not valid JSON: {error}", str(path), (_NEW_PLAN,)) from error
    return parse_plan_record(content, str(path))


def parse_plan_record(content: Any, where: str) -> PlanRecord:
    """Creates a record from a plan's JSON data, which a user may have edited. Raises UserError for an invalid field."""
    try:
        record = PlanRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field, *inner = first["loc"] or ("",)
        if not field:
            raise no_plan(where) from error
        what = f'the plan\'s "{field}"{"".join(f", {key}" for key in inner)}: {first["msg"]}'
        example = ('write "ops" as strategies by name, such as {"fc": "n@dp o@tp"}',) if field == "ops" else ()
        raise UserError(what, where, (*example, f"correct the field, or {_NEW_PLAN}")) from error
    if record.format != FORMAT:
        raise no_plan(where)
    for key in record.model_extra or {}:
        if hint := choices.did_you_mean(key, SPLIT):
            raise UserError(f'a plan has no field "{key}"', where, (hint,))
    return record


def no_plan(where: str) -> UserError:
    return UserError(f'not a plan: expected "format": "{FORMAT}" and a "mesh"', where, (_NEW_PLAN,))

"""Types and readers of records: the lines of metrics.jsonl and events.jsonl, and other small JSON files."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

from manyhands.core.errors import UserError
from manyhands.core.files import MOST_BYTES, append_line, parse_json, write_atomic

VERSION = 1
MACHINE_LOST = "MachineLost"  # `Failure.error` of a machine that is down or unreachable
PROCESS_ENDED = "ProcessEnded"  # `Failure.error` of a process that was killed
REPLACED = "head-replaced"  # kind of the event that a launcher records after another launcher took over its machines
FAILURE_FILE = "MANYHANDS_FAILURE_FILE"  # variable with the path of a worker's `Failure`, outside the run folder


def _check_identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("the name of a metric should be a Python identifier")
    return name


Figures = dict[Annotated[str, AfterValidator(_check_identifier)], float]  # the user's own metrics by name


class Record(BaseModel):
    """The base class of all records. Unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    v: int = Field(default=VERSION, le=VERSION)
    time: float = Field(allow_inf_nan=False, description="seconds since 1970, by rank 0's clock")


class StepMetrics(Record):
    """Measurements since the previous step record, over all processes."""

    kind: Literal["step"] = "step"
    epoch: int = Field(ge=0, description="completed epochs")
    step: int = Field(ge=0, description="completed updates, including this one")
    step_in_epoch: int = Field(ge=0)
    steps_per_epoch: int = Field(ge=1)
    total_steps: int = Field(ge=0)
    loss: float = Field(description="mean over the samples since the last record")
    top1: float = Field(description="training accuracy over the same samples, 0 to 1")
    learning_rate: float
    images_per_s: float = Field(description="over all processes")
    samples: int = Field(description="samples that the record covers")
    data_share: float = Field(default=0.0, description="share of time that rank 0 waited for data, 0 to 1")
    saved_step: int = Field(default=0, description="last saved step")
    epoch_loss: float | None = Field(
        default=None, description="mean over the epoch; only in the last record of an epoch without a restart"
    )
    epoch_top1: float | None = Field(default=None, description="training accuracy over the same epoch, 0 to 1")
    asked: bool = Field(default=False, description="True if run.log_steps requests a line for this step")


class PhaseMetrics(Record):
    """The seconds of each process in each phase since the previous record of this kind; see `core/phases.py`."""

    kind: Literal["phases"] = "phases"
    epoch: int = Field(ge=1, description="current epoch, counted from 1")
    step: int = Field(ge=0, description="completed updates")
    seconds: dict[str, list[float]] = Field(description="seconds by phase and rank; the phases add up to the time")
    queued_s: list[float] = Field(default=[], description="seconds that the main thread waited for a CPU core, by rank")


class EvaluationMetrics(Record):
    """The metrics of one evaluation, which counts each sample exactly once."""

    kind: Literal["evaluation"] = "evaluation"
    epoch: int
    step: int
    count: int = Field(description="samples evaluated: the length of the split")
    loss: float
    top1: float = Field(description="0 to 1")
    top5: float = Field(description="0 to 1; 1 with at most five classes")
    best: bool = Field(description="best so far by train.best")
    classes: int = Field(default=0, description="number of possible predictions; 0 in older records")
    seconds: float = 0.0
    metrics: Figures = Field(default_factory=dict, description="custom metrics")


class Event(Record):
    """An event of a run, such as a start, a save, a decision or a failure."""

    kind: str
    rank: int = 0
    step: int | None = None
    message: str = ""
    data: dict[str, Any] = Field(default_factory=dict)


class EvaluationDetail(Record):
    """The content of evaluations/best.json and last.json.

    `confusion` lists the nonzero cells of the confusion matrix as [true class, predicted class, count].
    """

    epoch: int
    step: int
    count: int
    top1: float
    top5: float
    loss: float
    classes: list[str]
    confusion: list[tuple[int, int, int]]
    metrics: Figures = Field(default_factory=dict)


class Failure(Record):
    """The content of ranks/failures/<rank>.json, which a failing process writes."""

    rank: int
    host: str
    pid: int
    step: int | None = None
    phase: str = Field(default="", description="build, train, evaluate, save …")
    exit_code: int = 1
    error: str = Field(description="type of the exception")
    what: str
    where: str = ""
    hints: list[str] = Field(default_factory=list, validation_alias=AliasChoices("hints", "mend"))
    traceback: str = ""
    excerpt: str = Field(default="", description="part of the traceback in the user's own files")
    consequence: bool = Field(default=False, description="True if another process failed first")


class Running(Record):
    """An active run in the user's list of runs. `time` is the start of the run."""

    pid: int = Field(gt=0, description="process id of the launcher")
    created: float = Field(description="start time of the launcher, because process ids are reused")
    host: str = Field(description="machine of the launcher")
    run: str = Field(description="the run folder, as an absolute path")
    hosts: list[str] = Field(description="machines of the run")
    command: list[str]

    @property
    def name(self) -> str:
        return Path(self.run).name

    @property
    def is_local(self) -> bool:
        return self.host == platform.node()


def append(path: Path, record: Record) -> None:
    append_line(path, record.model_dump_json())


def write_json(path: Path, content: Any) -> None:
    """Writes a record or plain data as a JSON file, atomically."""
    text = content.model_dump_json(indent=1) if isinstance(content, BaseModel) else json.dumps(content, indent=1)
    write_atomic(path, text)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects in a .jsonl file. Skips damaged lines, and a last line without a newline.

    Raises UserError if this user may not read the file.
    """
    if not path.is_file():
        return
    try:
        lines = path.open("rb")
    except OSError as error:
        hints = ("ask the file's owner for read permission",)
        raise UserError(f"{path.name} can't be read: {error.strerror}", str(path), hints) from error
    with lines:
        while line := lines.readline(MOST_BYTES):
            if not line.endswith(b"\n"):
                return
            if (content := parse_record_line(line)) is not None:
                yield content


def parse_record_line(line: bytes) -> dict[str, Any] | None:
    """Parses a line of a .jsonl file. Returns None if the line is damaged or its "time" is not a number."""
    try:
        content = parse_json(line)
    except ValueError:
        return None
    record = cast(dict[str, Any], content) if isinstance(content, dict) else {"time": None}
    return record if isinstance(record.get("time", 0.0), int | float) else None

"""The lines of metrics.jsonl and events.jsonl, and other small versioned files of the run folder.

Every record is one JSON object. A reader ignores keys that it doesn't know and refuses a higher version.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_BYTES, parse_json
from manyhands.core.synced import sync_file, sync_folder

VERSION = 1
# `Failure.error` where a whole machine, or the connection to it, has gone.
MACHINE_LOST = "MachineLost"
# The same where a process was killed.
PROCESS_ENDED = "ProcessEnded"
# The kind of event by which a head says that machines obey another one.
REPLACED = "head-replaced"
# The variable that names the file for a worker's `Failure`, beside the run folder, whose disk may be full.
FAILURE_FILE = "MANYHANDS_FAILURE_FILE"


def _word(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("should be a Python identifier")
    return name


# Figures of the user's own by their names.
Figures = dict[Annotated[str, AfterValidator(_word)], float]


class Record(BaseModel):
    """The base of all records."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    v: int = Field(default=VERSION, le=VERSION)
    time: float = Field(allow_inf_nan=False, description="seconds since 1970, by rank 0's clock")


class StepMetrics(Record):
    """What was measured since the step record before this one, over all processes."""

    kind: Literal["step"] = "step"
    epoch: int = Field(ge=0, description="epochs that are complete")
    step: int = Field(ge=0, description="updates made so far, this one included")
    step_in_epoch: int = Field(ge=0)
    steps_per_epoch: int = Field(ge=1)
    total_steps: int = Field(ge=0)
    loss: float = Field(description="mean over the samples since the last record")
    top1: float = Field(description="training accuracy over the same samples, 0 to 1")
    learning_rate: float
    images_per_s: float = Field(description="over all processes")
    samples: int = Field(description="samples that the record covers")
    data_share: float = Field(default=0.0, description="part of rank 0's time spent waiting for data, 0 to 1")
    saved_step: int = Field(default=0, description="the newest step that is saved")
    epoch_loss: float | None = Field(
        default=None, description="in the record that ends an epoch which was trained in one go: mean over its samples"
    )
    epoch_top1: float | None = Field(default=None, description="training accuracy over the same epoch, 0 to 1")
    asked: bool = Field(default=False, description="the user wants a line of this very step (run.log_steps)")


class PhaseMetrics(Record):
    """What each process spent its time on since the record of this kind before; see `core/phases.py`."""

    kind: Literal["phases"] = "phases"
    epoch: int = Field(ge=1, description="the epoch that was under way, counted from 1")
    step: int = Field(ge=0, description="updates made so far")
    seconds: dict[str, list[float]] = Field(description="by phase: of each rank; all phases add up to the time")
    queued_s: list[float] = Field(default=[], description="of that time, waiting for a processor: of each rank")


class EvaluationMetrics(Record):
    """One evaluation, in which each sample was counted once."""

    kind: Literal["evaluation"] = "evaluation"
    epoch: int
    step: int
    count: int = Field(description="samples evaluated: the length of the split")
    loss: float
    top1: float = Field(description="0 to 1")
    top5: float = Field(description="0 to 1; equals 1 where there are at most five classes")
    best: bool = Field(description="the best so far, by what train.best says")
    classes: int = Field(default=0, description="that a guess is among; 0 in older records")
    seconds: float = 0.0
    metrics: Figures = Field(default_factory=dict, description="figures of the user's own")


class Event(Record):
    """Something that happened: a start, a save, a decision, a failure."""

    kind: str
    rank: int = 0
    step: int | None = None
    message: str = ""
    data: dict[str, Any] = Field(default_factory=dict)


class EvaluationDetail(Record):
    """The content of evaluations/best.json and last.json.

    `confusion` is sparse: [true class, predicted class, count], for counts above zero.
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
    """ranks/failures/<rank>.json: why a process ended, written by itself before it leaves."""

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
    excerpt: str = Field(default="", description="what of it a user should see: the lines of their own files")
    consequence: bool = Field(default=False, description="True when another process's end caused it")


def append(path: Path, record: Record) -> None:
    """Adds one line; see `append_line`."""
    append_line(path, record.model_dump_json())


def append_line(path: Path, text: str) -> None:
    """Adds one line of text, on a line of its own also where an earlier writer was cut short in the middle of one.

    It is one write wherever there is room, since others may write to the same file.

    Raises:
        OSError: it can't be written, wholly at least: the disk is full, for one.
    """
    line = (text + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            write_all(descriptor, line)
        except OSError:
            # What did get there is no line; it goes again unless somebody else has written behind it.
            if line.startswith(os.pread(descriptor, len(line), size)):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Writes all of it: a single write may take a part only, on a disk that is nearly full or after a signal."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file by way of a temporary one; see `write_atomic`."""
    text = content.model_dump_json(indent=1) if isinstance(content, BaseModel) else json.dumps(content, indent=1)
    write_atomic(path, text)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a file of text by way of a temporary one, so that no reader ever sees half of it.

    Args:
        path: of the file.
        text: without its last line end.
        durable: it is there after a power cut, too, where the disk can promise that.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        if durable:
            sync_file(temporary)
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a .jsonl file as plain objects.

    A torn last line is left out, a damaged one, and all after an endless one.

    Raises:
        UserError: this user may not read it.
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
            if (content := line_object(line)) is not None:
                yield content


def line_object(line: bytes) -> dict[str, Any] | None:
    """A line of records as a plain object; None where it is damaged, as one is whose time is no number."""
    try:
        content = parse_json(line)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    record = cast(dict[str, Any], content)
    return record if isinstance(record.get("time", 0.0), int | float) else None

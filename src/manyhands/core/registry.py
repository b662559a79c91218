"""Which runs go on: the head of each leaves a small record in the user's state folder, and removes it in the end."""

import os
import platform
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from platformdirs import user_state_path
from pydantic import Field, ValidationError

from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.records import Record, write_json

# A clock that is set moves the start of every process a little.
_SAME_START_S = 2.0


class Running(Record):
    """A run that goes on; `time` is when it began."""

    pid: int = Field(gt=0, description="of the head, the process that owns the run")
    created: float = Field(description="when that process began: a number that comes again means another process")
    host: str = Field(description="the machine of the head")
    run: str = Field(description="the run folder, as a whole path")
    hosts: list[str] = Field(description="machines that take part")
    command: list[str]

    @property
    def name(self) -> str:
        """The run folder's own name."""
        return Path(self.run).name

    @property
    def here(self) -> bool:
        """True where the head is a process of this machine."""
        return self.host == platform.node()


def registry_folder() -> Path:
    """Where the records lie; a home on a shared disk has those of several machines."""
    return user_state_path("manyhands") / "running"


@contextmanager
def registered(run: Path, hosts: Iterable[str] = ()) -> Generator[None]:
    """Lists this process as the head of a run for as long as the block lasts."""
    me = psutil.Process()
    host = platform.node()
    record = Running(
        time=time.time(),
        pid=me.pid,
        created=me.create_time(),
        host=host,
        run=str(run.resolve()),
        hosts=list(hosts) or [host],
        command=me.cmdline(),
    )
    path = _path(record)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_json(path, record)
    except OSError as error:
        sys.stderr.write(f"manyhands: this run isn't listed for `manyhands ps`: {error}\n")
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def running() -> list[Running]:
    """The user's runs, the oldest first. Records whose head is gone are removed."""
    found: list[Running] = []
    for path in registry_folder().glob("*.json"):
        record = _read(path)
        if record is None:
            continue
        if goes_on(record):
            found.append(record)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.time)


def goes_on(record: Running) -> bool:
    """True while the record is there and its head lives; a head on another machine is taken at its word."""
    if not _path(record).is_file():
        return False
    return not record.here or is_alive(record)


def is_alive(record: Running) -> bool:
    """True where the head's number still belongs to the process that wrote the record."""
    try:
        process = psutil.Process(record.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        same = abs(process.create_time() - record.created) < _SAME_START_S
        return same or process.cmdline() == record.command
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # another user's process: the number was given anew
        return False


def signal_head(record: Running, number: int) -> None:
    """Sends a signal to the head, unless it has ended."""
    if is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _path(record: Running) -> Path:
    return registry_folder() / f"{record.host}-{record.pid}.json"


def _read(path: Path) -> Running | None:
    """The record, or None where it went away meanwhile or isn't one that this version knows."""
    with suppress(OSError, ValueError, ValidationError):
        return Running.model_validate(parse_json(read_bytes(path)))
    return None

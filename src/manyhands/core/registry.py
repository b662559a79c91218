"""Which runs go on: the head of each leaves a small record in the user's state folder, and removes it in the end."""

import hashlib
import os
import platform
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from platformdirs import user_state_path
from pydantic import Field, ValidationError

from manyhands.core.claim import agents_work
from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.records import Record, write_json
from manyhands.core.shown import say

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
        say(f"can't register this run for `manyhands ps`: {error}")
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class Reach(Record):
    """How this user's own command reached the machines of a run."""

    run: str = Field(description="the run folder, as a whole path")
    options: dict[str, str] = Field(description="of the cluster: ssh, python, workdir")


def remember_reach(run: Path, options: dict[str, str]) -> None:
    """Notes in the user's own state folder how a run's machines are reached, for what looks at the run later.

    The run folder says it too, but that may be somebody else's by then, and such words are executed.
    """
    path = _reach_path(run)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in path.parent.glob("*.json"):
            found = _reach(other)
            if found is None or not Path(found.run).exists():
                other.unlink(missing_ok=True)
        write_json(path, Reach(time=time.time(), run=str(run.resolve()), options=options))
    except OSError as error:
        say(f"can't save the machines' ssh settings for `manyhands logs`: {error}")


def remembered_reach(run: Path) -> dict[str, str] | None:
    """What `remember_reach` noted of a run folder; None where this user hasn't launched it from here."""
    found = _reach(_reach_path(run))
    return found.options if found else None


def _reach_path(run: Path) -> Path:
    name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
    return user_state_path("manyhands") / "reached" / f"{name}.json"


def _reach(path: Path) -> Reach | None:
    with suppress(OSError, ValueError, ValidationError):
        return Reach.model_validate(parse_json(read_bytes(path)))
    return None


def running() -> list[Running]:
    """The user's runs that have a head, the oldest first. Records of which nothing is left are removed."""
    return _listed()[0]


def headless() -> list[Running]:
    """The user's runs whose head is gone, and whose processes work on in a folder that is to be seen here."""
    return _listed()[1]


def _listed() -> tuple[list[Running], list[Running]]:
    headed: list[Running] = []
    left: list[Running] = []
    for path in registry_folder().glob("*.json"):
        record = _read(path)
        if record is None:
            continue
        if is_running(record):
            headed.append(record)
        elif agents_work(Path(record.run) / "ranks"):
            left.append(record)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    newest = {record.run: record for record in sorted(left, key=lambda record: record.time)}
    for record in headed:  # another head has taken its place
        newest.pop(record.run, None)
    return sorted(headed, key=lambda record: record.time), list(newest.values())


def head_of(run: Path) -> Running | None:
    """The head of the run in a folder: of several, one here and the newest, as another may be lost with its machine."""
    heads = [record for record in running() if record.run == str(run.resolve())]
    return max(heads, key=lambda record: (record.here, record.time), default=None)


def headed_here(run: Path) -> bool:
    """True where a process of this machine is the head of the run in a folder."""
    head = head_of(run)
    return bool(head and head.here)


def is_running(record: Running) -> bool:
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
        record = Running.model_validate(parse_json(read_bytes(path)))
        # A run folder that was moved has left a link in its old place.
        return record.model_copy(update={"run": str(Path(record.run).resolve())})
    return None

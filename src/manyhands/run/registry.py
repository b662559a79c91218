"""The list of this user's active runs, and how their machines are reached, in the user's state folder."""

import hashlib
import os
import platform
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
from platformdirs import user_state_path
from pydantic import Field, ValidationError

from manyhands.cluster.agents.claim import agents_work
from manyhands.core.files import parse_json, read_bytes
from manyhands.core.records import Record, Running, write_json
from manyhands.core.terminal import say

# Setting the clock moves the start times of all processes a little.
_SAME_START_S = 2.0
R = TypeVar("R", bound=Record)


class Reach(Record):
    """How this user's own command reached the machines of a run."""

    run: str = Field(description="the run folder, as an absolute path")
    options: dict[str, str] = Field(description="of the cluster: ssh, python, workdir")


def _load(kind: type[R], path: Path) -> R | None:
    """Reads a record; None if it is gone, damaged, or of a newer version."""
    with suppress(OSError, ValueError, ValidationError):
        return kind.model_validate(parse_json(read_bytes(path)))
    return None


def _write(path: Path, record: Record, purpose: str) -> None:
    """Writes a record that only this user can read; prints a message if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_json(path, record)
    except OSError as error:
        say(f"can't {purpose}: {error}")


def registry_folder() -> Path:
    """Returns the folder of the list; in a home on a shared disk, it has the runs of several machines."""
    return user_state_path("manyhands") / "running"


@contextmanager
def registered(run: Path, hosts: Iterable[str] = ()) -> Generator[None]:
    """Lists this process as the head of a run until the end of the block."""
    me, host = psutil.Process(), platform.node()
    record = Running(
        time=time.time(),
        pid=me.pid,
        created=me.create_time(),
        host=host,
        run=str(run.resolve()),
        hosts=list(hosts) or [host],
        command=me.cmdline(),
    )
    _write(_path(record), record, "register this run for `manyhands ps`")
    try:
        yield
    finally:
        with suppress(OSError):
            _path(record).unlink(missing_ok=True)


def remember_reach(run: Path, options: dict[str, str]) -> None:
    """Saves how the machines of a run are reached, for later commands about the run.

    The run folder has these options too, but somebody else may have written it by then, and they are executed.
    """
    path = _reach_path(run)
    with suppress(OSError):
        for other in path.parent.glob("*.json"):
            found = _load(Reach, other)
            if found is None or not Path(found.run).exists():
                other.unlink(missing_ok=True)
    record = Reach(time=time.time(), run=str(run.resolve()), options=options)
    _write(path, record, "save the machines' ssh settings for `manyhands logs`")


def remembered_reach(run: Path) -> dict[str, str] | None:
    """Returns the options that `remember_reach` saved; None if this user hasn't launched the run from here."""
    found = _load(Reach, _reach_path(run))
    return found.options if found else None


def _reach_path(run: Path) -> Path:
    name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
    return user_state_path("manyhands") / "reached" / f"{name}.json"


def running() -> list[Running]:
    """Returns the user's runs that have a head, the oldest first. Records of which nothing is left are removed."""
    return _listed()[0]


def headless() -> list[Running]:
    """Returns the user's runs whose head is gone, and whose processes still work in a folder that is visible here."""
    return _listed()[1]


def _listed() -> tuple[list[Running], list[Running]]:
    headed: list[Running] = []
    left: list[Running] = []
    for path in registry_folder().glob("*.json"):
        if (record := _load(Running, path)) is None:
            continue
        # A run folder that was moved has left a link in its old place.
        try:
            record = record.model_copy(update={"run": str(Path(record.run).resolve())})
        except (OSError, ValueError):
            continue
        if is_running(record):
            headed.append(record)
        elif agents_work(Path(record.run) / "ranks"):
            left.append(record)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    newest = {record.run: record for record in sorted(left, key=lambda record: record.time)}
    for record in headed:  # another head has replaced it
        newest.pop(record.run, None)
    return sorted(headed, key=lambda record: record.time), list(newest.values())


def head_of(run: Path) -> Running | None:
    """Returns the head of a run: of several, one here and the newest, as another may be lost with its machine."""
    heads = [record for record in running() if record.run == str(run.resolve())]
    return max(heads, key=lambda record: (record.here, record.time), default=None)


def headed_here(run: Path) -> bool:
    """Returns True if a process of this machine is the head of a run."""
    head = head_of(run)
    return bool(head and head.here)


def is_running(record: Running) -> bool:
    """Returns True while the record exists and its head lives; a head on another machine is assumed to live."""
    return _path(record).is_file() and (not record.here or is_alive(record))


def is_alive(record: Running) -> bool:
    """Returns True if the process that wrote the record still has its process id."""
    try:
        process = psutil.Process(record.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        same = abs(process.create_time() - record.created) < _SAME_START_S
        return same or process.cmdline() == record.command
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # denied: the id was reused by another user's process
        return False


def signal_head(record: Running, number: int) -> None:
    """Sends a signal to the head, unless it has ended."""
    if is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _path(record: Running) -> Path:
    return registry_folder() / f"{record.host}-{record.pid}.json"

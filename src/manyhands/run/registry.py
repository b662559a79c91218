"""This user's runs: a registry of active runs, their ssh options, lookup by name, and stop requests."""

import hashlib
import os
import platform
import shlex
import signal
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
from platformdirs import user_state_path
from pydantic import Field

from manyhands.cluster.agents.folders import Term, advance_term, find_local_agents, has_working_agents, read_term
from manyhands.core import choices, terminal, timeouts
from manyhands.core.errors import RunError, UserError
from manyhands.core.files import read_object
from manyhands.core.records import Event, Record, Running, write_json
from manyhands.core.run_folder import RunFolder, resume_command
from manyhands.report import follow, read

RUNS = Path("runs")
_POLL_S = 0.1
R = TypeVar("R", bound=Record)


class SshOptionsRecord(Record):
    """The options with which this user connected to the machines of a run."""

    run: str = Field(description="the run folder, as an absolute path")
    options: dict[str, str] = Field(description="options of the cluster: ssh, python, workdir")


def _load_record(kind: type[R], path: Path) -> R | None:
    """Reads a record. Returns None if the file is missing, damaged, or written by a newer version."""
    with suppress(UserError):
        return read.parse(kind, read_object(path) or {}, path)
    return None


def _write_record(path: Path, record: Record, purpose: str) -> None:
    """Writes a record that only this user can read. If that fails, prints "can't `purpose`" and the error."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_json(path, record)
    except OSError as error:
        terminal.say(f"can't {purpose}: {error}")


def registry_folder() -> Path:
    """Returns the folder of the registry. Machines that share a home directory share the registry."""
    return user_state_path("manyhands") / "running"


@contextmanager
def registered(run: Path, hosts: Iterable[str] = ()) -> Generator[None]:
    me, host = psutil.Process(), platform.node()
    record = Running(
        time=time.time(), pid=me.pid, created=me.create_time(), host=host, run=str(run.resolve()),
        hosts=list(hosts) or [host], command=me.cmdline(),
    )  # fmt: skip
    _write_record(_record_path(record), record, "register this run for `manyhands ps`")
    try:
        yield
    finally:
        with suppress(OSError):
            _record_path(record).unlink(missing_ok=True)


def save_ssh_options(run: Path, options: dict[str, str]) -> None:
    """Saves the ssh options for a run's machines, for later commands such as `manyhands logs`.

    These options are executed, so they aren't read from the run folder, where another user may have changed them.
    """
    path = _ssh_options_path(run)
    with suppress(OSError):
        for other in path.parent.glob("*.json"):
            found = _load_record(SshOptionsRecord, other)
            if found is None or not Path(found.run).exists():
                other.unlink(missing_ok=True)
    record = SshOptionsRecord(time=time.time(), run=str(run.resolve()), options=options)
    _write_record(path, record, "save the machines' ssh settings for `manyhands logs`")


def saved_ssh_options(run: Path) -> dict[str, str] | None:
    """Returns the options that `save_ssh_options` saved; None if this user has not launched the run from here."""
    found = _load_record(SshOptionsRecord, _ssh_options_path(run))
    return found.options if found else None


def _ssh_options_path(run: Path) -> Path:
    name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
    return user_state_path("manyhands") / "reached" / f"{name}.json"


def list_active_runs() -> list[Running]:
    """Returns the user's runs that have a launcher, the oldest first. Removes the records of ended runs."""
    return _list_runs()[0]


def list_headless_runs() -> list[Running]:
    """Returns the user's runs whose launcher has ended, but whose workers still run, as the run folders show."""
    return _list_runs()[1]


def _list_runs() -> tuple[list[Running], list[Running]]:
    headed, left = list[Running](), list[Running]()
    for path in registry_folder().glob("*.json"):
        if (record := _load_record(Running, path)) is None:
            continue
        try:  # a moved run folder has a link at its old path
            record = record.model_copy(update={"run": str(Path(record.run).resolve())})
        except (OSError, ValueError):
            continue
        if is_running(record):
            headed.append(record)
        elif has_working_agents(Path(record.run) / "ranks"):
            left.append(record)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    newest = {record.run: record for record in sorted(left, key=lambda record: record.time)}
    for record in headed:  # another launcher has taken over
        newest.pop(record.run, None)
    return sorted(headed, key=lambda record: record.time), list(newest.values())


def find_launcher(run: Path) -> Running | None:
    """Returns the record of a run's launcher, preferably on this machine, then the newest; None if the run has none."""
    heads = [record for record in list_active_runs() if record.run == str(run.resolve())]
    return max(heads, key=lambda record: (record.is_local, record.time), default=None)


def has_local_launcher(run: Path) -> bool:
    head = find_launcher(run)
    return bool(head and head.is_local)


def is_running(record: Running) -> bool:
    """Returns True while a launcher's record exists, unless the launcher was on this machine and has ended."""
    return _record_path(record).is_file() and (not record.is_local or is_alive(record))


def is_alive(record: Running) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # denied: the id was reused by another user's process
        process = psutil.Process(record.pid)
        # Setting the clock moves the start times of all processes a little.
        same = abs(process.create_time() - record.created) < 2.0 or process.cmdline() == record.command
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False


def signal_launcher(record: Running, number: int) -> None:
    if is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _record_path(record: Running) -> Path:
    return registry_folder() / f"{record.host}-{record.pid}.json"


def find_run(word: str, *, parts: bool = True, active: bool = False) -> RunFolder:
    """Finds a run by folder, name, part of a name or "last". Raises UserError if no run matches, or several do.

    If `parts` is False, a part of a name must be its beginning, for callers that also accept a data set. If `active`
    is True, active runs take precedence over ended ones.
    """
    working = {Path(record.run): None for records in _list_runs() for record in records}
    for folder in (RunFolder(Path(word).expanduser()), RunFolder(RUNS / word)):
        if word and (folder.exists() or folder.path.resolve() in working):
            return folder
    if word == "last":
        for newest in read.newest_runs((RUNS, Path()), list(working), 1):
            terminal.say(f"the last run is {newest}")
            return RunFolder(newest)
    known = {path.resolve(): path for path in (*(job.parent for job in RUNS.glob("*/job.toml")), *working)}.values()
    for paths in (working, known) if active else (known,):
        names = matching_names(word, [path.name for path in paths], parts=parts)
        found = [path for path in paths if path.name in names]
        if len(found) > 1:
            raise UserError(f'"{word}" matches {len(found)} runs', word, (f"name one of {', '.join(map(str, found))}",))
        if found:
            return RunFolder(found[0])
    if "/" in word or Path(word).exists():
        raise read.missing_run_error(Path(word))
    names = list(dict.fromkeys(sorted(path.name for path in known)))
    listed = f"runs: {', '.join(names[:8])}" if names else "start a run with manyhands train"
    hints = (choices.did_you_mean(word, names), listed)
    raise UserError(f'no run is called "{word}"', word or "RUN", tuple(filter(None, hints)))


def matching_names(word: str, names: Iterable[str], *, parts: bool = True) -> list[str]:
    """Returns the names equal to `word`; if none is, those that begin with `word`, or (`parts`) contain it."""
    matches: list[Callable[[str], bool]] = [word.__eq__, lambda name: name.startswith(word), lambda name: word in name]
    found = ([name for name in sorted(set(names)) if fits(name)] for fits in matches[: 3 if parts else 2])
    return next(filter(None, found), []) if word else []


def read_run_named(word: str) -> read.RunData | None:
    try:
        folder = find_run(word, parts=False)
    except UserError:
        return None
    return read.read_run(folder.path)


def find_reference(word: str) -> Path:
    """Returns `word` if it is an existing path, otherwise the folder of the run with this name (see `find_run`)."""
    place = Path(word).expanduser()
    return place if place.exists() else find_run(word).path


def resolve_resume(word: str | None) -> str | None:
    """Converts the name of a run in --resume to its folder. Returns None, "auto", "never" and paths unchanged."""
    files = (".tar", ".pth", ".pt", ".ckpt", ".safetensors")
    if not word or word in {"auto", "never"} or "/" in word or word.endswith(files) or Path(word).exists():
        return word
    return str(find_reference(word))


def require_launcher(folder: RunFolder) -> Running:
    """Returns the record of a run's launcher. Raises UserError if the run has no launcher."""
    if head := find_launcher(folder.path):
        return head
    run = shlex.quote(str(folder.path))
    if has_working_agents(folder.ranks):
        what = "the launcher of the run is gone, but its processes still train"
        hints = [f"to take over the run, see manyhands why {run}"]
        hints.append(f"or save and stop the processes: manyhands stop {run}")
    else:
        what = "the run is not active"
        hints = [f"to see how the run ended: manyhands why {run}", f"to resume the run: {resume_command(folder.path)}"]
        hints.append("to list active runs: manyhands ps")
    raise UserError(what, str(folder.path), tuple(hints))


def stop_headless_run(folder: RunFolder, *, now: bool) -> bool:
    """Stops a run that has workers, but no launcher on this machine; returns False for any other run.

    The workers save and exit. With `now`, workers on this machine are killed without saving.
    """
    run, ranks, term = folder.path, folder.ranks, read_term(folder.ranks)
    # The launcher of a run that isn't detached may be on another machine, unless it is known to be gone.
    known_gone = term != Term() or run.resolve() in {Path(record.run) for record in list_headless_runs()}
    if not known_gone or has_local_launcher(run) or not has_working_agents(ranks):
        return False
    how = "ending the processes" if now else "asked the processes"
    terminal.say(f"{how} of {run}{'' if now else ' to save and stop'}; the launcher is not on this machine")
    if term != Term():
        advance_term(ranks, Term(term.head + 1))
    for pid in find_local_agents(ranks):  # a suspended agent doesn't notice the launcher's end; its workers end with it
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL if now else signal.SIGCONT)
    while has_working_agents(ranks):
        time.sleep(_POLL_S)
    return True


def stop_run(record: Running, *, now: bool) -> Event | None:
    """Stops a run and waits for its end. With `now`, the run doesn't save. Returns the run's final event, or None.

    Raises UserError if the launcher is on another machine, and RunError if it survived SIGKILL.
    """
    if not record.is_local:
        hints = (f"run this on {record.host}: manyhands stop {shlex.quote(record.name)}",)
        raise UserError(f"{record.name} was launched from {record.host}, not from this machine", record.run, hints)
    signal_launcher(record, signal.SIGTERM)
    if now:
        terminal.say(f"ending {record.name} (pid {record.pid}) without waiting for a save")
        time.sleep(0.5)  # two signals at once may arrive as one
        signal_launcher(record, signal.SIGINT)
        if not _ends_within(timeouts.KILL_RUN_S, record):
            terminal.say(f"{record.name} did not end within {timeouts.KILL_RUN_S:.0f} s: killing the run")
            signal_launcher(record, signal.SIGKILL)
            if not _ends_within(timeouts.KILL_RUN_S, record):
                raise RunError(f"{record.name} survived SIGKILL", f"pid {record.pid}", (f"run kill -9 {record.pid}",))
        return follow.read_progress(record).end
    terminal.say(f"asked {record.name} (pid {record.pid}) to save and stop")
    shown, wait_s = "", 2.0  # a stop that takes longer is explained
    while not _ends_within(wait_s, record):
        stopping = follow.read_progress(record).state == "stopping"
        words = "waiting for the last checkpoint" if stopping else "waiting for the current update"
        if words != shown:
            terminal.say(f"{words}; use --now to end the run at once")
        shown, wait_s = words, _POLL_S
    return follow.read_progress(record).end


def _ends_within(limit_s: float, record: Running) -> bool:
    until = time.monotonic() + limit_s
    while (runs := is_running(record)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return not runs

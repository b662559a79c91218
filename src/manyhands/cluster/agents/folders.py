"""The run folder on a machine: opening, job file, lock of an active run, id of the run, and term of its launcher.

All folders of one run, on several machines or on a shared disk, have the same id. The owner of the lock writes the id
of its launch into the file `holder`.
A machine obeys the launcher with the highest term, which is stored in the run folder. Each new launcher of a detached
run increments the term. Agents with a lower term have their workers save and exit.
"""

import contextlib
import errno
import fcntl
import re
import secrets
import shlex
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from manyhands.core import files
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import LEAVING_S

_ID = re.compile("[0-9a-f]{8,64}")


def use_run_folder(path: Path) -> RunFolder:
    """Opens or creates a run folder. Raises UserError if the folder isn't writable, or has files but no run."""
    with writing_into(path):
        path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    if not folder.exists() and any(entry.name != "ranks" for entry in path.iterdir()):
        hints = ("choose a new folder or the folder of an earlier run",)
        raise UserError(f"{path} is not empty and contains no run", "--out", hints)
    with writing_into(path):
        files.require_writable(path)
    return folder


@contextlib.contextmanager
def writing_into(path: Path) -> Generator[None]:
    """Converts an OSError of the block to a UserError with the reason why the run folder can't be written."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            hints = ("free space on this disk, or choose a folder on another disk: --out DIR",)
            raise UserError(f"the run folder {path} can't be written: {error.strerror}", str(path), hints) from error
        what = f"the run folder {path} can't be {'written' if path.is_dir() else 'created'}: {error.strerror or error}"
        if path.is_file():
            what = f"{path} is a file, not a folder"
        if RunFolder(path).exists():
            hints = (f"copy the run to another disk, and use the copy: cp -r {shlex.quote(str(path))} DIR",)
            raise UserError(what, str(path), hints) from error
        raise UserError(what, "--out", ("choose another folder: --out DIR",)) from error


def replace_job(folder: RunFolder, text: str) -> None:
    """Writes job.toml. Renames the job.toml of an earlier training with other options to job-1.toml, job-2.toml …."""
    with files.temporary_path(folder.job) as part:
        part.write_text(text, encoding="utf-8")
        if folder.has_trained() and folder.job.is_file():
            same = False
            with contextlib.suppress(ValueError):
                before = files.decode_text(files.read_bytes(folder.job, files.MOST_TOML_BYTES))
                same = files.parse_toml(before) == files.parse_toml(text)
            if not same:
                folder.job.rename(files.unused_path(folder.path, "job", ".toml"))
        part.replace(folder.job)


def claim_run_folder(folder: RunFolder, holder: str = "", patience_s: float = 0) -> FileLock | None:
    """Locks a run folder until this process ends; returns None if another machine of the same launch has the lock.

    `holder` is the id of the launch, random by default. `patience_s` limits the wait for the lock, and if it exceeds
    LEAVING_S, also the wait for each agent of an earlier start. Raises Timeout if another run is active in the folder.
    """
    lock, holder = FileLock(folder.ranks / "lock"), holder or secrets.token_hex(16)
    until = time.monotonic() + patience_s
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if _read_id(folder.ranks / "holder") == holder:
                return None
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    try:
        for path in folder.ranks.glob("agent-*.lock"):
            with FileLock(path, timeout=max(patience_s, LEAVING_S)):
                pass
    except Timeout:
        lock.release()
        raise
    files.write_atomic(folder.ranks / "holder", holder)
    return lock


def agent_lock(ranks: Path, machine: int, generation: int = 0) -> FileLock:
    """Returns the lock that an agent holds while its workers run or save, even after the launcher was killed.

    Each start has its own lock, because a disconnected machine may keep its lock on a shared disk.
    """
    ranks.mkdir(parents=True, exist_ok=True)
    # An agent uses the user's umask for data, so the mode is explicit.
    return FileLock(ranks / f"agent-{machine}-{generation}.lock", timeout=LEAVING_S, mode=0o600)


def agent_has_left(ranks: Path, machine: int, generation: int) -> bool:
    """Returns True if the `agent_lock` is free: the workers of that machine and start no longer train or save."""
    path = ranks / f"agent-{machine}-{generation}.lock"
    return not path.exists() or not _is_locked(path)


def has_working_agents(ranks: Path, after: int = -1) -> bool:
    """Returns True while an agent runs workers of a start with an index above `after`. `ranks` is the run's ranks/."""
    numbered = ((path.stem.rpartition("-")[2], path) for path in ranks.glob("agent-*-*.lock"))
    return any(number.isdecimal() and int(number) > after and _is_locked(path) for number, path in numbered)


def find_local_agents(ranks: Path) -> list[int]:
    """Returns the process ids of this machine's agents with workers of the run; [] on systems without /proc/locks."""
    files, rows = {path.stat().st_ino for path in ranks.glob("agent-*-*.lock")}, list[list[str]]()
    with contextlib.suppress(OSError):
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:123456 0 EOF
        rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    return sorted({int(row[4]) for row in rows if len(row) > 5 and int(row[5].rpartition(":")[2]) in files} - {-1})


def _is_locked(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0, mode=0o600):
            return False
    except Timeout:
        return True
    except OSError:  # on a read-only disk, where a lock can't be acquired exclusively
        with path.open("rb") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        return True


def run_id(folder: RunFolder) -> str:
    """Returns the id of the run in a folder; an empty string if the folder has no run."""
    return _read_id(folder.ranks / "id")


def set_run_id(folder: RunFolder, wanted: str = "") -> str:
    """Writes and returns the id of a run: `wanted`, or a new random id if `wanted` is empty."""
    found = wanted or secrets.token_hex(16)
    files.write_atomic(folder.ranks / "id", found)
    return found


def _read_id(path: Path) -> str:
    """Returns the id in a file; an empty string if the file is missing or contains no id."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        word = file.read(65).decode("ascii", "replace").strip()
        return word if _ID.fullmatch(word) else ""
    return ""


class Term(NamedTuple):
    """The number of a launcher and the number of its start of workers. Agents obey only the highest Term."""

    head: int = 0
    start: int = 0


def read_term(ranks: Path) -> Term:
    """Returns the highest term stored in `ranks`, the folder ranks/ of a run; (0, 0) if no term is stored."""
    with contextlib.suppress(OSError, ValueError):
        head, start = map(int, (ranks / "term").read_text("ascii").split())
        return Term(head, start)
    return Term()


def advance_term(ranks: Path, wanted: Term) -> Term:
    """Stores the term `wanted` in `ranks`, unless a higher term is stored there; returns the higher of both terms."""
    ranks.mkdir(parents=True, exist_ok=True)
    with files.private_files(), FileLock(ranks / "term.lock", mode=0o600):
        found = read_term(ranks)
        if wanted > found:
            files.write_atomic(ranks / "term", f"{wanted.head} {wanted.start}", durable=True)
        return max(wanted, found)

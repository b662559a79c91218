"""Whose a run folder is: a lock while a run goes on in it, and the run's id, which outlives its processes.

Several machines may keep a part of one run, each in a folder of the same name, or share one folder. So whoever holds
the lock writes beside it who it is, and the parts of one run bear one id.
"""

import re
import secrets
import time
from contextlib import nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from manyhands.core.folder import RunFolder
from manyhands.core.records import write_atomic
from manyhands.core.timeouts import LEAVING_S

POLL_S = 0.05
_ID = re.compile(r"[0-9a-f]{8,64}")


def new_holder() -> str:
    """A name for one start of a run."""
    return secrets.token_hex(16)


def claim(folder: RunFolder, holder: str, patience_s: float = 0.0, leaving_s: float = LEAVING_S) -> FileLock | None:
    """Takes the lock of a run folder for as long as this process lives.

    Args:
        folder: its ranks/ is there.
        holder: names the start of a run; processes that name the same share the folder.
        patience_s: so long for one of them to write that it has the lock, or for who is leaving.
        leaving_s: so long for each agent of an earlier start to leave.

    Returns:
        The lock; None where another machine of the same start has it.

    Raises:
        Timeout: another run goes on in the folder.
    """
    lock = FileLock(folder.ranks / "lock")
    until = time.monotonic() + patience_s
    while True:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if _read(folder.ranks / "holder") == holder:
                return None
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
        else:
            try:
                _wait_for_agents(folder, leaving_s)
            except Timeout:
                lock.release()
                raise
            write_atomic(folder.ranks / "holder", holder)
            return lock


def hold_as_agent(ranks: Path, machine: int, generation: int = 0) -> FileLock:
    """What the agent holds while processes of its machine run: they may outlive a head that is killed, and save.

    After a fault the run's own later starts don't wait for who is cut off and may hold on to a disk that all share.
    """
    ranks.mkdir(parents=True, exist_ok=True)
    # An agent works under the umask that the user has for data, so the mode is said.
    return FileLock(_agent_lock(ranks, machine, generation), timeout=LEAVING_S, mode=0o600)


def agent_has_left(ranks: Path, machine: int, generation: int) -> bool:
    """True once no agent holds what `hold_as_agent` gave: a machine that was cut off may train and save for a while."""
    path = _agent_lock(ranks, machine, generation)
    try:
        with FileLock(path, timeout=0) if path.exists() else nullcontext():
            return True
    except Timeout:
        return False


def _agent_lock(ranks: Path, machine: int, generation: int) -> Path:
    return ranks / f"agent-{machine}-{generation}.lock"


def set_aside(ranks: Path, generation: int) -> bool:
    """True where a later start of the run is at work on this disk: who was cut off, or stood still, is to leave it."""
    for path in ranks.glob("agent-*-*.lock"):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and int(number) > generation:
            try:
                FileLock(path, timeout=0, mode=0o600).acquire().lock.release()
            except Timeout:
                return True
    return False


def agents_work(ranks: Path) -> bool:
    """True while an agent has processes of the run at work on this disk."""
    return set_aside(ranks, -1)


def agents_here(ranks: Path) -> list[int]:
    """Process ids of the agents on this machine that hold processes of the run; empty where the system doesn't say."""
    files = {path.stat().st_ino for path in ranks.glob("agent-*-*.lock")}
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:123456 0 EOF
    rows = [line.split() for line in lines]
    return sorted({int(row[4]) for row in rows if len(row) > 5 and int(row[5].rpartition(":")[2]) in files} - {-1})


def _wait_for_agents(folder: RunFolder, patience_s: float) -> None:
    """Until the processes of an earlier start have left.

    Raises:
        Timeout: they are at work still.
    """
    for path in folder.ranks.glob("agent-*.lock"):
        with FileLock(path, timeout=patience_s):
            pass


def run_id(folder: RunFolder) -> str:
    """The id of the run in a folder; empty where it has none."""
    return _read(folder.ranks / "id")


def set_run_id(folder: RunFolder, wanted: str = "") -> str:
    """Writes a run's id, a new one where none is given, and returns it."""
    found = wanted or secrets.token_hex(16)
    write_atomic(folder.ranks / "id", found)
    return found


def _read(path: Path) -> str:
    """The word in a file; empty where it isn't there or isn't one of ours."""
    try:
        with path.open("rb") as file:
            word = file.read(65).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
    return word if _ID.fullmatch(word) else ""

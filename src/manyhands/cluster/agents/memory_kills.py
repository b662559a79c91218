"""Whether the system has killed a process for its memory: by what its group (cgroup) counts, or the kernel's log."""

import contextlib
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

from manyhands.core.pulse import Pulse
from manyhands.core.records import PROCESS_ENDED, Failure

_ROOT = Path("/sys/fs/cgroup")
_LOG = Path("/dev/kmsg")
# A process is in one group for long as a rule.
_LOOK_S = 0.2
# An older line of the log is about another process of the same number.
_RECENT_S = 60.0


class MemoryKills:
    """Remembers what the groups of processes have counted while these live."""

    def __init__(self) -> None:
        self._counted: dict[Path, int] = {}
        self._groups: dict[int, set[Path]] = {}  # one that has just ended is in that of the whole system
        self._due = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Notes the groups that the processes are in; called often."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOK_S
        for pid in pids:
            if group := _group_of(pid):
                self._groups.setdefault(pid, set()).add(group)
                self._counted.setdefault(group, _kills(group))

    def record(self, rank: int, pid: int, pulse: Pulse | None) -> Failure | None:
        """What a process couldn't leave that the system has killed for memory; None where it wasn't, or isn't known."""
        if not (how := self.told_of(pid)):
            return None
        mend = ["fewer processes on this machine", "a smaller train.micro_batch", "--parallel fsdp over several"]
        return Failure(
            time=time.time(), rank=rank, host=platform.node(), pid=pid, step=pulse and pulse.step,
            phase=pulse.phase if pulse else "", error=PROCESS_ENDED, what=f"rank {rank} was killed {how}", mend=mend,
        )  # fmt: skip

    def told_of(self, pid: int) -> str:
        """How a process that was killed was killed for memory, for the user; empty where it wasn't, or isn't known."""
        for group in self._groups.get(pid, ()):
            if (now := _kills(group)) > self._counted[group]:
                self._counted[group] = now
                limit = _limit(group)
                return "by the system, for memory" + (f": its group may have {limit >> 20:,} MiB" if limit else "")
        return "by the system, for memory" if _in_log(pid) else ""


def _group_of(pid: int) -> Path | None:
    """The folder of a process's group for memory; None where there is none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names and "memory" not in names.split(","):
                continue
            top = _ROOT / "memory" if names else _ROOT
            for place in (top / path.lstrip("/"), top):  # in a container the path may be that outside of it
                if _counter(place):
                    return place
    return None


def _counter(group: Path) -> Path | None:
    return next((one for name in ("memory.events", "memory.oom_control") if (one := group / name).is_file()), None)


def _kills(group: Path) -> int:
    """How many of a group's processes were killed for memory; 0 where that isn't known."""
    with contextlib.suppress(OSError, ValueError):
        counter = _counter(group)
        for line in counter.read_text().splitlines() if counter else ():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _limit(group: Path) -> int:
    """Bytes that a group may have; 0 where there is no limit of its own."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found = int((group / name).read_text())
            return found if found < 1 << 60 else 0
    return 0


def _in_log(pid: int) -> bool:
    """Whether the kernel's log, where this user may read it, says so of a process."""
    with contextlib.suppress(OSError):
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                try:
                    record = os.read(log, 1 << 13).decode(errors="replace")
                except BrokenPipeError:  # overwritten meanwhile; the next read goes on behind it
                    continue
                head, _, text = record.partition(";")
                at_s = int(head.split(",")[2]) / 1e6
                if f"Killed process {pid} " in text and time.monotonic() - at_s < _RECENT_S:
                    return True
        except (BlockingIOError, IndexError, ValueError):
            return False
        finally:
            os.close(log)
    return False

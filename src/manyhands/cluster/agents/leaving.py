"""How long the processes of a machine are given to leave, once one of the run has failed."""

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from manyhands.core.timeouts import LEAVE_S, SAVE_MOST_S, SAVE_QUIET_S
from manyhands.parallel.heartbeat import rescue_path

# Until the next collective they compute, for so many times as long as an update takes.
UPDATES = 2.0


class Leaving:
    """Gives processes time to leave, which those that save have as long as they get on.

    Args:
        scratch: where they say that they save.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._since = 0.0
        self._signs: dict[int, tuple[object, float]] = {}

    @property
    def begun(self) -> bool:
        """True once one of the run has failed."""
        return bool(self._since)

    def begin(self) -> None:
        """Notes that one of the run has failed; the second time changes nothing."""
        self._since = self._since or time.monotonic()

    def patient(self, left: Mapping[int, int], usual_s: float) -> bool:
        """Whether those that are left (process id by rank) have time yet; `usual_s` is what an update takes."""
        now = time.monotonic()
        began_s = now - self._since
        return began_s < LEAVE_S + UPDATES * usual_s or (
            began_s < SAVE_MOST_S and any(self._saves(rank, pid, now) for rank, pid in left.items())
        )

    def _saves(self, rank: int, pid: int, now: float) -> bool:
        """Whether a process saves what it has, and gets on with it."""
        if not rescue_path(self._scratch, rank).exists():
            return False
        sign = _done_by(pid)
        if rank not in self._signs or self._signs[rank][0] != sign:
            self._signs[rank] = sign, now
        return now - self._signs[rank][1] < SAVE_QUIET_S


def _done_by(pid: int) -> object:
    """What a process has computed, and written where the system tells."""
    try:
        process = psutil.Process(pid)
        written = process.io_counters().write_chars if hasattr(process, "io_counters") else 0
        return process.cpu_times()[:2], written
    except psutil.Error:
        return None

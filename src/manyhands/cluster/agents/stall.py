"""Detects a stalled run from worker heartbeats and identifies the rank that other ranks are waiting for."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.cluster.agents.protocol import WorkersSeen
from manyhands.core.timeouts import EVICT_S, HEARTBEAT_S
from manyhands.parallel.group.heartbeat import ObservedHeartbeat

_VALID_S = 3 * HEARTBEAT_S  # validity of an agent's report; agents send none while their workers make progress
_WINDOW_S, _QUIET_S = 6.0, 4.0  # window of the rates; a process without a heartbeat for _QUIET_S is silent
_MOVES_BYTES_PER_S, _BUSY = 4096, 0.3  # above these rates a process communicates, or computes (share of a CPU)
_NAMED = 4
_ALONE = ("save", "at_epoch_end")  # phases in which all ranks wait for rank 0, for as long as it takes


@dataclass
class _Rank:
    """The state of one rank; `past` has tuples (time, bytes sent and received, CPU seconds)."""

    seen: ObservedHeartbeat
    host: str
    at: float
    past: deque[tuple[float, int, float]] = field(default_factory=deque[tuple[float, int, float]])

    @property
    def name(self) -> str:
        return f"rank {self.seen.rank} on {self.host}"

    def rates(self) -> tuple[float, float]:
        """Returns (bytes sent and received per second, number of CPUs in use)."""
        (begin, before, spent), (end, after, now) = self.past[0], self.past[-1]
        seconds = max(end - begin, 1e-9)
        return ((after - before) / seconds if before else 0.0), (now - spent) / seconds

    @property
    def watched_s(self) -> float:
        """The seconds covered by `past`. It is small just after this machine or the run was suspended."""
        return self.past[-1][0] - self.past[0][0]

    @property
    def silent(self) -> bool:
        """True if the process is suspended, or sends no heartbeats and hardly uses a CPU."""
        return self.seen.stopped or (self.seen.quiet_s > _QUIET_S and self.rates()[1] < _BUSY)


class StallDetector:
    """Detects stalls and hung ranks from the heartbeats that the agents of all machines report."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._reported = False

    def add_report(self, report: WorkersSeen, at: float | None = None) -> None:
        """Adds an agent's report of its workers. `at` is the time of the report (`time.monotonic`), by default now."""
        now = time.monotonic() if at is None else at
        for seen in report.ranks:
            rank = self._ranks.setdefault(seen.rank, _Rank(seen, report.host, now))
            rank.seen, rank.host, rank.at = seen, report.host, now
            rank.past.append((now, seen.moved_bytes, seen.cpu_s))
            while now - rank.past[0][0] > _WINDOW_S:
                rank.past.popleft()

    def new_warning(self) -> str:
        """Returns a warning when a stall begins; an empty string if there is no stall, or it has been reported."""
        ranks, reported = self._current_ranks(), self._reported
        late = max(ranks, key=lambda rank: rank.seen.stood_s - rank.seen.limit_s, default=None)
        self._reported = late is not None and late.seen.stood_s > late.seen.limit_s
        if late is None or reported or not self._reported:
            return ""
        usual = f" (usual: {late.seen.usual_s:.2g} s)" if late.seen.usual_s else ""
        stopped = [rank for rank in ranks if rank.seen.stopped]
        wake = "".join(f"; resume the process: kill -CONT {rank.seen.pid} on {rank.host}" for rank in stopped)
        return f"step {late.seen.step + 1} has been stalled for {late.seen.stood_s:.0f} s{usual}; {_cause(ranks)}{wake}"

    def why_hung(self) -> str:
        """Returns the reason why the run can't react to a stop request, or an empty string if no reason is known."""
        ranks = self._current_ranks()
        late = any(rank.seen.stood_s > rank.seen.limit_s for rank in ranks)
        # A rank that computes or receives bytes may yet reach the point where stop requests are read.
        progressing = _traffic(ranks) or any(rank.rates()[1] > _BUSY for rank in _lagging(ranks) or ranks)
        return _cause(ranks) if any(rank.silent for rank in ranks) or (late and not progressing) else ""

    def find_blocking_rank(self) -> tuple[int, str] | None:
        """Returns (rank that blocks all other ranks permanently, message), or None if no such rank is known."""
        ranks = self._current_ranks()
        for rank in ranks:
            if rank.watched_s >= _QUIET_S and rank.silent and rank.seen.quiet_s > EVICT_S:
                how = "was stopped" if rank.seen.stopped else "did not respond"
                return rank.seen.rank, f"{rank.name} {how} for {rank.seen.quiet_s:.0f} s and was killed"
        for rank in [] if _traffic(ranks) else _lagging(ranks):  # a rank that moves bytes or computes is late, not hung
            late = rank.watched_s >= _QUIET_S and rank.seen.stood_s > 2 * rank.seen.limit_s
            if late and rank.seen.phase not in _ALONE and rank.rates()[1] < _BUSY:
                how = f"blocked the other ranks for {rank.seen.stood_s:.0f} s ({_activity(rank)})"
                return rank.seen.rank, f"{rank.name} {how} and was killed"
        return None

    def _current_ranks(self) -> list[_Rank]:
        now = time.monotonic()
        return [rank for _, rank in sorted(self._ranks.items()) if now - rank.at < _VALID_S]


def _traffic(ranks: Sequence[_Rank]) -> float:
    """Returns bytes per second between the ranks; 0 if the ranks exchange only heartbeats."""
    rate = sum(rank.rates()[0] for rank in ranks) / 2
    return rate if rate > _MOVES_BYTES_PER_S else 0.0


def _cause(ranks: Sequence[_Rank]) -> str:
    """Returns the cause of a stall: the ranks that other ranks wait for and their activity, or a slow network."""
    awaited = sorted((rank for rank in ranks if rank.silent), key=lambda rank: not rank.seen.stopped)
    if not awaited and (rate := _traffic(ranks)):
        return f"no process hangs, but the network is slow ({rate / 1e6:.2g} MB/s between the processes)"
    if awaited:
        why = f"process {awaited[0].seen.pid} {'is stopped' if awaited[0].seen.stopped else 'does not respond'}"
    elif awaited := _lagging(ranks):
        why = _activity(awaited[0])
    elif busy := [rank for rank in ranks if rank.rates()[1] > _BUSY]:
        return f"still computing: {_join_names(busy)}"
    elif len(ranks) == 1:
        return f"{ranks[0].name} is {_activity(ranks[0])}"
    else:
        return "all processes wait for each other and no data moves; check the network between the machines"
    more = f" and {_join_names(awaited[1:])}" if len(awaited) > 1 else ""
    return f"waiting for {awaited[0].name} ({why}){more}"


def _lagging(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Returns the ranks that have called fewer collectives than other ranks."""
    return [rank for rank in ranks if rank.seen.calls < max(other.seen.calls for other in ranks)]


def _activity(rank: _Rank) -> str:
    if rank.seen.phase == "data":
        return "loading data"
    if rank.rates()[1] > _BUSY:
        return f"still computing, phase {rank.seen.phase}"
    return f"blocked by a disk, a lock or your own code, phase {rank.seen.phase}"


def _join_names(ranks: Sequence[_Rank]) -> str:
    named = ", ".join(rank.name for rank in ranks[:_NAMED])
    return named if len(ranks) <= _NAMED else f"{named} and {len(ranks) - _NAMED} more"

"""Detects a stalled run from worker heartbeats and identifies the rank the others are waiting for."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.cluster.agents.protocol import WorkersSeen
from manyhands.core.timeouts import EVICT_S, HEARTBEAT_S
from manyhands.parallel.group.heartbeat import Seen

# A report of an agent is valid for so long; an agent that reports nothing has workers that are well.
_HOLDS_S = 3 * HEARTBEAT_S
# Rates of bytes and processor time are measured over so long.
_WINDOW_S = 6.0
_QUIET_S = 4.0
# Heartbeats and the like move less than this.
_MOVES_BYTES_PER_S = 4096
_BUSY = 0.3
_NAMED = 4
# Phases in which rank 0 works for all, however long a disk or a user's function takes.
_ALONE = ("save", "at_epoch_end")


@dataclass
class _Rank:
    """The state of one process; `past` has tuples of time, bytes moved and processor seconds."""

    seen: Seen
    host: str
    at: float
    past: deque[tuple[float, int, float]] = field(default_factory=deque[tuple[float, int, float]])

    @property
    def name(self) -> str:
        return f"rank {self.seen.rank} on {self.host}"

    def rates(self) -> tuple[float, float]:
        """Returns bytes per second, and processors in use."""
        (begin, before, spent), (end, after, now) = self.past[0], self.past[-1]
        seconds = max(end - begin, 1e-9)
        return ((after - before) / seconds if before else 0.0), (now - spent) / seconds

    @property
    def watched_s(self) -> float:
        """Duration of the reports that it isn't well; short after a pause of this machine or of the whole run."""
        return self.past[-1][0] - self.past[0][0]

    @property
    def silent(self) -> bool:
        """True if it doesn't run at all."""
        return self.seen.stopped or (self.seen.quiet_s > _QUIET_S and self.rates()[1] < _BUSY)


class Stalls:
    """Finds stalled ranks among the processes of all machines."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._reported = False

    def take(self, news: WorkersSeen, at: float | None = None) -> None:
        """Adds an agent's report; `at` is its time by the monotonic clock, now by default."""
        now = time.monotonic() if at is None else at
        for seen in news.ranks:
            before = self._ranks.get(seen.rank)
            past = before.past if before else deque[tuple[float, int, float]]()
            past.append((now, seen.moved_bytes, seen.cpu_s))
            while now - past[0][0] > _WINDOW_S:
                past.popleft()
            self._ranks[seen.rank] = _Rank(seen, news.host, now, past)

    def to_say(self) -> str:
        """Returns a warning for the user, once for each stall; else an empty string."""
        ranks = self._known()
        late = max(ranks, key=lambda rank: rank.seen.stood_s - rank.seen.limit_s, default=None)
        if late is None or late.seen.stood_s <= late.seen.limit_s:
            self._reported = False
            return ""
        if self._reported:
            return ""
        self._reported = True
        usual = f" (usual: {late.seen.usual_s:.2g} s)" if late.seen.usual_s else ""
        stopped = [rank for rank in ranks if rank.seen.stopped]
        wake = "".join(f"; resume the process: kill -CONT {rank.seen.pid} on {rank.host}" for rank in stopped)
        return f"step {late.seen.step + 1} has been stalled for {late.seen.stood_s:.0f} s{usual}; {_why(ranks)}{wake}"

    def hung(self) -> str:
        """Returns why a stop request has no effect; empty if it will have, or if that is unknown."""
        ranks = self._known()
        late = any(rank.seen.stood_s > rank.seen.limit_s for rank in ranks)
        # A rank that computes or receives bytes may yet reach the point where stop requests are read.
        progressing = _moving(ranks) or any(rank.rates()[1] > _BUSY for rank in _behind(ranks) or ranks)
        return _why(ranks) if any(rank.silent for rank in ranks) or (late and not progressing) else ""

    def culprit(self) -> tuple[int, str] | None:
        """Returns the rank that blocks the others for good, with a message; None if that is unknown."""
        ranks = self._known()
        for rank in ranks:
            seen = rank.seen
            if rank.watched_s < _QUIET_S:
                continue
            if rank.silent and seen.quiet_s > EVICT_S:
                how = "was stopped" if seen.stopped else "did not respond"
                return seen.rank, f"{rank.name} {how} for {seen.quiet_s:.0f} s and was killed"
        # A rank that computes is late, not hung; and while bytes move no rank hangs.
        for rank in [] if _moving(ranks) else _behind(ranks):
            if rank.watched_s < _QUIET_S or rank.seen.phase in _ALONE:
                continue
            if rank.seen.stood_s > 2 * rank.seen.limit_s and rank.rates()[1] < _BUSY:
                how = f"blocked the other ranks for {rank.seen.stood_s:.0f} s ({_doing(rank)})"
                return rank.seen.rank, f"{rank.name} {how} and was killed"
        return None

    def _known(self) -> list[_Rank]:
        now = time.monotonic()
        return [rank for _, rank in sorted(self._ranks.items()) if now - rank.at < _HOLDS_S]


def _moving(ranks: Sequence[_Rank]) -> float:
    """Returns bytes per second between the processes; 0 for heartbeats and the like."""
    rate = sum(rank.rates()[0] for rank in ranks) / 2
    return rate if rate > _MOVES_BYTES_PER_S else 0.0


def _why(ranks: Sequence[_Rank]) -> str:
    """Returns which ranks the others wait for and what they do, or another cause of the stall."""
    silent = sorted((rank for rank in ranks if rank.silent), key=lambda rank: not rank.seen.stopped)
    if silent:
        how = "is stopped" if silent[0].seen.stopped else "does not respond"
        return _waiting_for(silent, f"process {silent[0].seen.pid} {how}")
    if rate := _moving(ranks):
        return f"no process hangs, but the network is slow ({rate / 1e6:.2g} MB/s between the processes)"
    if behind := _behind(ranks):
        return _waiting_for(behind, _doing(behind[0]))
    if busy := [rank for rank in ranks if rank.rates()[1] > _BUSY]:
        return f"still computing: {_names(busy)}"
    if len(ranks) == 1:
        return f"{ranks[0].name} is {_doing(ranks[0])}"
    return "all processes wait for each other and no data moves; check the network between the machines"


def _waiting_for(ranks: Sequence[_Rank], why: str) -> str:
    more = f" and {_names(ranks[1:])}" if len(ranks) > 1 else ""
    return f"waiting for {ranks[0].name} ({why}){more}"


def _behind(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Returns the ranks that have called fewer collectives than others."""
    return [rank for rank in ranks if rank.seen.calls < max(other.seen.calls for other in ranks)]


def _doing(rank: _Rank) -> str:
    if rank.seen.phase == "data":
        return "loading data"
    if rank.rates()[1] > _BUSY:
        return f"still computing, phase {rank.seen.phase}"
    return f"blocked by a disk, a lock or your own code, phase {rank.seen.phase}"


def _names(ranks: Sequence[_Rank]) -> str:
    named = ", ".join(rank.name for rank in ranks[:_NAMED])
    return named if len(ranks) <= _NAMED else f"{named} and {len(ranks) - _NAMED} more"

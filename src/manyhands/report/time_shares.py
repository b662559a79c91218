"""The time of each process by phase, and the change that would save the most time."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.core.phases import PHASES
from manyhands.parallel.options import USUAL_MODE
from manyhands.report.read import STARTS, RunData
from manyhands.sync.options import SyncOptions

_LEAST_SYNC = 1 / 3  # below this share of the time, synchronization is no reason to change the method
_SLOW = 1.1  # a rank is slow if its work takes more than this multiple of the other ranks' median
_LEAST_GAIN = 0.05  # a change must save at least this share of the time

Seconds = dict[str, float]  # by phase


class Improvement(NamedTuple):
    """A change that a user can make, with the reason."""

    what: str  # the reason and the change, in one sentence
    gain: float = 0.0  # maximum share of the time that the change saves; 0: unknown


def seconds_by_rank(run: RunData) -> list[Seconds]:
    """Returns each rank's seconds by phase, since the number of processes last changed."""
    found: list[Seconds] = []
    for record in run.phases:
        ranks = len(next(iter(record.seconds.values()), []))
        if ranks != len(found):
            found = [dict.fromkeys(PHASES, 0.0) for _ in range(ranks)]
        for phase in PHASES:
            for one, seconds in zip(found, record.seconds.get(phase, ()), strict=False):
                one[phase] += seconds
    return found


def samples_by_rank(run: RunData) -> list[int]:
    """Returns the current number of samples per update on each rank; [] if unknown."""
    planned = [sum(passes) for passes in zip(*run.plan.shares, strict=False)]
    taken = planned
    for event in run.events:
        if event.kind in STARTS:  # plan.json has the shares of the newest start
            taken = planned
        elif event.kind == "shares" and isinstance(counts := event.data.get("shares"), list):
            taken = counts if counts and all(type(one) is int for one in counts) else taken
    return taken


def unequal_line(run: RunData) -> str:
    """Describes the number of samples per update of each process; "" if the numbers differ by at most one."""
    shares = samples_by_rank(run)
    if not shares or max(shares) - min(shares) <= 1:
        return ""
    return f"shares of the batch of {sum(shares):,} samples, by process: {', '.join(f'{one:,}' for one in shares)}"


def time_fractions(seconds: Mapping[str, float]) -> Seconds:
    total = sum(seconds.values()) or 1.0
    return {phase: value / total for phase, value in seconds.items()}


def mean_over_ranks(ranks: Sequence[Seconds]) -> Seconds:
    return {phase: statistics.fmean(one[phase] for one in ranks) for phase in PHASES}


def best_change(run: RunData) -> Improvement | None:
    """Returns the change that would save the most time; None without records."""
    ranks = seconds_by_rank(run)
    if not any(sum(one.values()) for one in ranks):
        return None
    mean = time_fractions(mean_over_ranks(ranks))
    changes = [*_slow_rank(run, ranks), *_sync_changes(run, ranks), _data(run, mean), *_overhead_changes(run, mean)]
    best = max(changes, key=lambda change: change.gain)
    if best.gain >= _LEAST_GAIN:
        return best
    what = f"computation takes {mean['compute'] + mean['update']:.0%} of the time: try "
    if _option(run, "train", "precision", "fp32") == "fp32":
        what += "--set train.precision=bf16, if the processor supports bf16, or "
    return Improvement(f"{what}more processes")


def change_line(run: RunData) -> str:
    change = best_change(run)
    return change.what + (f" (up to {change.gain:.0%} less time)" if change.gain else "") if change else ""


def slow_rank_line(run: RunData) -> str:
    """Describes a rank that is slow over the entire run, and what to do; "" if no rank is slow."""
    return next((found.what for found in _slow_rank(run, seconds_by_rank(run)) if found.gain > _LEAST_GAIN), "")


def _option(run: RunData, section: str, key: str, default: Any) -> Any:
    return run.plan.resolved.get(f"{section}.{key}", run.option(section, key, default))


def _slow_rank(run: RunData, ranks: Sequence[Seconds]) -> list[Improvement]:
    own_s = [sum(one.values()) - one["communication"] for one in ranks]
    slowest = max(range(len(own_s)), key=own_s.__getitem__, default=0)
    others_s = statistics.median([*own_s[:slowest], *own_s[slowest + 1 :]] or own_s or [0.0])
    if not others_s > 0 or own_s[slowest] <= _SLOW * others_s:
        return []
    hint = _balanced_shares(run, own_s) or "stop other programs on its machine, or remove the machine"
    rank, slower = f"rank {slowest}{_on_host(run, slowest)}", own_s[slowest] / others_s
    what = f"{rank} takes {slower:.2f} times as long as the other ranks, which wait: {hint}"
    return [Improvement(what, (own_s[slowest] - others_s) / sum(ranks[slowest].values()))]


def _balanced_shares(run: RunData, own_s: Sequence[float]) -> str:
    """Returns a hint to set cluster.shares; "" if the shares of the batch are unequal already, or can't be set."""
    batch = _option(run, "train", "batch", 0)
    open_ = _option(run, "cluster", "shares", "equal") in ("machines", "equal")
    equal = open_ and run.plan.mode == USUAL_MODE and not any(event.kind == "shares" for event in run.events)
    if not equal or not isinstance(batch, int) or batch < len(own_s) or not all(own_s):
        return ""
    speeds = [1 / seconds for seconds in own_s]
    shares = [max(1, int(batch * speed / sum(speeds))) for speed in speeds]
    shares[own_s.index(min(own_s))] += batch - sum(shares)
    written = ",".join(map(str, shares))
    return f"use --set cluster.shares=[{written}] to balance the load" if min(shares) > 0 else ""


def _on_host(run: RunData, rank: int) -> str:
    ranks = run.environment.get("ranks")
    about = ranks[rank] if isinstance(ranks, list) and rank < len(ranks) and isinstance(ranks[rank], dict) else {}
    return f" on {about['host']}" if isinstance(about.get("host"), str) else ""


def _sync_changes(run: RunData, ranks: Sequence[Seconds]) -> list[Improvement]:
    # A process that waits for a CPU core delays the others, which count the delay as communication.
    total = sum(map(sum, (value for record in run.phases if record.queued_s for value in record.seconds.values())))
    busy = min(1.0, sum(sum(record.queued_s) for record in run.phases) / total) if total else 0.0
    what = f"processes wait for a free CPU core {busy:.0%} of the time: end other programs, or use fewer processes"
    found = [Improvement(what, busy)]
    # The rank that waits least waits for no other rank; its communication is synchronization only.
    share = min(time_fractions(one)["communication"] for one in ranks) - busy
    usual, apart = SyncOptions().method, any(_on_host(run, rank) for rank in range(len(ranks)))
    start = f"gradient synchronization takes {share:.0%} of the time: use"
    if share > _LEAST_SYNC and apart and _option(run, "sync", "method", usual) == usual:
        what = f"{start} --sync auto, which selects bf16, powersgd or local to send less data or less often"
        found.append(Improvement(what, share))
    elif share > _LEAST_SYNC:
        found.append(Improvement(f"{start} {_larger_batch(run)} to halve the number of updates", share / 2))
    return found


def _data(run: RunData, mean: Seconds) -> Improvement:
    name = str(_option(run, "data", "name", ""))
    if Path(name).expanduser().is_dir() and not Path(f"{name.rstrip('/')}.pack").expanduser().is_dir():
        hint = f"run manyhands pack {shlex.quote(name)} for a copy that loads faster"
    elif _option(run, "data", "workers", -1) == 0:
        hint = "use --set data.workers=-1 to decode pictures in extra processes"
    else:
        hint = "increase data.workers, or use smaller pictures (data.image_size) or a simpler data.augment"
    return Improvement(f"waiting for data takes {mean['data']:.0%} of the time: {hint}", mean["data"])


def _overhead_changes(run: RunData, mean: Seconds) -> list[Improvement]:
    """Returns changes that make evaluations, saves and updates rarer, with the gain of half as many."""
    found: list[Improvement] = []
    share, every = mean["evaluation"], _option(run, "train", "evaluate_every", 1.0)
    if isinstance(every, int | float) and every > 0:
        hint = f"use --set train.evaluate_every={2 * every:g} to evaluate half as often"
        found.append(Improvement(f"evaluation takes {share:.0%} of the time: {hint}", share / 2))
    share, every = mean["saving"], _option(run, "checkpoint", "every", "")
    hint = f"increase checkpoint.every (now {every}) to save less often"
    found.append(Improvement(f"saving takes {share:.0%} of the time: {hint}", share / 2))
    share = mean["update"] + mean["records"] + mean["other"]
    hint = f"use {_larger_batch(run)}, with an adjusted learning rate, for half as many updates"
    found.append(Improvement(f"the overhead of updates takes {share:.0%} of the time: {hint}", share / 2))
    return found


def _larger_batch(run: RunData) -> str:
    batch = _option(run, "train", "batch", 0)
    return f"--batch {2 * batch}" if isinstance(batch, int) and batch > 0 else "a larger --batch"

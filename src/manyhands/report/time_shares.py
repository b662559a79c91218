"""What each process of a run spent its time on, and the one change that would help most."""

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.phases import PHASES
from manyhands.parallel.options import USUAL_MODE
from manyhands.report.read import STARTS, RunData
from manyhands.sync.options import SyncOptions

# More than this part of the time must go to agreeing before another way of it is worth a word.
_TALKS = 1 / 3
# A process is slow whose own work takes so many times as long as the others' median.
_SLOW = 1.1
# A change that saves less than this part of the time isn't worth making.
_WORTH = 0.05

Seconds = dict[str, float]  # by phase


@dataclass(frozen=True)
class Improvement:
    """Something that a user may change."""

    what: str  # to do, and why, in a sentence
    gain: float = 0.0  # part of the time that it saves at most, 0 to 1; 0 where that can't be told


def seconds_by_rank(run: RunData) -> list[Seconds]:
    """What each process spent on each phase; of a run that went on with another number of processes, since then."""
    found: list[Seconds] = []
    for record in run.phases:
        ranks = len(next(iter(record.seconds.values()), []))
        if ranks != len(found):
            found = [dict.fromkeys(PHASES, 0.0) for _ in range(ranks)]
        for phase in PHASES:
            for one, seconds in zip(found, record.seconds.get(phase, ()), strict=False):
                one[phase] += seconds
    return found


def samples_of_each(run: RunData) -> list[int]:
    """Samples of each update that each process takes now, by rank; empty where that isn't recorded."""
    taken = [sum(passes) for passes in zip(*run.plan.shares, strict=False)]
    for event in run.events:
        if event.kind in STARTS:  # what it began with is in plan.json
            taken = [sum(passes) for passes in zip(*run.plan.shares, strict=False)]
        elif event.kind == "shares" and (counts := _counts(event.data.get("shares"))):
            taken = counts
    return taken


def _counts(counts: object) -> list[int]:
    numbers: list[Any] = list(counts) if isinstance(counts, list) else []  # pyright: ignore[reportUnknownArgumentType]
    return numbers if all(type(one) is int for one in numbers) else []


def unequal_line(run: RunData) -> str:
    """What each process takes of an update, in words; empty where all take the same, or but for a remainder of one."""
    shares = samples_of_each(run)
    if not shares or max(shares) - min(shares) <= 1:
        return ""
    return f"shares of the batch of {sum(shares):,} samples, by process: {', '.join(f'{one:,}' for one in shares)}"


def shares_of(seconds: Mapping[str, float]) -> Seconds:
    """The same as parts of their sum."""
    whole = sum(seconds.values()) or 1.0
    return {phase: value / whole for phase, value in seconds.items()}


def mean_of(ranks: Sequence[Seconds]) -> Seconds:
    return {phase: statistics.fmean(one[phase] for one in ranks) for phase in PHASES}


def best_change(run: RunData) -> Improvement | None:
    """The change that would save most; None where nothing was recorded."""
    ranks = seconds_by_rank(run)
    if not ranks or not any(sum(one.values()) for one in ranks):
        return None
    mean = shares_of(mean_of(ranks))
    changes = [*_slow_rank(run, ranks), *_agreeing(run, ranks), *_data(run, mean), *_between_updates(run, mean)]
    best = max(changes, key=lambda change: change.gain, default=Improvement(""))
    return best if best.gain >= _WORTH else _computing(run, mean)


def change_line(run: RunData) -> str:
    """The same in words; empty where there is none."""
    change = best_change(run)
    return change.what + (f" (up to {change.gain:.0%} less time)" if change.gain else "") if change else ""


def _option(run: RunData, section: str, key: str, default: Any) -> Any:
    values = run.job.get(section)
    found = values.get(key, default) if isinstance(values, dict) else default
    return run.plan.resolved.get(f"{section}.{key}", found)


def slow_rank(run: RunData) -> str:
    """Who has been slow for the whole time, and what to do; empty where nobody has."""
    ranks = seconds_by_rank(run)
    return next((found.what for found in _slow_rank(run, ranks) if found.gain > _WORTH), "") if ranks else ""


def _slow_rank(run: RunData, ranks: Sequence[Seconds]) -> Iterator[Improvement]:
    own_s = [sum(one.values()) - one["communication"] for one in ranks]
    slowest = max(range(len(own_s)), key=own_s.__getitem__)
    others_s = statistics.median([*own_s[:slowest], *own_s[slowest + 1 :]] or [own_s[slowest]])
    if own_s[slowest] > _SLOW * others_s > 0:
        who, times = f"rank {slowest}{_host(run, slowest)}", own_s[slowest] / others_s
        hints = _balanced_shares(run, own_s) or "stop other programs on its machine, or remove the machine"
        what = f"{who} takes {times:.2f} times as long as the other ranks, which wait: {hints}"
        yield Improvement(what, (own_s[slowest] - others_s) / sum(ranks[slowest].values()))


def _balanced_shares(run: RunData, own_s: Sequence[float]) -> str:
    """Shares of an update that all take equally long over, where all have had the same; else nothing."""
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


def _host(run: RunData, rank: int) -> str:
    ranks = run.environment.get("ranks")
    own = ranks[rank] if isinstance(ranks, list) and rank < len(ranks) and isinstance(ranks[rank], dict) else {}
    host = own.get("host")
    return f" on {host}" if isinstance(host, str) else ""


def _agreeing(run: RunData, ranks: Sequence[Seconds]) -> Iterator[Improvement]:
    # A process that waits for a processor keeps the others waiting, which they count as communication.
    whole = sum(map(sum, (value for record in run.phases if record.queued_s for value in record.seconds.values())))
    busy = min(1.0, sum(sum(record.queued_s) for record in run.phases) / whole) if whole else 0.0
    what = f"processes wait for a free CPU core {busy:.0%} of the time: end other programs, or use fewer processes"
    yield Improvement(what, busy)
    # Who waits least waits for nobody: that is what agreeing itself takes.
    share = min(shares_of(one)["communication"] for one in ranks) - busy
    if share <= _TALKS:
        return
    usual, apart = SyncOptions().method, any(_host(run, rank) for rank in range(len(ranks)))
    if apart and _option(run, "sync", "method", usual) == usual:
        what = (
            f"gradient synchronization takes {share:.0%} of the time: use --sync auto to send less data, or to send "
            "less often (bf16, powersgd or local)"
        )
        yield Improvement(what, share)
    else:
        what = (
            f"gradient synchronization takes {share:.0%} of the time: use {_larger(run)} to halve the number of updates"
        )
        yield Improvement(what, share / 2)


def _data(run: RunData, mean: Seconds) -> Iterator[Improvement]:
    name, share = str(_option(run, "data", "name", "")), mean["data"]
    if Path(name).expanduser().is_dir() and not Path(f"{name.rstrip('/')}.pack").expanduser().is_dir():
        place = shlex.quote(name)
        what = (
            f"waiting for data takes {share:.0%} of the time: run manyhands pack {place} for a copy that loads faster"
        )
    elif _option(run, "data", "workers", -1) == 0:
        what = (
            f"waiting for data takes {share:.0%} of the time: use --set data.workers=-1 to decode pictures in extra "
            "processes"
        )
    else:
        what = (
            f"waiting for data takes {share:.0%} of the time: increase data.workers, or use smaller pictures "
            "(data.image_size) or a simpler data.augment"
        )
    yield Improvement(what, share)


def _between_updates(run: RunData, mean: Seconds) -> Iterator[Improvement]:
    """What isn't done in an update's forward and backward, and can be done less often."""
    share, every = mean["evaluation"], _option(run, "train", "evaluate_every", 1.0)
    if isinstance(every, int | float) and every > 0:
        rarer = f"--set train.evaluate_every={2 * every:g}"
        yield Improvement(f"evaluation takes {share:.0%} of the time: use {rarer} to evaluate half as often", share / 2)
    share, every = mean["saving"], _option(run, "checkpoint", "every", "")
    what = f"saving takes {share:.0%} of the time: increase checkpoint.every (now {every}) to save less often"
    yield Improvement(what, share / 2)
    share = mean["update"] + mean["records"] + mean["other"]
    what = (
        f"the overhead of updates takes {share:.0%} of the time: use {_larger(run)}, with an adjusted learning rate, "
        "for half as many updates"
    )
    yield Improvement(what, share / 2)


def _larger(run: RunData) -> str:
    batch = _option(run, "train", "batch", 0)
    return f"--batch {2 * batch}" if isinstance(batch, int) and batch > 0 else "a larger --batch"


def _computing(run: RunData, mean: Seconds) -> Improvement:
    share = mean["compute"] + mean["update"]
    if _option(run, "train", "precision", "fp32") == "fp32":
        return Improvement(
            f"computation takes {share:.0%} of the time: try --set train.precision=bf16, if the processor supports "
            "bf16, or more processes"
        )
    return Improvement(f"computation takes {share:.0%} of the time: try more processes")

"""Selects the gradient synchronization method for a network link. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from manyhands.core.choices import unknown_choice_error
from manyhands.sync.costs import Cost, LinkCase
from manyhands.sync.options import AUTO, SyncOptions, methods, synchronizes_every_update

# The method that every parallel mode implements; plan costs assume it.
EXACT = next(name for name, method in methods().items() if method.EXACT and not method.NEEDS)
BY_MODE = Cost(EXACT, 0.0, 0.0)

# Acceptable slowdown by a method that changes training less: a share of a step, or seconds of the entire run.
_LOST_SHARE, _LOST_S = 0.10, 120.0
_LOST_FOR_ACCURACY = 0.5  # by a method that synchronizes every update, relative to local steps
_LOST_STEP_S = 2e-3  # smaller differences are noise on a busy machine
_ALIKE_SHARE = 0.02
_DAY_S, _HOUR_S, _MINUTE_S = 86400.0, 3600.0, 60.0


def check_method(word: str) -> None:
    """Raises UserError if no sync method has this name and it isn't "auto"."""
    if word not in {AUTO, *methods()}:
        raise unknown_choice_error("sync method", word, [AUTO, *methods()], "sync.method")


@dataclass(frozen=True)
class SyncChoice:
    """The chosen method, and the costs of all methods that it was chosen from."""

    chosen: Cost  # one of `costs`
    costs: tuple[Cost, ...]  # of all methods, and of each codec that was considered
    reason: str  # one sentence with figures


def choose(
    case: LinkCase, options: SyncOptions, only: str = "", without: Mapping[str, str] | None = None
) -> SyncChoice:
    """Selects the method for sync.method = auto from the estimated costs; prefers methods that sync in every update.

    Of those, selects the first that is at most 10 % per step, or two minutes per run, slower than the fastest. Methods
    that sync every few steps lost accuracy in our experiments; they must save more than a third of the time. Among
    their variants of about equal speed, the first one is chosen.

    `only`: the one method to consider. `without`: {excluded method: reason}; allreduce is never excluded.
    """
    out, step_s = without or {}, attrgetter("step_s")
    costs = tuple(
        replace(cost, refused=out.get(name, ""))
        for name, method in methods().items()
        for cost in method.estimate(case, options)
    )
    able = [cost for cost in costs if not cost.refused and only in {"", cost.method}]
    each = [cost for cost in able if synchronizes_every_update(cost.method)]
    rest = [cost for cost in able if cost not in each]
    chosen = None
    if each:
        fastest = min(each, key=step_s)
        chosen = next(cost for cost in each if _is_acceptable(cost, fastest, case, _LOST_SHARE))
    if rest:
        fastest = min(rest, key=step_s)
        paced = next(cost for cost in rest if cost.step_s <= fastest.step_s * (1 + _ALIKE_SHARE))
        chosen = chosen if chosen and _is_acceptable(chosen, paced, case, _LOST_FOR_ACCURACY) else paced
    if chosen is None:
        raise ValueError(f"there is no sync method {only}")
    best = min(able, key=step_s)
    return SyncChoice(chosen, costs, _reason(case, chosen, best, next(cost for cost in costs if cost.method == EXACT)))


def _is_acceptable(cost: Cost, best: Cost, case: LinkCase, share: float) -> bool:
    lost_s = cost.step_s - best.step_s
    return lost_s <= max(_LOST_STEP_S, share * best.step_s) or lost_s * case.steps < _LOST_S


def label_of(cost: Cost) -> str:
    """Describes a method in a few words, such as "local (int4, every 96 steps)"."""
    if synchronizes_every_update(cost.method):
        return cost.method
    return f"{cost.method} ({cost.codec}, every {f'{cost.every} steps' if cost.every > 1 else 'step'})"


def _reason(case: LinkCase, chosen: Cost, best: Cost, exact: Cost) -> str:
    if case.machines == 1:
        return f"{chosen.method} is kept: there is only one machine"
    speed = f"on {case.link.bytes_per_s * 8e-6:.4g} Mbit/s, with {case.step_s:.3g} s to compute a step"
    took = f"{label_of(chosen)} exchanges in {chosen.exchange_s:.3g} s and takes {chosen.step_s:.3g} s per step"
    whole = f"the run takes {_run_time(chosen, case)}"
    if chosen != exact:
        return f"{speed}: {took}; {whole} ({_run_time(exact, case)} with {EXACT})"
    return f"{speed}: {took}; {whole}" + ("" if best == exact else f" ({_run_time(best, case)} with {label_of(best)})")


def days_of(cost: Cost, case: LinkCase) -> float:
    """Returns the estimated days of all updates of a run, without evaluation and saving."""
    return cost.step_s * case.steps / _DAY_S


def _run_time(cost: Cost, case: LinkCase) -> str:
    whole_s = cost.step_s * case.steps
    for unit_s, unit in ((_DAY_S, "days"), (_HOUR_S, "hours"), (_MINUTE_S, "minutes")):
        if whole_s >= unit_s:
            return f"{whole_s / unit_s:.3g} {unit}"
    return f"{whole_s:.3g} seconds"

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


def check_method(method: str) -> None:
    """Raises UserError if `method` is neither "auto" nor the name of a sync method."""
    if method not in {AUTO, *methods()}:
        raise unknown_choice_error("sync method", method, [AUTO, *methods()], "sync.method")


@dataclass(frozen=True)
class SyncChoice:
    """The chosen sync method, the costs of all methods, and the reason for the choice."""

    chosen: Cost  # one of `costs`
    costs: tuple[Cost, ...]  # of all methods, and of each codec that was considered
    reason: str  # one sentence with figures


def choose_method(
    case: LinkCase, options: SyncOptions, only: str = "", without: Mapping[str, str] | None = None
) -> SyncChoice:
    """Selects the method for sync.method = auto by the estimated costs.

    Of the methods that sync in every update, selects the first one that is at most 10 % per step, or two minutes per
    run, slower than the fastest of them. Methods that sync every few steps lost accuracy in our experiments, so the
    fastest of those (the first of about equal ones) is selected only if it saves more than a third of the time.

    `only` is the one method to consider. `without`: {excluded method: reason}; allreduce is never excluded.
    """
    out, step_s = without or {}, attrgetter("step_s")
    costs = tuple(
        replace(cost, refused=out.get(name, ""))
        for name, method in methods().items()
        for cost in method.estimate(case, options)
    )
    able = [cost for cost in costs if not cost.refused and only in {"", cost.method}]
    each = [cost for cost in able if synchronizes_every_update(cost.method)]
    local = [cost for cost in able if cost not in each]
    chosen = None
    if each:
        fastest = min(each, key=step_s)
        chosen = next(cost for cost in each if _is_fast_enough(cost, fastest, case, _LOST_SHARE))
    if local:
        fastest = min(local, key=step_s)
        paced = next(cost for cost in local if cost.step_s <= fastest.step_s * (1 + _ALIKE_SHARE))
        chosen = chosen if chosen and _is_fast_enough(chosen, paced, case, _LOST_FOR_ACCURACY) else paced
    if chosen is None:
        raise ValueError(f"there is no sync method {only}")
    best = min(able, key=step_s)
    return SyncChoice(chosen, costs, _reason(case, chosen, best, next(cost for cost in costs if cost.method == EXACT)))


def _is_fast_enough(cost: Cost, best: Cost, case: LinkCase, slowdown: float) -> bool:
    lost_s = cost.step_s - best.step_s
    return lost_s <= max(_LOST_STEP_S, slowdown * best.step_s) or lost_s * case.steps < _LOST_S


def cost_label(cost: Cost) -> str:
    """Describes the method of a cost in a few words, such as "local (int4, every 96 steps)"."""
    if synchronizes_every_update(cost.method):
        return cost.method
    return f"{cost.method} ({cost.codec}, every {f'{cost.every} steps' if cost.every > 1 else 'step'})"


def _reason(case: LinkCase, chosen: Cost, best: Cost, exact: Cost) -> str:
    if case.machines == 1:
        return f"{chosen.method} is kept: there is only one machine"
    speed = f"on {case.link.bytes_per_s * 8e-6:.4g} Mbit/s, with {case.step_s:.3g} s to compute a step"
    took = f"{cost_label(chosen)} exchanges in {chosen.exchange_s:.3g} s and takes {chosen.step_s:.3g} s per step"
    whole = f"the run takes {_run_time(chosen, case)}"
    if chosen != exact:
        return f"{speed}: {took}; {whole} ({_run_time(exact, case)} with {EXACT})"
    fastest = "" if best == exact else f" ({_run_time(best, case)} with {cost_label(best)})"
    return f"{speed}: {took}; {whole}{fastest}"


def run_days(cost: Cost, case: LinkCase) -> float:
    """Returns the estimated time of all updates of a run in days, without evaluation and saving."""
    return cost.step_s * case.steps / _DAY_S


def _run_time(cost: Cost, case: LinkCase) -> str:
    whole_s = cost.step_s * case.steps
    for unit_s, unit in ((_DAY_S, "days"), (_HOUR_S, "hours"), (_MINUTE_S, "minutes")):
        if whole_s >= unit_s:
            return f"{whole_s / unit_s:.3g} {unit}"
    return f"{whole_s:.3g} seconds"

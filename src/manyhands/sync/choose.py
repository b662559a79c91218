"""Finds a sync method by its name, says which parallel modes take one, and chooses the one that suits a link."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from manyhands.core.errors import UserError
from manyhands.core.plugins import load_choice, module_names, unknown_choice
from manyhands.sync.costs import Case, Cost
from manyhands.sync.options import SyncOptions

METHODS = "manyhands.sync.methods"
AUTO, EXACT, LOCAL = "auto", "allreduce", "local"
# Those that agree in every update, the exact one first; then the one that doesn't.
_EVERY_UPDATE = (EXACT, "bf16", "powersgd")
_ALL = (*_EVERY_UPDATE, LOCAL)

# Which methods each parallel mode can be combined with; the mode agrees by itself where there is none but allreduce.
# One process has nobody to agree with, so that it takes them all.
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "single": _ALL,
    "data": _ALL,
    "dataparallel": (EXACT,),
    "fsdp": (EXACT,),
    "hybrid": (EXACT,),
    "semi": (EXACT,),
    "auto": (EXACT,),
}

# What may be lost by a method that changes less: a share of a step, or seconds of the whole run.
_LOST_SHARE, _LOST_S = 0.10, 120.0
# And by one that agrees in every update, beside local steps.
_LOST_FOR_ACCURACY = 0.5
# Nor are differences believed that a busy machine's clock can't tell.
_LOST_STEP_S = 2e-3
_ALIKE_SHARE = 0.02
_DAY_S, _HOUR_S, _MINUTE_S = 86400.0, 3600.0, 60.0


def resolve_method(method: str, mode: str) -> str:
    """The method to run under a parallel mode; "auto" where the link decides.

    Raises:
        UserError: there is no such method, or the mode can't take it.
    """
    known = [AUTO, *module_names(METHODS)]
    if method not in known:
        raise unknown_choice("sync method", method, known, "sync.method")
    if method == AUTO:
        return AUTO if len(COMBINATIONS[mode]) > 1 else COMBINATIONS[mode][0]
    if method not in COMBINATIONS[mode]:
        taking = [name for name, methods in COMBINATIONS.items() if method in methods and name != "single"]
        mend = (*(f"--parallel {name}" for name in taking[:1]), f"--sync {EXACT}")
        raise UserError(f"the parallel mode {mode} can't be combined with {method}", "sync.method", mend)
    return method


@dataclass(frozen=True)
class Choice:
    """A method that was chosen, with what it was chosen from.

    Attributes:
        chosen: one of `costs`.
        costs: of all methods, and of each codec that was considered.
        reason: one sentence with figures.
    """

    chosen: Cost
    costs: tuple[Cost, ...]
    reason: str


def choose(case: Case, options: SyncOptions, only: str = "", without: Mapping[str, str] | None = None) -> Choice:
    """The method that "auto" takes: the first of allreduce, bf16 and powersgd that costs little, else local steps.

    "Little" is 10 % of a step of the fastest of these three, or two minutes of the whole run: agreeing more exactly is
    worth that. Local steps lost accuracy in our experiments, so they are taken only where they save more than a third
    of the time. Among their codecs that are equally fast the first considered wins.

    Args:
        case: link, network and step.
        options: of the methods; which one they name plays no part.
        only: the one method that may be chosen; empty for any.
        without: methods that something else in the job rules out, and what that is; never allreduce.
    """
    out = without or {}
    costs = tuple(
        replace(cost, refused=out.get(name, ""))
        for name in _ALL
        for cost in load_choice(METHODS, name).estimate(case, options)
    )
    able = [cost for cost in costs if not cost.refused and only in {"", cost.method}]
    each, rest = ([cost for cost in able if (cost.method == LOCAL) == local] for local in (False, True))
    chosen = None
    if each:
        fastest = min(each, key=_step_s)
        chosen = next(cost for cost in each if _near(cost, fastest, case, _LOST_SHARE))
    if rest:
        fastest = min(rest, key=_step_s)
        local = next(cost for cost in rest if cost.step_s <= fastest.step_s * (1 + _ALIKE_SHARE))
        chosen = chosen if chosen and _near(chosen, local, case, _LOST_FOR_ACCURACY) else local
    if chosen is None:
        raise ValueError(f"there is no method {only}")
    best = min(able, key=_step_s)
    return Choice(chosen, costs, _reason(case, chosen, best, next(cost for cost in costs if cost.method == EXACT)))


def _step_s(cost: Cost) -> float:
    return cost.step_s


def _near(cost: Cost, best: Cost, case: Case, share: float) -> bool:
    lost_s = cost.step_s - best.step_s
    return lost_s <= max(_LOST_STEP_S, share * best.step_s) or lost_s * case.steps < _LOST_S


def words_of(cost: Cost) -> str:
    """A method in a few words: "local (int4, every 96 steps)"."""
    if cost.method != LOCAL:
        return cost.method
    return f"local ({cost.codec}, every {cost.every} steps)" if cost.every > 1 else f"local ({cost.codec}, every step)"


def _reason(case: Case, chosen: Cost, best: Cost, exact: Cost) -> str:
    if case.machines == 1:
        return f"{chosen.method} is kept: there is nobody to agree with"
    speed = f"on {case.link.bytes_per_s * 8e-6:.4g} Mbit/s, with {case.step_s:.3g} s to compute a step"
    took = f"{words_of(chosen)} agrees in {chosen.exchange_s:.3g} s and makes steps of {chosen.step_s:.3g} s"
    whole = f"the run takes {_length(chosen, case)}"
    if chosen != exact:
        return f"{speed}: {took}; {whole}, with {EXACT} {_length(exact, case)}"
    return f"{speed}: {took}; {whole}" + ("" if best == exact else f", with {words_of(best)} {_length(best, case)}")


def days_of(cost: Cost, case: Case) -> float:
    """Days of all updates; evaluation and saving aside."""
    return cost.step_s * case.steps / _DAY_S


def _length(cost: Cost, case: Case) -> str:
    whole_s = cost.step_s * case.steps
    for unit_s, unit in ((_DAY_S, "days"), (_HOUR_S, "hours"), (_MINUTE_S, "minutes")):
        if whole_s >= unit_s:
            return f"{whole_s / unit_s:.3g} {unit}"
    return f"{whole_s:.3g} seconds"

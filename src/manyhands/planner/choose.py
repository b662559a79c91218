"""Selects a plan from the best candidates, timed in turns; keeps data parallel unless another is clearly faster."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.core.errors import UserError

DATA_PARALLEL = "data parallel"
# A gain that a user would not notice isn't worth a plan that is harder to understand.
LEAST_GAIN = 1.03
# Predictions are off by more than timings, nearly always too low, and most for plans that talk much.
LEAST_PREDICTED_GAIN = 1.1
LEAST_ROUNDS = 3
_STANDARD_ERRORS = 2.0
# The standard error of a median, from the median distance to it, of normally distributed values.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826


@dataclass(frozen=True)
class Pick:
    """The plan that was chosen, and why."""

    name: str  # the finalist's
    reason: str  # one sentence
    measured_seconds: dict[str, float]  # the median of a step of each finalist; empty if nothing was timed


def time_in_turns(
    finalists: Sequence[str], measure: Callable[[str], float], rounds: int = 12
) -> dict[str, list[float]]:
    """Times all plans, by name, once in each round, in turns, so that a slow moment affects all; a collective.

    A warm-up round is not counted. `measure` returns the same number on all processes; infinity if the plan can't run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in finalists}
    for number in range(-1, rounds):
        for name in finalists if number % 2 == 0 else reversed(finalists):
            taken = measure(name)
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def pick_measured(seconds: dict[str, list[float]]) -> Pick:
    """Selects the plan from the seconds by finalist and round, as a function of these numbers alone.

    In each round data parallel's seconds are divided by the finalist's. A finalist beats data parallel if the median of
    these gains is at least 1.03, and above 1 by at least two of its standard errors. Of those that do, the one with the
    largest median is picked; if there is none, data parallel. If data parallel can't run, the least median of seconds
    is picked. Raises UserError: rounds are too few or not as many for each.
    """
    counts = {len(values) for values in seconds.values()}
    if len(counts) != 1 or min(counts) < LEAST_ROUNDS:
        raise UserError(f"each plan must be timed the same number of times, at least {LEAST_ROUNDS}", "plan")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = seconds.get(DATA_PARALLEL, [math.inf])
    if not all(map(math.isfinite, base)):
        fastest = min(medians, key=lambda name: (medians[name], name))
        return Pick(fastest, f"{fastest} is chosen: data parallel can't run here", medians)
    gains = {name: _gain(base, values) for name, values in seconds.items() if name != DATA_PARALLEL}
    best = max(gains, key=lambda name: (_beats(*gains[name]), gains[name][0], name), default="")
    if not best:
        return Pick(DATA_PARALLEL, "data parallel is kept: no other plan was found", medians)
    gain, error = gains[best]
    measured = f"measured {gain:.2f}x as fast"
    if _beats(gain, error):
        return Pick(best, f"{best} is chosen: {measured} as data parallel (± {error:.2f})", medians)
    why = "slower than data parallel" if gain < 1 else "within noise"
    found = f"the best other plan, {best}, {measured} (± {error:.2f}), {why}"
    return Pick(DATA_PARALLEL, f"data parallel is kept: {found}", medians)


def _gain(base: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The median gain of the rounds, and its standard error."""
    ratios = [ours / theirs for ours, theirs in zip(base, values, strict=True)]
    middle = statistics.median(ratios)
    distance = statistics.median(abs(ratio - middle) for ratio in ratios)
    return middle, _ERROR_OF_MEDIAN * distance / math.sqrt(len(ratios))


def _beats(gain: float, error: float) -> bool:
    return gain >= LEAST_GAIN and gain - _STANDARD_ERRORS * error > 1


def pick_predicted(predicted_seconds: dict[str, float], doubtful_seconds: Mapping[str, float] | None = None) -> Pick:
    """Selects the plan without timing: the best prediction, if it is at least 1.1 times as fast as data parallel.

    `doubtful_seconds` is the uncertainty of a prediction; with this added, a plan must still be as fast as data
    parallel.
    """
    best = min(predicted_seconds, key=lambda name: (predicted_seconds[name], name))
    if DATA_PARALLEL not in predicted_seconds:
        return Pick(best, f"{best} is chosen: data parallel can't run here", {})
    base = predicted_seconds[DATA_PARALLEL]
    if best == DATA_PARALLEL:
        return Pick(best, "data parallel is kept: no other plan is predicted to be faster", {})
    gain = base / max(predicted_seconds[best], 1e-12)
    doubt = (doubtful_seconds or {}).get(best, 0.0) / max(predicted_seconds[best], 1e-12)
    if gain < max(LEAST_PREDICTED_GAIN, 1 + doubt):
        reason = f"data parallel is kept: {best} is predicted {gain:.2f}x as fast, within the error of predictions"
        return Pick(DATA_PARALLEL, reason, {})
    return Pick(best, f"{best} is chosen: predicted {gain:.2f}x as fast as data parallel, not measured", {})

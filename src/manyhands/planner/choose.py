"""Selects a plan by measured or predicted step times; keeps data parallel unless another plan is clearly faster."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.core.errors import UserError

DATA_PARALLEL = "data parallel"
LEAST_GAIN = 1.03  # a smaller gain isn't worth a plan that is harder to understand
# Predicted times are less exact than measured times, and mostly too short, above all for plans that communicate much.
LEAST_PREDICTED_GAIN = 1.1
LEAST_ROUNDS = 3
_STANDARD_ERRORS = 2.0
# Factor from the median distance to the median, for normally distributed values, to the median's standard error.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826


@dataclass(frozen=True)
class Pick:
    """The name of the selected plan, and the reason for the selection."""

    name: str  # name of the selected plan
    reason: str  # one sentence
    measured_seconds: dict[str, float]  # median seconds of a step, by finalist; empty if nothing was timed


def time_in_rounds(finalists: Sequence[str], measure: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    """Times each plan once per round, after a warm-up round. Returns {plan: seconds in each round}.

    All processes must call this. `measure(name)` returns equal seconds on all ranks; infinity if a plan can't run here.
    """
    seconds: dict[str, list[float]] = {name: [] for name in finalists}
    for number in range(-1, rounds):
        for name in finalists if number % 2 == 0 else reversed(finalists):
            taken = measure(name)
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def pick_measured(seconds: dict[str, list[float]]) -> Pick:
    """Selects a plan by measured times. `seconds` has the step times of each plan, one for each round.

    A plan's gain in a round is the time of data parallel divided by the time of the plan. A plan beats data parallel if
    the median gain is at least 1.03 and exceeds 1 by at least two standard errors. Returns the plan with the largest
    median gain, or data parallel if no plan beats it, or the plan of the smallest median if data parallel can't run.
    Raises UserError if there are fewer than 3 rounds, or plans have different numbers of rounds.
    """
    counts = {len(values) for values in seconds.values()}
    if len(counts) != 1 or min(counts) < LEAST_ROUNDS:
        raise UserError(f"each plan must be timed the same number of times, at least {LEAST_ROUNDS}", "plan")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = seconds.get(DATA_PARALLEL, [math.inf])
    if not all(map(math.isfinite, base)):
        fastest = min(medians, key=lambda name: (medians[name], name))
        return Pick(fastest, f"{fastest} is chosen: data parallel can't run here", medians)
    gains = {name: _gain_and_error(base, values) for name, values in seconds.items() if name != DATA_PARALLEL}
    best = max(gains, key=lambda name: (_is_significant_gain(*gains[name]), gains[name][0], name), default="")
    if not best:
        return Pick(DATA_PARALLEL, "data parallel is kept: no other plan was found", medians)
    gain, error = gains[best]
    measured = f"measured {gain:.2f}x as fast"
    if _is_significant_gain(gain, error):
        return Pick(best, f"{best} is chosen: {measured} as data parallel (± {error:.2f})", medians)
    why = "slower than data parallel" if gain < 1 else "within noise"
    found = f"the best other plan, {best}, {measured} (± {error:.2f}), {why}"
    return Pick(DATA_PARALLEL, f"data parallel is kept: {found}", medians)


def _gain_and_error(base: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    ratios = [ours / theirs for ours, theirs in zip(base, values, strict=True)]
    middle = statistics.median(ratios)
    distance = statistics.median(abs(ratio - middle) for ratio in ratios)
    return middle, _ERROR_OF_MEDIAN * distance / math.sqrt(len(ratios))


def _is_significant_gain(gain: float, error: float) -> bool:
    return gain >= LEAST_GAIN and gain - _STANDARD_ERRORS * error > 1


def pick_predicted(predicted_seconds: dict[str, float], doubtful_seconds: Mapping[str, float] | None = None) -> Pick:
    """Selects the plan with the shortest predicted step if it is at least 1.1 times as fast as data parallel.

    `doubtful_seconds`: possible error of the prediction, by plan. The selected plan must win even if this is added.
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

"""The picture of what the time of each epoch went to."""

import statistics
from typing import TYPE_CHECKING

from manyhands.core.phases import PHASES
from manyhands.report.drawing import BLUE, GREEN, GREY, VERMILION, new_figure, time_unit
from manyhands.report.read import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, as all others; what computes is at the bottom, what keeps from computing above it.
_COLOURS = {
    "compute": BLUE, "update": "#56B4E9", "communication": "#E69F00", "data": VERMILION, "evaluation": GREEN,
    "saving": "#CC79A7", "records": "#F0E442", "other": GREY,
}  # fmt: skip
_MOST_BARS = 60
# A phase of a smaller part of the whole wouldn't show.
_LEAST = 0.002


def time_stack(run: RunData) -> "Figure | None":
    """A bar for each epoch, or the mean of neighbours: its seconds by phase, the mean over processes."""
    epochs = _by_epoch(run)
    if not epochs:
        return None
    from matplotlib.ticker import MaxNLocator

    size = -(-len(epochs) // _MOST_BARS)
    numbers = sorted(epochs)
    bars = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    whole = sum(sum(seconds.values()) for seconds in epochs.values())
    unit, unit_s = time_unit(max(sum(seconds.values()) for seconds in epochs.values()))
    figure = new_figure(10, 3.2)
    axes = figure.subplots()
    bottoms = [0.0] * len(bars)
    for phase, colour in _COLOURS.items():
        if sum(seconds[phase] for seconds in epochs.values()) < _LEAST * whole:
            continue
        heights = [statistics.fmean(epochs[one][phase] for one in bar) / unit_s for bar in bars]
        places, widths = [(bar[0] + bar[-1]) / 2 for bar in bars], [0.8 * len(bar) for bar in bars]
        axes.bar(places, heights, widths, bottoms, color=colour, label=phase)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{unit} an epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=len(_COLOURS))
    return figure


def _by_epoch(run: RunData) -> dict[int, dict[str, float]]:
    epochs: dict[int, dict[str, float]] = {}
    for record in run.phases:
        seconds = epochs.setdefault(record.epoch, dict.fromkeys(PHASES, 0.0))
        for phase in PHASES:
            seconds[phase] += statistics.fmean(record.seconds.get(phase) or [0.0])
    return {epoch: seconds for epoch, seconds in epochs.items() if sum(seconds.values())}

"""Pictures along the run: loss, accuracy, learning rate, speed, and what the time went to."""

import math
from typing import TYPE_CHECKING

from manyhands.report.drawing import BLUE, GREEN, VERMILION, epochs_axis, new_figure, smooth, thin, time_unit
from manyhands.report.read import RunData
from manyhands.report.summary import best_evaluation, images_per_s, steps_per_epoch
from manyhands.report.words import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
import statistics
from typing import TYPE_CHECKING

from manyhands.core.phases import PHASES
from manyhands.report.drawing import GREY

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


def curves(run: RunData) -> "Figure | None":
    """Loss and accuracy, in training and in evaluation."""
    if not run.steps and not run.evaluations:
        return None
    figure = new_figure(6)
    loss, accuracy = figure.subplots(2, 1)
    _pair(loss, run, [step.loss for step in run.steps], [evaluation.loss for evaluation in run.evaluations])
    loss.set_title("loss")
    if _spans_decades([*(step.loss for step in run.steps), *(e.loss for e in run.evaluations)]):
        loss.set_yscale("log")
        # Mathematical text is off, since class names may hold a "$"; so powers of ten are written out.
        loss.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
        loss.yaxis.set_minor_formatter(lambda _value, _place: "")
    _pair(
        accuracy,
        run,
        [100 * step.top1 for step in run.steps],
        [100 * evaluation.top1 for evaluation in run.evaluations],
    )
    accuracy.set_title("top-1 accuracy, %")
    best = best_evaluation(run)
    if best:
        at = best.step / (steps_per_epoch(run) or 1)
        accuracy.plot(at, 100 * best.top1, "o", markersize=9, fillstyle="none", color=VERMILION, label="best")
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _pair(axes: "Axes", run: RunData, training: list[float], evaluated: list[float]) -> None:
    length = steps_per_epoch(run) or 1
    training = [value if math.isfinite(value) else math.nan for value in training]
    epochs = [step.step / length for step in run.steps]
    marker = "o" if len(training) == 1 else None
    if training:
        axes.plot(*thin(epochs, training), color=BLUE, alpha=0.25, linewidth=0.8)
        smoothed = smooth(training, [max(1, step.samples) for step in run.steps])
        axes.plot(
            *thin(epochs, smoothed),
            color=BLUE,
            marker=marker,
            label="training, smoothed" if len(training) >= 10 else "training",
        )
    if evaluated:
        places = [evaluation.step / length for evaluation in run.evaluations]
        size = 4.5 if len(places) <= 60 else 2
        axes.plot(places, evaluated, "o-", color=VERMILION, markersize=size, linewidth=1.2, label="evaluation")
    epochs_axis(axes, run)


def learning_rate(run: RunData) -> "Figure | None":
    if not run.steps:
        return None
    figure = new_figure(2.4)
    axes = figure.subplots()
    length = steps_per_epoch(run) or 1
    points = thin([step.step / length for step in run.steps], [step.learning_rate for step in run.steps])
    axes.plot(*points, color=GREEN, marker="o" if len(run.steps) == 1 else None)
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    epochs_axis(axes, run)
    return figure


def throughput(run: RunData) -> "Figure | None":
    """Images per second over the time worked, with the share of it that waited for data."""
    if not run.steps:
        return None
    unit, size = time_unit(sum(session.seconds for session in run.sessions))
    times, speeds, waits = _along_time(run, size)
    shows_waits = any(wait >= 1 for wait in waits)
    figure = new_figure(3.9 if shows_waits else 2.7)
    rows = figure.subplots(
        2 if shows_waits else 1, 1, sharex=True, squeeze=False, height_ratios=(3, 1) if shows_waits else None
    )[:, 0]
    _speed(rows[0], run, times, speeds)
    if shows_waits:
        rows[1].fill_between(*thin(times, waits), color=VERMILION, alpha=0.5, linewidth=0)
        rows[1].set_ylim(0, max(20.0, min(100.0, 110 * max(step.data_share for step in run.steps))))
        rows[1].set_title("waiting for data, % of the time")
        rows[1].grid(axis="y")
    rows[-1].set_xlabel(f"training time, {unit}")
    rows[-1].set_xlim(0, max(times) * 1.01 or 1)
    return figure


def _along_time(run: RunData, unit_s: float) -> tuple[list[float], list[float], list[float]]:
    """Moments, speeds and percentages of waiting, with a gap wherever the run went on after a pause."""
    points: list[tuple[float, float, float]] = []
    last = -1
    for step in run.steps:
        number, worked = _worked(run, step.time)
        if points and number != last:
            points.append((worked / unit_s, math.nan, math.nan))
        speed = step.images_per_s if math.isfinite(step.images_per_s) else math.nan
        points.append((worked / unit_s, speed, 100 * step.data_share))
        last = number
    times, speeds, waits = ([point[column] for point in points] for column in range(3))
    return times, speeds, waits


def _speed(axes: "Axes", run: RunData, times: list[float], speeds: list[float]) -> None:
    axes.plot(*thin(times, speeds), color=BLUE, linewidth=1, marker="o" if len(times) == 1 else None)
    typical = images_per_s(run)
    if typical is not None:
        axes.axhline(typical, color=VERMILION, linewidth=1.2, linestyle="--", label=f"median {rate(typical)}")
        axes.legend(loc="lower right")
    axes.set_title("images per second")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")


def _worked(run: RunData, time: float) -> tuple[int, float]:
    """The session that a moment lies in, and the seconds of work up to it, pauses left out."""
    done = 0.0
    for number, session in enumerate(run.sessions):
        if session.start <= time <= session.end:
            return number, done + time - session.start
        done += session.seconds
    return len(run.sessions), done


def _spans_decades(values: list[float]) -> bool:
    positive = [value for value in values if math.isfinite(value)]
    return bool(positive) and min(positive) > 0 and max(positive) / min(positive) > 100


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
    figure = new_figure(3.6)
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
    axes.set_ylabel(f"{unit} per epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _by_epoch(run: RunData) -> dict[int, dict[str, float]]:
    epochs: dict[int, dict[str, float]] = {}
    for record in run.phases:
        seconds = epochs.setdefault(record.epoch, dict.fromkeys(PHASES, 0.0))
        for phase in PHASES:
            seconds[phase] += statistics.fmean(record.seconds.get(phase) or [0.0])
    return {epoch: seconds for epoch, seconds in epochs.items() if sum(seconds.values())}

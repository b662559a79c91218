"""The pictures of a report: training curves, time by phase, and confusion between classes."""

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.core import phases, quantities, records, terminal
from manyhands.report import read, summary
from manyhands.report.drawing import BLUE, GREEN, GREY, INK, VERMILION, epochs_axis, log_axis, new_figure, smooth, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors of Okabe and Ito. Computation is at the bottom, its delays are above.
_PHASE_COLORS = {
    "compute": BLUE, "update": "#56B4E9", "communication": "#E69F00", "data": VERMILION, "evaluation": GREEN,
    "saving": "#CC79A7", "records": "#F0E442", "other": GREY,
}  # fmt: skip
_MOST_BARS = 60
_LEAST_SHARE = 0.002  # a phase with a smaller share of the time wouldn't be visible
# The confusion matrix shows counts up to the first number of classes, and is drawn up to the second.
_WITH_COUNTS, _AS_MATRIX = 12, 50
_WORST_CLASSES, _PAIRS = 20, 30


def draw_curves(run: read.RunData) -> "Figure | None":
    if not run.steps and not run.evaluations:
        return None
    figure = new_figure(6)
    loss, accuracy = figure.subplots(2, 1)
    losses = [step.loss for step in run.steps], [evaluation.loss for evaluation in run.evaluations]
    _training_and_evaluation(loss, run, *losses)
    loss.set_title("loss")
    finite = [value for values in losses for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 100:
        log_axis(loss, "g")
    evaluated = [100 * evaluation.top1 for evaluation in run.evaluations]
    _training_and_evaluation(accuracy, run, [100 * step.top1 for step in run.steps], evaluated)
    accuracy.set_title("top-1 accuracy, %")
    if best := summary.best_evaluation(run):
        at = best.step / (summary.steps_per_epoch(run) or 1)
        accuracy.plot(at, 100 * best.top1, "o", markersize=9, fillstyle="none", color=VERMILION, label="best")
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _training_and_evaluation(axes: "Axes", run: read.RunData, training: list[float], evaluated: list[float]) -> None:
    length = summary.steps_per_epoch(run) or 1
    if training:
        training = [value if math.isfinite(value) else math.nan for value in training]
        epochs = [step.step / length for step in run.steps]
        axes.plot(*thin(epochs, training), color=BLUE, alpha=0.25, linewidth=0.8)
        smoothed = thin(epochs, smooth(training, [max(1, step.samples) for step in run.steps]))
        label = "training, smoothed" if len(training) >= 10 else "training"
        axes.plot(*smoothed, color=BLUE, marker="o" if len(training) == 1 else None, label=label)
    if evaluated:
        epochs = [evaluation.step / length for evaluation in run.evaluations]
        size = 4.5 if len(epochs) <= 60 else 2
        axes.plot(epochs, evaluated, "o-", color=VERMILION, markersize=size, linewidth=1.2, label="evaluation")
    epochs_axis(axes, run)


def draw_learning_rate(run: read.RunData) -> "Figure | None":
    if not run.steps:
        return None
    figure = new_figure(2.4)
    axes = figure.subplots()
    length = summary.steps_per_epoch(run) or 1
    points = thin([step.step / length for step in run.steps], [step.learning_rate for step in run.steps])
    axes.plot(*points, color=GREEN, marker="o" if len(run.steps) == 1 else None)
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    epochs_axis(axes, run)
    return figure


def draw_throughput(run: read.RunData) -> "Figure | None":
    if not run.steps:
        return None
    unit, unit_s = summary.time_unit(sum(session.seconds for session in run.sessions))
    times, speeds, waits = _along_time(run, unit_s)
    shows_waits = any(wait >= 1 for wait in waits)
    figure = new_figure(3.9 if shows_waits else 2.7)
    ratios = (3, 1) if shows_waits else None
    rows = figure.subplots(2 if shows_waits else 1, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    speed, typical = rows[0], summary.images_per_s(run)
    speed.plot(*thin(times, speeds), color=BLUE, linewidth=1, marker="o" if len(times) == 1 else None)
    if typical is not None:
        speed.axhline(typical, color=VERMILION, linewidth=1.2, linestyle="--", label=f"median {summary.rate(typical)}")
        speed.legend(loc="lower right")
    speed.set_title("images per second")
    speed.set_ylim(bottom=0)
    speed.grid(axis="y")
    if shows_waits:
        rows[1].fill_between(*thin(times, waits), color=VERMILION, alpha=0.5, linewidth=0)
        rows[1].set_ylim(0, max(20.0, min(100.0, 110 * max(step.data_share for step in run.steps))))
        rows[1].set_title("waiting for data, % of the time")
        rows[1].grid(axis="y")
    rows[-1].set_xlabel(f"training time, {unit}")
    rows[-1].set_xlim(0, max(times) * 1.01 or 1)
    return figure


def _along_time(run: read.RunData, unit_s: float) -> tuple[list[float], list[float], list[float]]:
    """Returns training times (units of `unit_s`), images per second, and % of time waiting. Pauses are NaN."""
    points: list[tuple[float, float, float]] = []
    last = None
    for step in run.steps:
        current = next((number for number, one in enumerate(run.sessions) if one.start <= step.time <= one.end), None)
        worked = sum(session.seconds for session in run.sessions[:current])
        worked += 0.0 if current is None else step.time - run.sessions[current].start
        if points and current != last:
            points.append((worked / unit_s, math.nan, math.nan))
        speed = step.images_per_s if math.isfinite(step.images_per_s) else math.nan
        points.append((worked / unit_s, speed, 100 * step.data_share))
        last = current
    times, speeds, waits = map(list, zip(*points, strict=True))
    return times, speeds, waits


def draw_time_stack(run: read.RunData) -> "Figure | None":
    """Draws seconds by phase, averaged over processes, with a bar for each epoch or group of epochs."""
    epochs: dict[int, dict[str, float]] = {}
    for record in run.phases:
        seconds = epochs.setdefault(record.epoch, dict.fromkeys(phases.PHASES, 0.0))
        for phase in phases.PHASES:
            seconds[phase] += statistics.fmean(record.seconds.get(phase) or [0.0])
    epochs = {epoch: seconds for epoch, seconds in epochs.items() if sum(seconds.values())}
    if not epochs:
        return None
    from matplotlib.ticker import MaxNLocator

    size = -(-len(epochs) // _MOST_BARS)
    numbers = sorted(epochs)
    bars = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    total = sum(sum(seconds.values()) for seconds in epochs.values())
    unit, unit_s = summary.time_unit(max(sum(seconds.values()) for seconds in epochs.values()))
    figure = new_figure(3.6)
    axes = figure.subplots()
    centers, widths = [(bar[0] + bar[-1]) / 2 for bar in bars], [0.8 * len(bar) for bar in bars]
    bottoms = [0.0] * len(bars)
    for phase, color in _PHASE_COLORS.items():
        if sum(seconds[phase] for seconds in epochs.values()) < _LEAST_SHARE * total:
            continue
        heights = [statistics.fmean(epochs[one][phase] for one in bar) / unit_s for bar in bars]
        axes.bar(centers, heights, widths, bottoms, color=color, label=phase)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{unit} per epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@dataclass(frozen=True)
class ClassScore:
    """The numbers of correct and wrong predictions of one class."""

    name: str
    count: int  # samples of the class
    right: int  # samples of the class that were predicted as the class
    predicted: int  # all samples predicted as this class

    @property
    def recall(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def precision(self) -> float:
        """The fraction of predictions of this class that are correct; NaN if the class was never predicted."""
        return self.right / self.predicted if self.predicted else math.nan


@dataclass(frozen=True)
class Pair:
    """The number of samples of one class that were predicted as another class."""

    true: str
    guess: str
    count: int
    share: float  # fraction of the true class's samples


def shown_detail(run: read.RunData) -> records.EvaluationDetail | None:
    """Returns details of the best evaluation, else of the newest; None if these details have no confusion matrix."""
    detail = run.best or run.last
    return detail if detail and detail.classes and detail.confusion else None


def _names_and_cells(detail: records.EvaluationDetail) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Returns the class names, and the valid entries (true, predicted, count) of the sparse confusion matrix."""
    size = range(len(detail.classes))
    cells = [(true, guess, count) for true, guess, count in detail.confusion if true in size and guess in size]
    return [terminal.plain(name) or f"class {index}" for index, name in enumerate(detail.classes)], cells


def class_scores(detail: records.EvaluationDetail) -> list[ClassScore]:
    """Returns the scores of all classes, the lowest recall first, classes without samples last."""
    names, cells = _names_and_cells(detail)
    count, right, predicted = ([0] * len(names) for _ in range(3))
    for true, guess, number in cells:
        count[true] += number
        predicted[guess] += number
        right[true] += number if true == guess else 0
    scores = map(ClassScore, names, count, right, predicted)
    return sorted(scores, key=lambda score: (score.count == 0, score.recall if score.count else 0.0))


def confused_pairs(detail: records.EvaluationDetail, most: int = _PAIRS) -> list[Pair]:
    """Returns the `most` frequent confusions, sorted by count, then by fraction of the class."""
    names, cells = _names_and_cells(detail)
    totals = Counter[int]()
    for true, _, number in cells:
        totals[true] += number
    wrong = [cell for cell in cells if cell[0] != cell[1] and cell[2] > 0]
    pairs = [Pair(names[true], names[guess], number, number / totals[true]) for true, guess, number in wrong]
    return sorted(pairs, key=lambda pair: (-pair.count, -pair.share))[:most]


def draw_confusion(run: read.RunData) -> "Figure | None":
    detail = shown_detail(run)
    if detail and len(detail.classes) <= _AS_MATRIX:
        return _draw_matrix(detail)
    pairs = confused_pairs(detail) if detail else []
    if not pairs:
        return None
    names = [f"{summary.shorten(pair.true, 22)} → {summary.shorten(pair.guess, 22)}" for pair in pairs]
    notes = [f"{pair.count}  ({summary.percent(pair.share)})" for pair in pairs]
    return _draw_bars(names, [float(pair.count) for pair in pairs], notes, "samples (share of the class)")


def _draw_matrix(detail: records.EvaluationDetail) -> "Figure":
    from matplotlib.colors import LinearSegmentedColormap

    names, cells = _names_and_cells(detail)
    size = len(names)
    counts = [[0] * size for _ in range(size)]
    for true, guess, number in cells:
        counts[true][guess] += number
    shares = [[number / (sum(row) or 1) for number in row] for row in counts]
    side = 2.6 + 0.22 * size if size <= _WITH_COUNTS else min(9.5, 4.0 + 0.13 * size)
    figure = new_figure(side, side + 0.6)
    axes = figure.subplots()
    # Starts from transparent, so that an empty cell has the page's color.
    blues = LinearSegmentedColormap.from_list("blues", [BLUE + "00", BLUE + "ff"])
    image = axes.imshow(shares, cmap=blues, vmin=0, vmax=1)
    small = 10 if size <= _WITH_COUNTS else (8.5 if size <= 25 else 7)
    names = [summary.shorten(name, 18) for name in names]
    axes.set_xticks(range(size), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=small)
    axes.set_yticks(range(size), names, fontsize=small)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for true, row in enumerate(counts if size <= _WITH_COUNTS else []):
        for guess, number in enumerate(row):
            if number:
                color = "white" if shares[true][guess] > 0.55 else INK
                axes.text(guess, true, str(number), ha="center", va="center", fontsize=9, color=color)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=30, ticks=[0, 0.5, 1], label="share of the class")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue] -- matplotlib declares it as a callable
    bar.ax.set_yticklabels(["0", "50 %", "100 %"])
    return figure


def draw_per_class(run: read.RunData) -> "Figure | None":
    detail = shown_detail(run)
    worst = [score for score in class_scores(detail) if score.count][:_WORST_CLASSES] if detail else []
    if not detail or not worst:
        return None
    names = [summary.shorten(score.name, 26) for score in worst]
    notes = [f"{quantities.percentage(score.recall)}  ({score.right} of {score.count})" for score in worst]
    figure = _draw_bars(names, [100 * score.recall for score in worst], notes, "recall, %", limit=140)
    axes, top1 = figure.axes[0], detail.top1
    axes.set_xticks(range(0, 101, 20))
    axes.axvline(100 * top1, color=VERMILION, linewidth=1.2, linestyle="--", label=f"top-1: {summary.percent(top1)}")
    figure.legend(loc="outside lower right")
    return figure


def _draw_bars(names: list[str], values: list[float], notes: list[str], label: str, limit: float = 0.0) -> "Figure":
    figure = new_figure(1.3 + 0.27 * len(names))
    axes = figure.subplots()
    axes.barh(range(len(names)), values, color=BLUE, height=0.68)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(0, limit or 1.25 * (max(values) or 1.0))
    box: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    place: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
    for at, (value, note) in enumerate(zip(values, notes, strict=True)):
        axes.annotate(note, (value, at), fontsize=9, color=GREY, bbox=box, **place)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x")
    return figure


# File name, title on the page, and drawing function, which returns None if records are missing.
PICTURES: tuple[tuple[str, str, "Callable[[read.RunData], Figure | None]"], ...] = (
    ("curves", "Loss and accuracy", draw_curves),
    ("learning-rate", "Learning rate", draw_learning_rate),
    ("throughput", "Speed", draw_throughput),
    ("time", "Where the time goes", draw_time_stack),
    ("confusion", "Confusion matrix", draw_confusion),
    ("classes", "Recall by class", draw_per_class),
)

"""Which classes a network knows and which it takes for others: as data, and as pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.core.quantities import percentage
from manyhands.core.records import EvaluationDetail
from manyhands.core.terminal import plain
from manyhands.report.drawing import BLUE, GREY, INK, VERMILION, new_figure
from manyhands.report.read import RunData
from manyhands.report.words import percent, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Up to so many classes, the matrix has its counts written in; up to so many, it is drawn at all.
_WITH_COUNTS, _AS_MATRIX = 12, 50
_WORST_CLASSES, _PAIRS = 20, 30


@dataclass(frozen=True)
class ClassScore:
    """How one class was recognised."""

    name: str  # the class
    count: int  # its samples
    right: int  # those that were recognised
    predicted: int  # all samples that were taken for this class

    @property
    def recall(self) -> float:
        """Share of the class's samples that were recognised; NaN where it has none."""
        return self.right / self.count if self.count else float("nan")

    @property
    def precision(self) -> float:
        """Share of what was taken for the class that was; NaN where nothing was."""
        return self.right / self.predicted if self.predicted else float("nan")


@dataclass(frozen=True)
class Pair:
    """Samples of one class that were taken for another."""

    true: str
    guess: str
    count: int
    share: float


def shown_detail(run: RunData) -> EvaluationDetail | None:
    """The counts to show: at the best evaluation, else at the newest."""
    detail = run.best or run.last
    return detail if detail and detail.classes and detail.confusion else None


def _cells(detail: EvaluationDetail) -> list[tuple[int, int, int]]:
    size = range(len(detail.classes))
    return [(true, guess, count) for true, guess, count in detail.confusion if true in size and guess in size]


def class_scores(detail: EvaluationDetail) -> list[ClassScore]:
    """Every class, the worst first; classes without samples at the end."""
    count, right, predicted = ([0] * len(detail.classes) for _ in range(3))
    for true, guess, number in _cells(detail):
        count[true] += number
        predicted[guess] += number
        right[true] += number if true == guess else 0
    names = [plain(name) or f"class {index}" for index, name in enumerate(detail.classes)]
    scores = [ClassScore(*entry) for entry in zip(names, count, right, predicted, strict=True)]
    return sorted(scores, key=lambda score: (score.count == 0, score.recall if score.count else 0.0))


def confused_pairs(detail: EvaluationDetail, most: int = _PAIRS) -> list[Pair]:
    """The most frequent mistakes, by their number and then by their share of the class."""
    totals: dict[int, int] = {}
    for true, _, number in _cells(detail):
        totals[true] = totals.get(true, 0) + number
    names = [plain(name) or f"class {index}" for index, name in enumerate(detail.classes)]
    wrong = [
        Pair(names[true], names[guess], number, number / totals[true])
        for true, guess, number in _cells(detail)
        if true != guess and number > 0
    ]
    return sorted(wrong, key=lambda pair: (-pair.count, -pair.share))[:most]


def confusion(run: RunData) -> "Figure | None":
    """The confusion matrix, or the worst pairs where it would be too fine to see."""
    detail = shown_detail(run)
    if detail is None:
        return None
    return _matrix(detail) if len(detail.classes) <= _AS_MATRIX else _pairs(detail)


def _matrix(detail: EvaluationDetail) -> "Figure":
    from matplotlib.colors import LinearSegmentedColormap

    size = len(detail.classes)
    counts = [[0] * size for _ in range(size)]
    for true, guess, number in _cells(detail):
        counts[true][guess] += number
    shares = [[number / (sum(row) or 1) for number in row] for row in counts]
    side = 2.6 + 0.22 * size if size <= _WITH_COUNTS else min(9.5, 4.0 + 0.13 * size)
    figure = new_figure(side, side + 0.6)
    axes = figure.subplots()
    # From transparent, so that an empty cell has the page's colour.
    blues = LinearSegmentedColormap.from_list("blues", [BLUE + "00", BLUE + "ff"])
    image = axes.imshow(shares, cmap=blues, vmin=0, vmax=1)
    small = 10 if size <= _WITH_COUNTS else (8.5 if size <= 25 else 7)
    names = [shorten(plain(name) or f"class {index}", 18) for index, name in enumerate(detail.classes)]
    upright = max(map(len, names)) > 2
    axes.set_xticks(range(size), names, rotation=90 if upright else 0, fontsize=small)
    axes.set_yticks(range(size), names, fontsize=small)
    axes.set(xlabel="recognised as", ylabel="is")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if size <= _WITH_COUNTS:
        _write_counts(axes, counts, shares)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=30, ticks=[0, 0.5, 1], label="share of the class")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue] -- matplotlib declares it as a callable
    bar.ax.set_yticklabels(["0", "50 %", "100 %"])
    return figure


def _write_counts(axes: "Axes", counts: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]) -> None:
    for true, row in enumerate(counts):
        for guess, number in enumerate(row):
            if number:
                colour = "white" if shares[true][guess] > 0.55 else INK
                axes.text(guess, true, str(number), ha="center", va="center", fontsize=9, color=colour)


def _pairs(detail: EvaluationDetail) -> "Figure | None":
    pairs = confused_pairs(detail)
    if not pairs:
        return None
    names = [f"{shorten(pair.true, 22)} → {shorten(pair.guess, 22)}" for pair in pairs]
    return _bars(
        names,
        [float(pair.count) for pair in pairs],
        [f"{pair.count}  ({percent(pair.share)})" for pair in pairs],
        "samples (share of the class)",
    )


def per_class(run: RunData) -> "Figure | None":
    detail = shown_detail(run)
    scores = [score for score in class_scores(detail) if score.count] if detail else []
    if not detail or not scores:
        return None
    worst = scores[:_WORST_CLASSES]
    figure = _bars(
        [shorten(score.name, 26) for score in worst],
        [100 * score.recall for score in worst],
        [f"{percentage(score.recall)}  ({score.right} of {score.count})" for score in worst],
        "recall, %",
        limit=140,
    )
    axes = figure.axes[0]
    axes.set_xticks(range(0, 101, 20))
    axes.axvline(
        100 * detail.top1, color=VERMILION, linewidth=1.2, linestyle="--", label=f"top-1: {percent(detail.top1)}"
    )
    figure.legend(loc="outside lower right")
    return figure


def _bars(names: list[str], values: list[float], notes: list[str], label: str, limit: float = 0.0) -> "Figure":
    figure = new_figure(1.3 + 0.27 * len(names))
    axes = figure.subplots()
    axes.barh(range(len(names)), values, color=BLUE, height=0.68)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    top = max(values, default=1.0) or 1.0
    axes.set_xlim(0, limit or top * 1.25)
    for at, (value, note) in enumerate(zip(values, notes, strict=True)):
        axes.annotate(
            note,
            (value, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=GREY,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x")
    return figure

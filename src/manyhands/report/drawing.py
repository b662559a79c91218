"""How every picture of the report looks: colours, fonts and sizes. matplotlib is loaded on first use."""

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core.files import replacing
from manyhands.report.read import RunData
from manyhands.report.summary import steps_per_epoch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by people with any kind of colour vision, and by their greys in print.
# Source: Okabe and Ito 2008, Color Universal Design.
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6b7280"
INK, HAIR = "#1f2933", "#e3e7ec"

# More points than this don't show on a page; they are averaged.
_MOST_POINTS = 600


@contextmanager
def house_style(fonts: Sequence[str] = ("DejaVu Sans",)) -> Iterator[None]:
    """Whatever is drawn inside looks alike, without a word on the terminal; for what a font lacks the next is taken."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib as mpl

        with warnings.catch_warnings(), mpl.rc_context():
            mpl.rcdefaults()  # without what a matplotlibrc of the current folder says, which others may have written
            mpl.rcParams.update(_settings(fonts))
            warnings.filterwarnings("ignore", message=r"Glyph \d+")
            yield
    finally:
        logger.setLevel(level)


def _settings(fonts: Sequence[str]) -> Any:
    return {
        "font.family": list(fonts),
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelcolor": INK,
        "axes.edgecolor": GREY,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": HAIR,
        "grid.linewidth": 0.8,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        # A class may be called "$5": no formulas.
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "axes.unicode_minus": False,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "figure.facecolor": "white",
        # The browser draws the letters, with the fonts that it has.
        "svg.fonttype": "none",
        "svg.hashsalt": "manyhands",
    }


def new_figure(height: float, width: float = 5.0) -> "Figure":
    """An empty figure of so many inches, that no window knows of; its letters can be read on a phone too."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_png(figure: "Figure", file: Path) -> None:
    with replacing(file) as part:
        figure.savefig(part, format="png", dpi=150, metadata={"Software": None})


def epochs_axis(axes: "Axes", run: RunData) -> None:
    """Marks the horizontal axis in epochs, and restarts by dotted lines."""
    axes.set_xlabel("epoch")
    axes.grid(axis="y")
    length = steps_per_epoch(run) or 1
    ends = [record.step / length for record in (*run.steps[-1:], *run.evaluations[-1:])]
    if max(ends, default=0.0) > 0:
        axes.set_xlim(0, max(ends) * 1.01)
    marks = sorted({event.step / length for event in run.events if event.kind == "resumed" and event.step is not None})
    for number, mark in enumerate(marks):
        axes.axvline(mark, color=GREY, linewidth=1, linestyle=":", label="resumed" if number == 0 else None)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that an axis of so many seconds is marked in, and its seconds."""
    if seconds < 300:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """The same curve with few enough points: means over equal runs of neighbours."""
    size = -(-len(xs) // _MOST_POINTS)
    if size <= 1:
        return list(xs), list(ys)
    parts = range(0, len(xs), size)
    return [_mean(xs[at : at + size]) for at in parts], [_mean(ys[at : at + size]) for at in parts]


def smooth(values: Sequence[float], weights: Sequence[float], share: float = 0.04) -> list[float]:
    """A centred mean over a window of `share` of all values, each weighted by its samples."""
    half = max(1, round(len(values) * share / 2)) if len(values) >= 10 else 0
    totals, sums = [0.0], [0.0]
    for value, weight in zip(values, weights, strict=True):
        known = weight if math.isfinite(value) else 0.0
        totals.append(totals[-1] + known)
        sums.append(sums[-1] + (known * value if known else 0.0))
    means: list[float] = []
    for at in range(len(values)):
        # The window shrinks evenly towards both ends, so that the curve doesn't lag there.
        reach = min(half, at, len(values) - 1 - at)
        weight = totals[at + reach + 1] - totals[at - reach]
        means.append((sums[at + reach + 1] - sums[at - reach]) / weight if weight else float("nan"))
    return means


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan

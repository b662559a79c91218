"""The style shared by all pictures: colors, fonts, axes and averaging. Imports matplotlib on first use."""

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core.files import replaced_on_success
from manyhands.report import read, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with any color vision, and as greys in print. Source: Okabe and Ito 2008, Color Universal Design.
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6b7280"
INK, HAIR = "#1f2933", "#e3e7ec"

_MOST_POINTS = 600  # a page can't show more points; more are averaged
_FIRST_FONT = "DejaVu Sans"
# Fonts with Chinese characters, by their names on several systems, that match the first font.
_PREFERRED_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "Noto Sans CJK JP",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei",
    "SimHei", "Droid Sans Fallback", "Arial Unicode MS",
)  # fmt: skip
_STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelcolor": INK, "axes.edgecolor": GREY, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": HAIR, "grid.linewidth": 0.8,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "legend.frameon": False, "lines.linewidth": 1.8,
    "figure.facecolor": "white",
    # No formulas: a class may be called "$5".
    "text.parse_math": False, "axes.formatter.use_mathtext": False, "axes.unicode_minus": False,
    # Text stays text, which the browser draws with its own fonts.
    "svg.fonttype": "none", "svg.hashsalt": "manyhands",
}  # fmt: skip


@contextmanager
def house_style(fonts: Sequence[str] = (_FIRST_FONT,)) -> Iterator[None]:
    """Applies the shared style and silences matplotlib. Later `fonts` supply letters that earlier `fonts` lack."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib as mpl

        with warnings.catch_warnings(), mpl.rc_context():
            mpl.rcdefaults()  # ignores a matplotlibrc in the current folder, where others may write
            mpl.rcParams.update(_STYLE)
            mpl.rcParams["font.family"] = list(fonts)
            warnings.filterwarnings("ignore", message=r"Glyph \d+")
            yield
    finally:
        logger.setLevel(level)


def new_figure(height: float, width: float = 5.0) -> "Figure":
    """Returns an empty figure without a window; sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: "Figure", file: Path) -> None:
    """Writes a figure as .png or .svg, without a date, so that equal figures make equal files."""
    kind = file.suffix.lower()[1:]
    with replaced_on_success(file) as part:
        figure.savefig(part, format=kind, dpi=150, metadata={"Date" if kind == "svg" else "Software": None})


def epochs_axis(axes: "Axes", run: read.RunData) -> None:
    """Labels the horizontal axis in epochs, and marks resumptions by dotted lines."""
    axes.set_xlabel("epoch")
    axes.grid(axis="y")
    length = summary.steps_per_epoch(run) or 1
    ends = [record.step / length for record in (*run.steps[-1:], *run.evaluations[-1:])]
    if max(ends, default=0.0) > 0:
        axes.set_xlim(0, max(ends) * 1.01)
    marks = sorted({event.step / length for event in run.events if event.kind == "resumed" and event.step is not None})
    for number, mark in enumerate(marks):
        axes.axvline(mark, color=GREY, linewidth=1, linestyle=":", label="resumed" if number == 0 else None)


def log_axis(axes: "Axes", form: str) -> None:
    """Makes the vertical axis logarithmic. `form` is the format of its numbers, which replace labels like 10^3."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _place: format(value, form))
    axes.yaxis.set_minor_formatter(lambda _value, _place: "")


def thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Averages groups of neighboring points, so that at most _MOST_POINTS remain."""
    size = -(-len(xs) // _MOST_POINTS)
    if size <= 1:
        return list(xs), list(ys)
    groups = [slice(at, at + size) for at in range(0, len(xs), size)]
    return [_mean(xs[group]) for group in groups], [_mean(ys[group]) for group in groups]


def smooth(values: Sequence[float], weights: Sequence[float], share: float = 0.04) -> list[float]:
    """Returns weighted moving averages over a centered window. The window contains the fraction `share` of `values`."""
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
        means.append((sums[at + reach + 1] - sums[at - reach]) / weight if weight else math.nan)
    return means


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def fonts_for(texts: Iterable[str]) -> tuple[list[str], str]:
    """Returns (fonts that have the letters of `texts`, matplotlib's own first; the letters that no font has)."""
    from matplotlib import font_manager

    missing = {letter for text in texts for letter in text if letter.isprintable() and not letter.isspace()}
    missing -= _letters_of_font(str(font_manager.findfont(_FIRST_FONT)))
    chosen = [_FIRST_FONT]
    for name, file in _installed_fonts() if missing else ():
        if found := missing & _letters_of_font(file):
            chosen.append(name)
            missing -= found
        if not missing:
            break
    return chosen, "".join(sorted(missing))


def _installed_fonts() -> list[tuple[str, str]]:
    from matplotlib import font_manager

    manager = font_manager.fontManager
    cached = {entry.fname for entry in manager.ttflist}
    # matplotlib's cached list lacks fonts that were installed later.
    for file in [one for one in font_manager.findSystemFonts() if one not in cached]:
        with suppress(RuntimeError, OSError, ValueError):  # not a font, or an unsupported one
            manager.addfont(file)
    named: dict[str, str] = {}
    for entry in manager.ttflist:
        regular = entry.style == "normal" and str(entry.weight) in {"400", "normal", "regular"}
        if regular and not entry.name.startswith("Last Resort"):  # matplotlib's font of boxes for all letters
            named.setdefault(entry.name, entry.fname)
    order = {name: place for place, name in enumerate(_PREFERRED_FONTS)}
    return sorted(named.items(), key=lambda pair: (order.get(pair[0], math.inf), pair[0]))


@cache
def _letters_of_font(file: str) -> frozenset[str]:
    from matplotlib import ft2font

    try:
        font: Any = ft2font.FT2Font(file)
    except (RuntimeError, OSError, ValueError):
        return frozenset()
    return frozenset(map(chr, font.get_charmap()))

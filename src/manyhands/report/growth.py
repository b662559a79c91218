"""Predicted growth: a table for the terminal, and one picture of throughput, efficiency and cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from manyhands.core.errors import UserError
from manyhands.core.files import replacing
from manyhands.report.drawing import BLUE, GREEN, GREY, VERMILION, house_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
_ENDINGS = (".svg", ".png")
# Marks on an axis that don't touch.
_FEW = 7


def refuse_file(file: Path, *, force: bool) -> None:
    """Raises UserError where the picture can't be written there, or would overwrite something."""
    if file.suffix.lower() not in _ENDINGS:
        what = f"the picture must be a {' or '.join(_ENDINGS)} file, found {file.name}"
        raise UserError(what, "--out", ("use --out growth.svg", "or --json for the figures"))
    if file.exists() and not force:
        raise UserError(
            f"{file} already exists", str(file), ("overwrite the file with --force", "or choose another file")
        )


def growth_table(rows: Rows) -> Table:
    """A line for each number of processes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ("processes", "samples per process", "step ms", "compute", "images/s", "efficiency", "s per epoch")
    for name in (*heads, "process-hours"):
        table.add_column(name, justify="right")
    table.add_column("gradients")
    for row in rows:
        numbers = (row["step_ms"], row["compute_ms"], row["images_per_s"])
        table.add_row(
            str(row["processes"]),
            str(row["samples"]),
            *map(_short, numbers),
            f"{row['efficiency']:.0%}",
            _short(row["epoch_s"]),
            _short(row["process_hours"]),
            Text(row["sync"]),
        )
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def draw_growth(rows: Rows, title: str, file: Path) -> None:
    """Writes one picture, whole in itself."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with house_style(), replacing(file) as part:
        figure = _figure(rows, title)
        own: dict[str, Any] = {"Date": None} if file.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(part, format=file.suffix.lower()[1:], dpi=150, metadata=own)


def _figure(rows: Rows, title: str) -> "Figure":
    figure = new_figure(3.6, 10)
    figure.suptitle(title, x=0.01, horizontalalignment="left")
    speed, efficiency, cost = figure.subplots(1, 3)
    counts = [row["processes"] for row in rows]
    speeds = [row["images_per_s"] for row in rows]
    straight = [speeds[0] * count / counts[0] for count in counts]
    speed.plot(counts, straight, color=GREY, linewidth=1, linestyle="--", label="linear")
    speed.plot(counts, speeds, "o-", color=BLUE, markersize=4, label="predicted")
    speed.set_title("images per second")
    speed.legend()
    efficiency.plot(counts, [100 * row["efficiency"] for row in rows], "o-", color=GREEN, markersize=4)
    efficiency.set_ylim(bottom=0)
    efficiency.set_title("efficiency, %")
    cost.plot(counts, [row["process_hours"] for row in rows], "o-", color=VERMILION, markersize=4)
    cost.set_title("process-hours per epoch")
    for axes in (speed, cost):
        axes.set_yscale("log")
        # Mathematical text is off; so powers of ten are written out.
        axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,.10g}")
        axes.yaxis.set_minor_formatter(lambda _value, _place: "")
    for axes in (speed, efficiency, cost):
        _mark(axes, counts)
    return figure


def _mark(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xscale("log")
    doubles = [count for count in counts if len(counts) <= _FEW or not count & (count - 1)]
    shown = doubles[:: -(-len(doubles) // _FEW)]
    axes.set_xticks(shown, [str(count) for count in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("processes")
    axes.grid(axis="y")

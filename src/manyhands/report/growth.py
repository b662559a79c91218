"""Predicted scaling: a table for the terminal, and a picture of throughput, efficiency and cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from manyhands.core.errors import UserError
from manyhands.core.files import check_output_files
from manyhands.report.drawing import BLUE, GREEN, GREY, VERMILION, house_style, log_axis, new_figure, write_figure

Rows = Sequence[Mapping[str, Any]]
_ENDINGS = (".svg", ".png")
_FEW = 7  # maximum number of axis labels that don't overlap


def check_picture_file(file: Path, *, force: bool) -> None:
    if file.suffix.lower() not in _ENDINGS:
        what = f"the picture must be a {' or '.join(_ENDINGS)} file, found {file.name}"
        raise UserError(what, "--out", ("use --out growth.svg", "or print the values with --json"))
    check_output_files(file, force=force)


def growth_table(rows: Rows) -> Table:
    def short(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    speed = ("step ms", "compute", "images/s", "efficiency", "s per epoch")
    for name in ("processes", "samples per process", *speed, "process-hours"):
        table.add_column(name, justify="right")
    table.add_column("gradients")
    for row in rows:
        cells = [str(row[name]) for name in ("processes", "samples")]
        cells += [short(row[name]) for name in ("step_ms", "compute_ms", "images_per_s")]
        cells += [f"{row['efficiency']:.0%}", short(row["epoch_s"]), short(row["process_hours"])]
        table.add_row(*cells, Text(row["sync"]))
    return table


def draw_growth(rows: Rows, title: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure = new_figure(3.6, 10)
        figure.suptitle(title, x=0.01, horizontalalignment="left")
        speed, efficiency, cost = figure.subplots(1, 3)
        counts = [row["processes"] for row in rows]
        speeds = [row["images_per_s"] for row in rows]
        speed.plot(counts, [speeds[0] * count / counts[0] for count in counts], "--", color=GREY, lw=1, label="linear")
        for axes, title, values, color in (
            (speed, "images per second", speeds, BLUE),
            (efficiency, "efficiency, %", [100 * row["efficiency"] for row in rows], GREEN),
            (cost, "process-hours per epoch", [row["process_hours"] for row in rows], VERMILION),
        ):
            axes.plot(counts, values, "o-", color=color, markersize=4, label="predicted")
            axes.set_title(title)
        speed.legend()
        efficiency.set_ylim(bottom=0)
        log_axis(speed, ",.10g")
        log_axis(cost, ",.10g")
        doubles = [count for count in counts if len(counts) <= _FEW or not count & (count - 1)]
        shown = doubles[:: -(-len(doubles) // _FEW)]
        for axes in (speed, efficiency, cost):
            axes.set_xscale("log")
            axes.set_xticks(shown, [str(count) for count in shown])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("processes")
            axes.grid(axis="y")
        write_figure(figure, file)

"""A picture of what goes through between each two machines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.report.drawing import GREY, INK, house_style, write_png

Pair = tuple[str, str]
MOST_WRITTEN = 24


def draw_links(hosts: Sequence[str], mbps: Mapping[Pair, float], latency_ms: Mapping[Pair, float], file: Path) -> None:
    """Draws a table of machines, sender by receiver, coloured by speed, with speed and latency written in.

    A pair (from, to) that has no Mbit/s was not measured; a latency is of a small message's way there and back. The PNG
    is written whole or not at all.
    """
    with house_style():
        from matplotlib.figure import Figure

        size = min(max(3.5, 1.0 + 0.8 * len(hosts)), 20.0)
        figure = Figure(figsize=(size + 1.2, size), layout="constrained")
        axes = figure.add_subplot()
        _draw_cells(figure, axes, hosts, mbps)
        if len(hosts) <= MOST_WRITTEN:
            for row, one in enumerate(hosts):
                for column, two in enumerate(hosts):
                    _write(axes, (column, row), mbps.get((one, two)), latency_ms.get((one, two)), same=one == two)
        axes.set_xticks(range(len(hosts)), hosts, rotation=30 if len(hosts) > 4 else 0)
        axes.set_yticks(range(len(hosts)), hosts)
        axes.set_xlabel("to")
        axes.set_ylabel("from")
        axes.set_title("Links between the machines")
        axes.grid(visible=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_png(figure, file)


def _draw_cells(figure: Any, axes: Any, hosts: Sequence[str], mbps: Mapping[Pair, float]) -> None:
    """The scale is logarithmic and always reaches from 1 Mbit/s to 10 Gbit/s, so that pictures can be compared."""
    from matplotlib.colors import LogNorm

    rows = [[min(max(mbps.get((one, two), float("nan")), 1.0), 1e4) for two in hosts] for one in hosts]
    image = axes.imshow(rows, cmap="cividis", norm=LogNorm(1.0, 1e4))
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_ticks([1, 10, 100, 1000, 10_000], labels=["1 Mbit/s", "10", "100", "1 Gbit/s", "10"])


def _write(axes: Any, place: tuple[int, int], mbps: float | None, latency_ms: float | None, *, same: bool) -> None:
    if mbps is None:
        axes.text(*place, "" if same else "?", ha="center", va="center", color=GREY)
        return
    text = f"{mbps:.3g}" if mbps < 1000 else f"{mbps / 1000:.3g} G"
    below = f"\n{latency_ms:.2g} ms" if latency_ms is not None else ""
    axes.text(*place, text + below, ha="center", va="center", color=INK if mbps > 200 else "white", fontsize=9)

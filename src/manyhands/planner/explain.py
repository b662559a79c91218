"""Explains the choice of a plan: a table of the candidates, and a picture of the sharding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from manyhands.core.files import replaced_on_success
from manyhands.core.mesh import Mesh

if TYPE_CHECKING:
    from manyhands.planner.find import PlanCandidate

_GIB, _MB = 1 << 30, 1e6
_MANY_SECONDS = 100.0
_COLORS = {"n": "#4c78a8", "o": "#f58518", "i": "#e45756", "c": "#72b7b2", "h": "#54a24b", "r": "#bab0ac"}
_MORE_COLORS = ("#b279a2", "#eeca3b", "#9d755d", "#ff9da6")
_LEGEND = {"n": "samples", "o": "outputs", "i": "inputs", "c": "channels", "h": "heads", "r": "replicated"}
# Names and letters are drawn only if a reader could read them.
_MOST_NAMED_LAYERS = 200
_MOST_LETTERED_DEVICES = 16
# Pixels: height above the cells, maximum width and height of the cells, width of the legend.
_TOP, _MOST_WIDTH, _MOST_HEIGHT, _LEGEND_WIDTH = 30, 1920, 4500, 150


def candidates_table(candidates: "Sequence[PlanCandidate]", chosen: str, more: str = "") -> Table:
    """Formats plans as a table of at most 100 columns. `chosen`: name of the plan to mark. `more`: text below it."""
    caption = Text(more) if more else None
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("plan")
    table.add_column("mesh", no_wrap=True)
    for name in ("step ms", "compute", "sending", "memory GiB", "sent MB"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("measured ms", justify="right")
    for candidate in candidates:
        mark = "→ " if candidate.name == chosen else "  "
        style = "bold" if candidate.name == chosen else "" if candidate.fits and not candidate.note else "dim"
        measured, one = candidate.measured_seconds, candidate.prediction
        # Text, not a string: rich would read brackets in a plan's name as a style.
        table.add_row(
            Text(mark + candidate.name),
            Text(str(candidate.mesh)),
            _milliseconds(one.seconds),
            _milliseconds(one.compute_seconds),
            _milliseconds(one.communication_seconds + one.gradient_seconds),
            f"{one.memory_bytes / _GIB:.2f}" + ("" if candidate.fits else " too large"),
            f"{one.sent_bytes / _MB:.1f}",
            candidate.note if measured is None else _milliseconds(measured),
            style=style,
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < _MANY_SECONDS else f"{seconds * 1e3:.0f}"


def draw_plan(layers: Mapping[str, Sequence[str]], mesh: Mesh, file: Path) -> None:
    """Draws a plan as a PNG file. Rows are layers, columns devices, stripes mesh axes, and colors letters."""
    # Pillow, because importing matplotlib takes longer than the search.
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    axes = len(mesh.axes)
    letters = sorted(
        {letter for chosen in layers.values() for letter in chosen}, key=lambda letter: (letter not in _LEGEND, letter)
    )
    more = iter(_MORE_COLORS * len(letters))
    colors = {letter: ImageColor.getrgb(_COLORS.get(letter) or next(more)) for letter in letters}
    named = len(layers) <= _MOST_NAMED_LAYERS
    font, small = ImageFont.load_default(12), ImageFont.load_default(10)
    left = 12 + int(max((small.getlength(name) for name in layers), default=0)) if named else 12
    row = max(2, min(20, _MOST_HEIGHT // max(1, len(layers))))
    width, height = min(_MOST_WIDTH, max(42 * mesh.size * axes, 300)), row * len(layers)
    picture = Image.new("RGB", (left + width + _LEGEND_WIDTH, _TOP + max(height, 20 * len(letters)) + 50), "white")
    if layers:
        cells = np.array([[colors[letter] for letter in chosen] for chosen in layers.values()], np.uint8)
        stripes = np.arange(width) * mesh.size * axes // width % axes
        picture.paste(Image.fromarray(cells[:, stripes].repeat(row, axis=0)), (left, _TOP))
    draw = ImageDraw.Draw(picture)
    draw.text((left, _TOP - 8), f"mesh {mesh}", "black", font, "ls")
    for device in range(mesh.size) if mesh.size <= width // 4 else ():
        draw.line([(x := left + width * device // mesh.size, _TOP), (x, _TOP + height)], "white")
    for device in range(0, mesh.size, max(1, mesh.size // _MOST_LETTERED_DEVICES)):
        middle = left + width * (2 * device + 1) // (2 * mesh.size)
        draw.text((middle, _TOP + height + 14), str(device), "black", small, "ms")
    below = "device" if axes == 1 else f"device, with one stripe per mesh axis: {', '.join(mesh.names)}"
    draw.text((left + width // 2, _TOP + height + 34), below, "black", font, "ms")
    for number, letter in enumerate(letters):
        x, y = left + width + 16, _TOP + 20 * number
        draw.rectangle((x, y, x + 24, y + 12), colors[letter])
        draw.text((x + 32, y + 6), f"{letter}: {_LEGEND.get(letter, 'split')}", "black", font, "lm")
    for number, (name, chosen) in enumerate(layers.items() if named else ()):
        y = _TOP + row * number + row // 2
        draw.text((left - 6, y), name, "black", small, "rm")
        for device in range(mesh.size) if mesh.size <= _MOST_LETTERED_DEVICES else ():
            for stripe, (letter, place) in enumerate(zip(chosen, mesh.coordinates(device), strict=True)):
                middle = left + width * (2 * (device * axes + stripe) + 1) // (2 * mesh.size * axes)
                draw.text((middle, y), letter if letter == "r" else f"{letter}{place}", "white", small, "mm")
    with replaced_on_success(file) as part:
        picture.save(part, format="PNG")

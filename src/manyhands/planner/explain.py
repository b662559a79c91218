"""Says why a plan was chosen: a table of the candidates, and a picture of who computes what."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.core.once import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB, _MB = 1 << 30, 1e6
_MANY_SECONDS = 100.0
_COLOURS = {"n": "#4c78a8", "o": "#f58518", "i": "#e45756", "c": "#72b7b2", "h": "#54a24b", "r": "#bab0ac"}
_MORE_COLOURS = ("#b279a2", "#eeca3b", "#9d755d", "#ff9da6")
_WORDS = {
    "n": "samples",
    "o": "outputs",
    "i": "inputs",
    "c": "channels",
    "h": "heads",
    "r": "all the same",
}
# Names and letters are written where a reader could still read them.
_MOST_NAMED_LAYERS = 200
_MOST_LETTERED_DEVICES = 16
# Inches of a letter of a layer's name, and of the legend.
_NAME_IN, _LEGEND_IN = 0.055, 1.7


@dataclass(frozen=True)
class PlanCandidate:
    """One plan, as the table shows it; all of a step and of one process."""

    name: str  # such as "data parallel", "search 1", "yours"
    mesh: str  # such as dp=2,tp=2
    compute_seconds: float  # the ops' own
    communication_seconds: float  # between ops
    gradient_seconds: float  # gradients' collectives, as far as nothing hides them
    memory_bytes: float  # the most that a process holds
    sent_bytes: float  # by a process
    measured_seconds: float | None = None  # None if it wasn't timed
    fits: bool = True  # whether it keeps to the limit of memory
    note: str = ""  # why it can't be chosen, if so

    @property
    def predicted_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.gradient_seconds

    def as_plain(self) -> dict[str, Any]:
        milliseconds = {
            "step_ms": self.predicted_seconds,
            "compute_ms": self.compute_seconds,
            "between_ops_ms": self.communication_seconds,
            "gradients_ms": self.gradient_seconds,
            "measured_ms": self.measured_seconds,
        }
        return {
            "name": self.name,
            "mesh": self.mesh,
            "fits": self.fits,
            **{key: round(value * 1e3, 3) for key, value in milliseconds.items() if value is not None},
        }


@dataclass(frozen=True)
class Layer:
    """One op of the chosen plan."""

    name: str  # its path in the network
    loops: Sequence[str]  # the letter for each axis of the mesh


def candidates_table(candidates: Sequence[PlanCandidate], chosen: str, more: str = "") -> Table:
    """The candidates as a table of at most 100 columns; `more` is text below it."""
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
        measured = candidate.measured_seconds
        # Text, not a string: a plan's name may hold brackets, which rich would read as a style.
        table.add_row(
            Text(mark + candidate.name),
            Text(candidate.mesh),
            _milliseconds(candidate.predicted_seconds),
            _milliseconds(candidate.compute_seconds),
            _milliseconds(candidate.communication_seconds + candidate.gradient_seconds),
            f"{candidate.memory_bytes / _GIB:.2f}" + ("" if candidate.fits else " too large"),
            f"{candidate.sent_bytes / _MB:.1f}",
            candidate.note if measured is None else _milliseconds(measured),
            style=style,
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < _MANY_SECONDS else f"{seconds * 1e3:.0f}"


def draw_plan(layers: Sequence[Layer], mesh: Mesh, file: Path, title: str = "") -> None:
    """Draws layers × devices: a colour a letter, a stripe an axis. Raises UserError: no PNG or SVG, or odd letters."""
    ending = file.suffix.lower()
    if ending not in (".png", ".svg"):
        raise UserError(f'unknown picture format "{ending}"', str(file), ("choose plan.png or plan.svg",))
    for layer in layers:
        if len(layer.loops) != len(mesh.axes):
            raise UserError(f"{layer.name} has {len(layer.loops)} placements for the mesh {mesh}", "plan")
    figure = _figure(layers, mesh, title)
    with replacing(file) as part:
        figure.savefig(part, format=ending[1:], dpi=120)


def _figure(layers: Sequence[Layer], mesh: Mesh, title: str) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    letters = sorted(
        {letter for layer in layers for letter in layer.loops}, key=lambda letter: (letter not in _WORDS, letter)
    )
    colours = _colours(letters)
    names = max((len(layer.name) for layer in layers), default=0) * _NAME_IN if len(layers) <= _MOST_NAMED_LAYERS else 0
    left, right = names + 0.3, _LEGEND_IN
    width = left + right + min(16.0, max(0.35 * mesh.size * len(mesh.axes), 2.5))
    height = min(40.0, 1.8 + 0.17 * max(len(layers), 8))
    figure = Figure(figsize=(width, height))
    # By hand: matplotlib's own layouts draw everything several times over, which took longer than the search.
    axes = figure.add_axes((left / width, 0.7 / height, 1 - (left + right) / width, 1 - 1.1 / height))
    _cells(axes, layers, mesh, letters, list(colours.values()))
    axes.set_title(title or f"mesh {mesh}", loc="left", parse_math=False)
    axes.set_xlabel("device" if len(mesh.axes) == 1 else f"device (stripes: {', '.join(mesh.names)})")
    patches = [Patch(color=colours[letter], label=f"{letter}: {_WORDS.get(letter, 'cut')}") for letter in letters]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _colours(letters: Sequence[str]) -> dict[str, str]:
    others = [letter for letter in letters if letter not in _COLOURS]
    more = {letter: _MORE_COLOURS[place % len(_MORE_COLOURS)] for place, letter in enumerate(others)}
    return {letter: (_COLOURS | more)[letter] for letter in letters}


def _cells(axes: "Axes", layers: Sequence[Layer], mesh: Mesh, letters: list[str], colours: list[str]) -> None:
    from matplotlib.colors import ListedColormap

    stripes = len(mesh.axes)
    rows = [[letters.index(letter) for letter in layer.loops] * mesh.size for layer in layers]
    if rows:
        extent = (-0.5, mesh.size - 0.5, len(layers) - 0.5, -0.5)
        axes.imshow(
            rows,
            ListedColormap(colours),
            aspect="auto",
            vmin=0,
            vmax=len(letters),
            extent=extent,
            interpolation="nearest",
        )
    for device in range(1, mesh.size):
        axes.axvline(device - 0.5, color="white", linewidth=1.5)
    axes.set_xticks(range(0, mesh.size, max(1, mesh.size // _MOST_LETTERED_DEVICES)))
    named = len(layers) <= _MOST_NAMED_LAYERS
    axes.set_yticks(range(len(layers)) if named else [], [layer.name for layer in layers] if named else [], fontsize=6)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    if mesh.size > _MOST_LETTERED_DEVICES or not named:
        return
    for row, layer in enumerate(layers):
        for device in range(mesh.size):
            for stripe, (letter, place) in enumerate(zip(layer.loops, mesh.coordinates(device), strict=True)):
                middle = device - 0.5 + (stripe + 0.5) / stripes
                piece = letter if letter == "r" else f"{letter}{place}"
                axes.text(middle, row, piece, ha="center", va="center", fontsize=5, color="white")

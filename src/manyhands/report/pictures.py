"""The pictures of a report, and how they become SVG text and PNG files."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.report.curves import curves, learning_rate, throughput, time_stack
from manyhands.report.drawing import GREY, HAIR, INK, house_style, write_png
from manyhands.report.fonts import fonts_for
from manyhands.report.mistakes import confusion, per_class
from manyhands.report.read import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """One picture: its file name, what it is called on the page, and who draws it."""

    name: str
    title: str
    draw: Callable[[RunData], "Figure | None"]


# What follows the page's colours, light or dark.
_OF_THE_PAGE = {INK: "--ink", GREY: "--dim", HAIR: "--hair", "#ffffff": "--sheet"}

PICTURES = (
    Picture("curves", "Loss and accuracy", curves),
    Picture("learning-rate", "Learning rate", learning_rate),
    Picture("throughput", "Speed", throughput),
    Picture("time", "Where the time goes", time_stack),
    Picture("confusion", "Confusion matrix", confusion),
    Picture("classes", "Recall by class", per_class),
)


def draw_all(run: RunData, folder: Path) -> dict[str, str]:
    """Draws every picture that the run has records for; SVG text by name, ready to stand in a page.

    PNG files go into the folder; a picture of an earlier report that is no longer drawn is removed. Where no font of
    this machine has some letter of a class's name, the run's `unreadable` says which.
    """
    drawn: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for detail in (run.best, run.last) if detail for name in detail.classes]
    fonts, run.unreadable = fonts_for(names)
    with house_style(fonts):
        for picture in PICTURES:
            figure = picture.draw(run)
            file = folder / f"{picture.name}.png"
            if figure is None:
                file.unlink(missing_ok=True)
                continue
            drawn[picture.name] = svg_text(figure, picture.name)
            write_png(figure, file)
    return drawn


def svg_text(figure: "Figure", name: str) -> str:
    """A figure as an SVG element that fits its place on a page and shares no id with another."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Its one rule would hold for the whole page; the page's own style has it.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", lambda tag: _inline_tag(tag.group(), name), text)


def _inline_tag(tag: str, name: str) -> str:
    for colour, variable in _OF_THE_PAGE.items():
        if colour != "#ffffff" or not tag.startswith("<text"):  # letters on a coloured cell stay white
            tag = tag.replace(colour, f"var({variable})")
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = tag.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    if not tag.startswith("<svg"):
        return tag
    # As wide as the page allows, but never so wide that its letters outgrow the page's: 1.45 px for each point.
    width = re.search(r' width="([\d.]+)pt"', tag)
    limit = f' style="max-width:{float(width[1]) * 1.45:.0f}px"' if width else ""
    return re.sub(r' (width|height|version)="[^"]*"', "", tag).replace("<svg", f"<svg{limit}", 1)

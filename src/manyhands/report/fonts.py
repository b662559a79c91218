"""Fonts that have the letters of a run's class names, as far as this machine has such fonts."""

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_FIRST = "DejaVu Sans"
# With Chinese letters, by the names that systems give them: these look right beside the first one.
_PREFERRED = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "Noto Sans CJK JP",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei",
    "SimHei", "Droid Sans Fallback", "Arial Unicode MS",
)  # fmt: skip


def fonts_for(texts: Iterable[str]) -> tuple[list[str], str]:
    """Matplotlib's own font and those for what it lacks, by name, and the letters that no font of this machine has."""
    missing = {letter for text in texts for letter in text if letter.isprintable() and not letter.isspace()}
    chosen = [_FIRST]
    missing -= _letters(_file(_FIRST))
    if missing:
        for name, file in [*_candidates(fresh=False), *_candidates(fresh=True)]:
            found = missing & _letters(file)
            if found:
                chosen.append(name)
                missing -= found
            if not missing:
                break
    return chosen, "".join(sorted(missing))


def _candidates(*, fresh: bool) -> list[tuple[str, str]]:
    """Names and files of the installed fonts, the preferred first; with `fresh` those that came since the last look.

    Matplotlib keeps a list of them, which doesn't know of a font that was installed later.
    """
    from matplotlib import font_manager

    manager = font_manager.fontManager
    before = {entry.fname for entry in manager.ttflist}
    if fresh:
        for file in font_manager.findSystemFonts():
            if file not in before:
                _add(file)
    named: dict[str, str] = {}
    for entry in manager.ttflist:
        plain = entry.style == "normal" and str(entry.weight) in {"400", "normal", "regular"}
        if plain and (not fresh or entry.fname not in before):
            named.setdefault(entry.name, entry.fname)
    order = {name: place for place, name in enumerate(_PREFERRED)}
    return sorted(named.items(), key=lambda pair: (order.get(pair[0], math.inf), pair[0]))


def _add(file: str) -> None:
    from matplotlib import font_manager

    try:
        font_manager.fontManager.addfont(file)
    except (RuntimeError, OSError, ValueError):
        return  # a file that is no font, or one of a kind that can't be drawn with


def _file(name: str) -> str:
    from matplotlib import font_manager

    return str(font_manager.findfont(name))


@cache
def _letters(file: str) -> frozenset[str]:
    """The letters that a font file has; none where it can't be read."""
    from matplotlib import ft2font

    try:
        font: Any = ft2font.FT2Font(str(Path(file)))
    except (RuntimeError, OSError, ValueError):
        return frozenset()
    return frozenset(map(chr, font.get_charmap()))

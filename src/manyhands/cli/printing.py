"""Prints and formats answers, tables, sizes and the options of a job."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from manyhands.core.terminal import as_json, show, show_json

if TYPE_CHECKING:
    from manyhands.config.load import LoadedJob


def print_answer(content: Any, lines: Iterable[str], *, json: bool) -> None:
    if json:
        show_json(content)
    else:
        show(lines)


def align(rows: Sequence[Sequence[str]], *, left: int | None = None) -> list[str]:
    """Formats rows as lines of columns: the first `left` columns (None: all) are left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if left is None or place < left else ">" for place in range(len(widths))]
    styles = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, styles)).rstrip() for row in rows]


def size_text(size_bytes: float) -> str:
    """Formats a size on disk: 512 B, 1.5 kB, 11.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def print_config(loaded: "LoadedJob") -> int:
    """Prints every option of the job with the origin of its value, as TOML with comments (`--show-config`)."""
    from manyhands.config.load import flatten

    section = ""
    for key, value in flatten(loaded.job.model_dump(mode="json")).items():
        name, _, option = key.partition(".")
        if name != section:
            show(f"{'' if not section else chr(10)}[{name}]")
            section = name
        show(f"{f'{option} = {as_json(value)}':<40} # {loaded.origins.get(key, 'default')}")
    return 0

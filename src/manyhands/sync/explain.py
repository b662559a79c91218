"""Says what sync methods cost: as a table for the terminal, and as plain data for plan.json."""

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from manyhands.sync.choose import LOCAL, Choice, days_of
from manyhands.sync.costs import Case

_MB, _MBIT = 1e6, 8e-6
# Wide enough for the sentence below the table.
_WIDTH = 100


def as_plain(choice: Choice, case: Case, asked: str) -> dict[str, Any]:
    """A choice and all that it was made from, as JSON data; `asked` is the method that the job names."""
    return {
        "asked": asked,
        "machines": case.machines,
        "link_mbit_per_s": round(case.link.bytes_per_s * _MBIT, 3),
        "latency_ms": round(case.link.latency_s * 1e3, 3),
        "compute_s": case.step_s,
        "steps": case.steps,
        "reason": choice.reason,
        "methods": [
            {
                "method": cost.method,
                "codec": cost.codec if cost.method == LOCAL else None,
                "every": cost.every,
                "delay": cost.delay,
                "step_s": cost.step_s,
                "sent_mb": cost.sent_bytes / _MB,
                "exchange_s": cost.exchange_s,
                "efficiency": case.step_s / cost.step_s,
                "days": days_of(cost, case),
                "chosen": cost == choice.chosen,
                "refused": cost.refused,
            }
            for cost in choice.costs
        ],
    }


def methods_table(agreed: dict[str, Any]) -> Table:
    """What `as_plain` gave, as a table with the reason below it, and what the job asked for where it is another."""
    chosen = next(row["method"] for row in agreed["methods"] if row["chosen"])
    other = agreed["asked"] not in {"auto", chosen}
    caption = Text(agreed["reason"] + (f"\n→ is auto; the job says sync.method = {agreed['asked']}" if other else ""))
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False, min_width=_WIDTH)
    table.add_column("sync", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    for name in ("every", "s/step", "MB/step", "efficiency", "days", ""):
        table.add_column(name, justify="right")
    for row in agreed["methods"]:
        mark = "→ " if row["chosen"] else "  "
        style = "bold" if row["chosen"] else "dim" if row["refused"] else ""
        table.add_row(mark + row["method"], row["codec"] or "", *_numbers(row), row["refused"], style=style)
    return table


def _numbers(row: dict[str, Any]) -> list[str]:
    return [
        str(row["every"]),
        f"{row['step_s']:.3g}",
        f"{row['sent_mb']:.3g}",
        f"{row['efficiency']:.1%}",
        f"{row['days']:.3g}",
    ]

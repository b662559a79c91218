"""Says what sync methods cost, as plain data for plan.json and its table."""

from typing import Any

from manyhands.sync.choose import SyncChoice, days_of
from manyhands.sync.costs import LinkCase
from manyhands.sync.method import agrees_in_every_update

_MB, _MBIT = 1e6, 8e-6


def as_plain(choice: SyncChoice, case: LinkCase, asked: str) -> dict[str, Any]:
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
                "codec": None if agrees_in_every_update(cost.method) else cost.codec,
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

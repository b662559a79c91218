"""The step records of a run of any length in memory of a known size: neighbours become one, all alike."""

import itertools
import math
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from manyhands.core.records import EvaluationMetrics, StepMetrics

Measured = TypeVar("Measured", StepMetrics, EvaluationMetrics)

# Many more than a page shows; a list of so many is halved.
MOST_RECORDS = 1 << 14


class Thinned(Generic[Measured]):
    """Records in the order that they came; each stands for as many of them, the newest maybe for fewer."""

    def __init__(self, most: int) -> None:
        """`most` is even; only step records may be more."""
        self._most, self._each = most, 1
        self._kept: list[Measured] = []
        self._open: list[Measured] = []

    def add(self, record: Measured) -> None:
        self._open.append(record)
        if len(self._open) == self._each:
            self._kept.append(_joined(self._open))
            self._open.clear()
        if len(self._kept) == self._most:
            self._kept = [_joined(self._kept[at : at + 2]) for at in range(0, self._most, 2)]
            self._each *= 2

    def forget(self, from_step: int) -> None:
        """Leaves out what was made from this step on."""
        for records in (self._open, self._kept):
            while records and records[-1].step >= from_step:
                records.pop()

    def taken(self) -> list[Measured]:
        return [*self._kept, *([_joined(self._open)] if self._open else [])]


def _joined(records: Sequence[Measured]) -> Measured:
    """One record over all their samples, at the place of the last."""
    if len(records) == 1:
        return records[0]
    return cast(Measured, _joined_steps(cast(Sequence[StepMetrics], records)))


def _joined_steps(records: Sequence[StepMetrics]) -> StepMetrics:
    samples = [record.samples for record in records]
    seconds = [record.samples / record.images_per_s if record.images_per_s > 0 else 0.0 for record in records]
    timed = sum(itertools.compress(samples, seconds))
    return records[-1].model_copy(
        update={
            "samples": sum(samples),
            "loss": _mean([record.loss for record in records], samples),
            "top1": _mean([record.top1 for record in records], samples),
            "images_per_s": timed / sum(seconds) if timed else records[-1].images_per_s,
            "data_share": _mean([record.data_share for record in records], seconds),
        }
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Over the values that are numbers."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if math.isfinite(value)]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else values[-1]

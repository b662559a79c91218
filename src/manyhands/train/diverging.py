"""Notices a training loss that grows instead of falling, which no error tells of before it is not a number."""

import math
from dataclasses import dataclass

# So many times what the loss began at, so many records in a row: a high rate's first steps may throw it up for once.
TIMES, RECORDS = 3.0, 3
ADVICE = "reduce train.lr, set train.warmup_epochs = 1, or set train.clip = 1.0"


@dataclass
class Divergence:
    """Compares the loss of each record with what it began at, or with what guessing costs, if that is more."""

    classes: int  # that are told apart
    _began: float = math.nan
    _high: int = 0
    _reported: bool = False

    def observe(self, loss: float) -> str:
        """A sentence, once, when the loss stays far above what it began at; else empty."""
        if math.isnan(self._began):
            self._began = loss
        # A run that goes on begins low, and a small loss may well grow threefold.
        limit = TIMES * max(self._began, math.log(max(2, self.classes)))
        self._high = self._high + 1 if loss > limit else 0
        if self._high < RECORDS or self._reported:
            return ""
        self._reported = True
        return f"training diverges: the loss rose from {self._began:.4g} to {loss:.4g} (do: {ADVICE})"

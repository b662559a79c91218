"""Figures of an evaluation that the user names: functions of outputs and labels, added up over samples.

A figure is exact at any number of processes since it is made of sums over samples: of one value for each of them, or of
whatever sums an object says, of which it computes the figure at the end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.config.job import OBJECT
from manyhands.core.blame import users_line
from manyhands.core.errors import UserError
from manyhands.core.plugins import load_object

_WHERE = "train.metrics"
# Samples of made-up outputs that a metric is tried on.
_TRIED = 8


@dataclass(frozen=True)
class OwnMetric:
    """A figure of the user's own; `own` is their function, or their object with `update` and `compute`."""

    name: str
    own: Any

    @property
    def _adds_up(self) -> bool:
        return hasattr(self.own, "update") and hasattr(self.own, "compute")

    def sums(self, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added up [k] of logits [n, C] and labels int64 [n].

        Raises:
            UserError: the user's function gives something else.
        """
        value: Any = (self.own.update if self._adds_up else self.own)(logits, labels)
        given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        if self._adds_up:
            if not isinstance(value, Tensor):
                mend = (
                    "update(outputs, labels) returns sums over these samples, compute(sums) makes the figure of them",
                    "what keeps its state to itself can't be added up over processes",
                )
                raise UserError(f"the update of the metric {self.name} gives {given}, not a tensor", _WHERE, mend)
            return value.to(dtype).flatten()
        if not isinstance(value, Tensor) or value.shape != labels.shape:
            mend = ("give one value per sample, [n]; their mean is the figure",)
            raise UserError(f"the metric {self.name} gives {given} for {len(labels)} samples", _WHERE, mend)
        return value.to(dtype).sum()[None]

    def number(self, sums: Tensor, count: int) -> float:
        """What it makes of sums [k] over so many samples. Raises UserError: no number."""
        value: Any = self.own.compute(sums) if self._adds_up else sums[0] / count
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            what = f"the metric {self.name} gives a {type(value).__name__}, not a number"
            raise UserError(what, _WHERE, ("compute(sums) returns one number",)) from error

    def figure(self, sums: Tensor, count: int) -> float:
        """The figure of sums [k] over so many samples.

        Raises:
            UserError: it isn't a finite number.
        """
        figure = self.number(sums, count)
        if not math.isfinite(figure):
            mend = ("such as 0 where there is nothing to divide by: torch.nan_to_num", "or leave it out")
            raise UserError(f"the metric {self.name} is {figure}", _WHERE, mend)
        return figure


class FigureSums:
    """What all metrics of an evaluation add up, side by side; each is tried on made-up outputs first.

    Args:
        metrics: of the user's own.
        outputs: of the network, at least.
        classes: labels are below.
        device: where evaluations are computed.
        dtype: of sums.

    Raises:
        UserError: a metric fails, or gives what isn't one value per sample or sums.
    """

    def __init__(self, metrics: Sequence[OwnMetric], outputs: int, device: str, dtype: torch.dtype) -> None:
        self._metrics, self._dtype = metrics, dtype
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(_TRIED, outputs, generator=generator).to(device)
        labels = (torch.arange(_TRIED) % outputs).to(device)
        with torch.inference_mode():
            self._widths = [len(_tried(metric, logits, labels, dtype)) for metric in metrics]

    @property
    def width(self) -> int:
        """How many sums there are."""
        return sum(self._widths)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """All sums [width] of logits [n, C] and labels int64 [n]."""
        # Of their own, for what one writes into them isn't for the next.
        found = [metric.sums(logits.clone(), labels.clone(), self._dtype) for metric in self._metrics]
        for metric, sums, width in zip(self._metrics, found, self._widths, strict=True):
            if len(sums) != width:
                mend = ("give as many sums of any samples",)
                what = f"the update of the metric {metric.name} gives {len(sums)} sums, and gave {width} before"
                raise UserError(what, _WHERE, mend)
        return torch.cat(found)

    def figures(self, sums: Tensor, count: int) -> dict[str, float]:
        """Each metric's figure, of all sums [width] over all samples."""
        parts = zip(self._metrics, sums.split(self._widths), strict=True)
        return {metric.name: metric.figure(part, count) for metric, part in parts}


def _tried(metric: OwnMetric, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        sums = metric.sums(logits, labels, dtype)
        # Of samples that are made up there may be nothing to divide by.
        with suppress(ArithmeticError):
            metric.number(sums.cpu().clone(), len(labels))
        return sums
    except UserError:
        raise
    except Exception as error:
        shapes = f"{list(logits.shape)} and labels {list(labels.shape)}"
        what = f"the metric {metric.name} fails on outputs {shapes}: {type(error).__name__}: {error}"
        raise UserError(what, users_line(error) or _WHERE, ("it takes a batch of outputs and its labels",)) from error


def make_metrics(
    words: Iterable[str], given: Mapping[str, Any] | None, *, live_only: bool = False
) -> tuple[OwnMetric, ...]:
    """The user's metrics, from Python or from their files.

    Args:
        words: of the job: file.py:name, or object:name for what was an object in Python.
        given: those objects, by name.
        live_only: pass over objects of a program that has ended.

    Raises:
        UserError: a file has no such function, or an object isn't here.
    """
    found: list[OwnMetric] = []
    for word in words:
        kind, _, name = word.rpartition(":")
        if kind != OBJECT:
            own = load_object(word, _WHERE)
        elif name in (given or {}):
            own = (given or {})[name]
        elif live_only:
            continue
        else:
            mend = (
                f'go on in Python: fit(…, metrics={{"{name}": …}})',
                f"or name it: --set 'train.metrics=[\"file.py:{name}\"]'",
                "or go without: --set 'train.metrics=[]'",
            )
            raise UserError(f"this run's metric {name} was an object in Python, which isn't here", _WHERE, mend)
        if not callable(own) and not hasattr(own, "update"):
            mend = ("name a function of outputs and labels that gives one value per sample",)
            raise UserError(f"the metric {name} is a {type(own).__name__}, not a function", _WHERE, mend)
        if isinstance(own, type):
            raise UserError(f"the metric {name} is a class", _WHERE, (f"make one of it: {own.__name__}()",))
        found.append(OwnMetric(name, own))
    return tuple(found)

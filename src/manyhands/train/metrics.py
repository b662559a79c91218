"""Custom metrics of an evaluation: functions of outputs and labels, summed over samples.

A metric is exact on any number of processes, because it is computed from sums over samples: of one value per sample, or
of the sums that an object returns and from which it computes the metric at the end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.config.job import OBJECT
from manyhands.core.errors import UserError
from manyhands.core.user_code import load_object, users_line

_WHERE = "train.metrics"
# Samples of made-up outputs that a metric is tried on.
_TRIED = 8


@dataclass(frozen=True)
class CustomMetric:
    """A custom metric; `own` is a function, or an object with `update` and `compute`."""

    name: str
    own: Any

    @property
    def _adds_up(self) -> bool:
        return hasattr(self.own, "update") and hasattr(self.own, "compute")

    def sums(self, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the sums [k] of logits [n, C] and labels int64 [n].

        Raises:
            UserError: the custom function returns something else.
        """
        value: Any = (self.own.update if self._adds_up else self.own)(logits, labels)
        if self._adds_up:
            if isinstance(value, Tensor):
                return value.to(dtype).flatten()
            hints = (
                "return sums over the samples from update(outputs, labels), and the metric from compute(sums)",
                "don't keep state in the object, because manyhands adds sums over processes",
            )
            what = f"update of the metric {self.name} returned a {type(value).__name__}, not a tensor"
            raise UserError(what, _WHERE, hints)
        if not isinstance(value, Tensor) or value.shape != labels.shape:
            given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            hints = ("return one value per sample, [n]; the metric is their mean",)
            raise UserError(f"the metric {self.name} returned {given} for {len(labels)} samples", _WHERE, hints)
        return value.to(dtype).sum()[None]

    def number(self, sums: Tensor, count: int) -> float:
        """Computes the metric from sums [k] over `count` samples. Raises UserError: it is not a number."""
        value: Any = self.own.compute(sums) if self._adds_up else sums[0] / count
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            what = f"compute of the metric {self.name} returned a {type(value).__name__}, not a number"
            raise UserError(what, _WHERE, ("return one number from compute(sums)",)) from error

    def figure(self, sums: Tensor, count: int) -> float:
        """Returns the metric from sums [k] over `count` samples. Raises UserError: it is not a finite number."""
        figure = self.number(sums, count)
        if not math.isfinite(figure):
            hints = ("return a finite number, such as 0 for a division by 0: torch.nan_to_num", "or remove this metric")
            raise UserError(f"the metric {self.name} is {figure}", _WHERE, hints)
        return figure


class FigureSums:
    """The `width` sums of all metrics of an evaluation; each metric is first tested on random outputs.

    Args:
        metrics: the custom metrics.
        outputs: the minimum number of outputs of the network.
        device: the device of evaluations.
        dtype: the dtype of sums.

    Raises:
        UserError: a metric fails, or returns neither one value per sample nor sums.
    """

    def __init__(self, metrics: Sequence[CustomMetric], outputs: int, device: str, dtype: torch.dtype) -> None:
        self._metrics, self._dtype = metrics, dtype
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(_TRIED, outputs, generator=generator).to(device)
        labels = (torch.arange(_TRIED) % outputs).to(device)
        with torch.inference_mode():
            self._widths = [len(_tried(metric, logits, labels, dtype)) for metric in metrics]
        self.width = sum(self._widths)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns all sums [width] of logits [n, C] and labels int64 [n]."""
        # Of their own, for what one writes into them isn't for the next.
        found = [metric.sums(logits.clone(), labels.clone(), self._dtype) for metric in self._metrics]
        for metric, sums, width in zip(self._metrics, found, self._widths, strict=True):
            if len(sums) != width:
                hints = ("return the same number of sums for any samples",)
                what = f"update of the metric {metric.name} returned {len(sums)} sums, but {width} in an earlier call"
                raise UserError(what, _WHERE, hints)
        return torch.cat(found)

    def figures(self, sums: Tensor, count: int) -> dict[str, float]:
        """Returns each metric, by name, from the sums [width] over all samples."""
        parts = zip(self._metrics, sums.split(self._widths), strict=True)
        return {metric.name: metric.figure(part, count) for metric, part in parts}


def _tried(metric: CustomMetric, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
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
        what = f"the metric {metric.name} failed on outputs {shapes}: {type(error).__name__}: {error}"
        raise UserError(what, users_line(error) or _WHERE, ("accept a batch of outputs and its labels",)) from error


def make_metrics(
    words: Iterable[str], given: Mapping[str, Any] | None, *, live_only: bool = False
) -> tuple[CustomMetric, ...]:
    """Creates the custom metrics, from Python or from files.

    Args:
        words: the values of the job: file.py:name, or object:name for a Python object.
        given: the Python objects, by name.
        live_only: skip Python objects that are not available.

    Raises:
        UserError: a file has no such function, or a Python object is not available.
    """
    found: list[CustomMetric] = []
    for word in words:
        kind, _, name = word.rpartition(":")
        if kind != OBJECT:
            own = load_object(word, _WHERE)
        elif given and name in given:
            own = given[name]
        elif live_only:
            continue
        else:
            hints = (
                f'resume in Python: fit(…, metrics={{"{name}": …}})',
                f"or name the code: --set 'train.metrics=[\"file.py:{name}\"]'",
                "or resume without metrics: --set 'train.metrics=[]'",
            )
            raise UserError(f"this run's metric {name} was a Python object, which is not available here", _WHERE, hints)
        if not callable(own) and not hasattr(own, "update"):
            hints = ("name a function of outputs and labels that returns one value per sample",)
            raise UserError(f"the metric {name} is a {type(own).__name__}, not a function", _WHERE, hints)
        if isinstance(own, type):
            raise UserError(f"the metric {name} is a class", _WHERE, (f"pass an instance: {own.__name__}()",))
        found.append(CustomMetric(name, own))
    return tuple(found)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        count: the number of samples.
        loss: the mean cross-entropy, or the mean negative log-likelihood.
        top1: top-1 accuracy, 0 to 1.
        top5: top-5 accuracy, 0 to 1.
        cells: int64 [cells, 3], the nonzero cells of the confusion matrix: true class, predicted class, count.
        classes: the size of the confusion matrix: the number of classes, or more if outputs beyond them were predicted.
        seconds: the duration of the evaluation.
        metrics: the user's metrics, by name.
    """

    count: int
    loss: float
    top1: float
    top5: float
    cells: Tensor
    classes: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def figure(self, name: str) -> float:
        """Returns the value called `name`: top1, top5, loss or one of the user's metrics."""
        return self.metrics[name] if name in self.metrics else getattr(self, name)

    @property
    def confusion(self) -> Tensor:
        """The confusion matrix, int64 [classes, classes]. Rows are true classes, columns predicted ones."""
        matrix = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        matrix[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return matrix

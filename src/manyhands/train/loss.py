"""Loss and metrics of a job as sums over samples, which any number of processes can add up.

With class weights or an ignored class, torch divides the sum of losses by the sum of the labels' weights. Therefore, a
loss has a sum and a divisor. A custom metric is a mean of one value per sample, or an object that computes from sums.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.config.job import OBJECT, TrainOptions
from manyhands.core.choices import unknown_choice_error
from manyhands.core.errors import UserError
from manyhands.core.seeds import derive_seed
from manyhands.core.user_code import load_object, user_line
from manyhands.core.world import World
from manyhands.models.interface import main_and_auxiliary
from manyhands.parallel.gradients import sum_over_samples
from manyhands.parallel.group.plain import broadcast_plain
from manyhands.parallel.replicas.norm_pass import precise_dtype
from manyhands.train.feed import seeded_generators
from manyhands.train.objects import load_user_object

Function = Callable[[Tensor, Tensor], Tensor]
_METRICS = "train.metrics"
_TRIED = 8  # random outputs that a metric is tested on


@dataclass(frozen=True)
class LossFn:
    """Computes the sum [] of losses and the logits [n, C] from a network's output and labels int64 [n]."""

    summed: Function  # returns the sum [] of losses of outputs [n, C] and labels [n]
    sum_weights: Callable[[Tensor], Tensor] | None = None  # sum [] of the weights of labels [n]; None: all 1
    is_sum: bool = False  # the loss of a batch is the sum itself, without a divisor
    custom: Function | None = None  # the user's function if it is unknown how it adds up; see `verify_loss`
    dependence_reason: str = ""  # why the loss depends on the division of a batch; empty: it doesn't, or wasn't tested

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum [] of losses, including those of auxiliary heads, and the logits [n, C]."""
        logits, auxiliary = main_and_auxiliary(output)
        loss = self.summed(logits, labels)
        for other, weight in auxiliary:
            loss = loss + weight * self.summed(other, labels)
        return loss, logits


def as_divisor(weights: Tensor) -> Tensor:
    """Returns a sum [] of weights as a divisor, which is 1 if the sum is 0."""
    return torch.where(weights == 0, torch.ones_like(weights), weights)


def make_loss_fn(options: TrainOptions, custom: Function | None = None) -> LossFn:
    """Creates the job's loss or wraps `custom`, which returns one loss for each sample [n] or the mean loss []."""
    smoothing = options.label_smoothing
    if custom is None and options.loss == "cross-entropy":
        return _split_loss(F.cross_entropy, {"label_smoothing": smoothing})
    if custom is None and options.loss != OBJECT and smoothing:
        raise UserError("label smoothing needs cross-entropy", "train.label_smoothing", ("set label_smoothing to 0",))
    if custom is None and options.loss == "nll":
        return _split_loss(F.nll_loss, {})
    function = load_user_object("train.loss", options.loss, custom)
    if function is None:
        raise unknown_choice_error("loss", options.loss, ["cross-entropy", "nll", "file.py:function"], "train.loss")
    if isinstance(function, type) and issubclass(function, nn.Module):
        name = function.__name__
        raise UserError(f"the loss {name} is a class, not an instance", "train.loss", (f"pass {name}()",))
    known = _torch_settings(function)
    return _split_loss(*known) if known else LossFn(functools.partial(_sum_custom_loss, function), custom=function)


def _torch_settings(function: Any) -> tuple[Callable[..., Tensor], dict[str, Any]] | None:
    """Returns the torch function and keyword arguments of a cross-entropy or NLL loss, or None for another loss."""
    names, settings = ("weight", "ignore_index", "reduction"), dict[str, Any]()
    if type(function) is nn.CrossEntropyLoss:
        return F.cross_entropy, {name: getattr(function, name) for name in (*names, "label_smoothing")}
    if type(function) is nn.NLLLoss:
        return F.nll_loss, {name: getattr(function, name) for name in names}
    if isinstance(function, functools.partial) and not function.args:
        function, settings = function.func, dict(function.keywords)
    # By identity, because a custom callable may have no hash.
    known = function is F.cross_entropy or function is F.nll_loss
    return (function, settings) if known and not settings.keys() & {"size_average", "reduce"} else None


def _split_loss(function: Callable[..., Tensor], settings: dict[str, Any]) -> LossFn:
    """Splits a torch loss into two functions, which return the sum of losses and the sum of the labels' weights."""
    weight: Tensor | None = settings.get("weight")
    ignored: int = settings.get("ignore_index", -100)
    reduction: str = settings.get("reduction", "mean")
    others = {name: value for name, value in settings.items() if name not in {"weight", "reduction"}}

    def summed(output: Tensor, labels: Tensor) -> Tensor:
        # torch accepts weights of double precision only with such outputs.
        kind = torch.float64 if output.dtype == torch.float64 else torch.float32
        beside = None if weight is None else weight.to(output.device, kind)
        return function(output, labels, weight=beside, reduction="sum", **others)

    def weigh(labels: Tensor) -> Tensor:
        # Precise, so that the sum does not depend on the division of a batch.
        counted, kind = labels != ignored, precise_dtype(labels.device)
        if weight is None:
            return counted.sum().to(kind)
        return (weight.to(labels.device, kind)[labels.where(counted, 0)] * counted).sum()

    mean = reduction == "mean" and (weight is not None or ignored >= 0)
    return LossFn(summed, weigh if mean else None, is_sum=reduction == "sum")


def _sum_custom_loss(function: Function, output: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum [] of losses of a custom loss function, which returns one loss per sample or their mean."""
    loss: Any = function(output, labels)
    if isinstance(loss, Tensor) and (loss.ndim == 0 or len(loss) == len(labels)):
        return sum_over_samples(loss, len(labels))
    given = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    hints = ("return one value per sample, or the mean over the samples",)
    raise UserError(f"the loss function returned {given} for {len(labels)} samples", "train.loss", hints)


MOST_VALUES, ROUNDING = 1 << 22, 1e-4  # values of random outputs; rounding error, in fractions of the largest gradient
PARTS = (0.15, 0.6)  # where a test batch is divided: unevenly, and no single samples, which some losses refuse
MEAN, SUM, NEITHER = "mean", "sum", "neither"
BETTER_LOSS = 'pass torch.nn.CrossEntropyLoss(weight=…) itself, or return one value per sample (reduction="none")'


def verify_loss(loss_fn: LossFn, outputs: int, classes: int, world: World, dtype: torch.dtype) -> LossFn:
    """Tests if a custom loss is a mean or a sum over samples. If not, sets `dependence_reason`. A collective."""
    if loss_fn.custom is None:
        return loss_fn
    kind, dependent = broadcast_plain(list(_test_loss(loss_fn.custom, outputs, classes, world.device, dtype)), world)
    if kind == SUM:
        own = loss_fn.custom  # `_sum_custom_loss` multiplies by n, as for a mean
        return replace(loss_fn, summed=lambda output, labels: own(output, labels).sum(), is_sum=True)
    return replace(loss_fn, dependence_reason=dependent)


def _test_loss(custom: Function, outputs: int, classes: int, device: str, dtype: torch.dtype) -> tuple[str, str]:
    """Returns MEAN, SUM or NEITHER and, for NEITHER, a sentence on the consequence or on the failed test."""
    rows = max(8, min(2 * classes + 5, MOST_VALUES // outputs))
    failed = ""
    with seeded_generators(derive_seed(0, "loss"), device):
        generator = torch.Generator().manual_seed(derive_seed(0, "made-up"))
        for make in (Tensor.log_softmax, Tensor.softmax):
            found: set[str] = set()
            try:
                function = copy.deepcopy(custom) if isinstance(custom, nn.Module) else custom  # the test changes it
                for labels in _test_labels(classes, rows, generator):
                    values = make(torch.randn(len(labels), outputs, generator=generator), 1)
                    found |= _classify_reduction(function, values.to(device, dtype), labels.to(device))
            except Exception as error:  # noqa: BLE001 - the user's own code, of values that it may not be made for
                failed = failed or f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if found in ({MEAN}, {SUM}):
                return found.pop(), ""
            effect = "training depends on the number of processes and on train.micro_batch"
            return NEITHER, f"The loss of a batch is not the mean of its samples' losses, so {effect}."
    return NEITHER, f"Can't check that the loss is a mean over samples ({failed})."


def _test_labels(classes: int, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields tensors of test labels, int64 [up to `rows`], sorted or shuffled. Together they have all classes."""
    for some in torch.randperm(classes, generator=generator).split(max(2, rows // 2)):
        count = max(8, 2 * len(some))
        twice = some.repeat(-(-count // len(some)))[:count]
        yield twice.sort().values
        yield twice[torch.randperm(len(twice), generator=generator)]


def _classify_reduction(function: Function, values: Tensor, labels: Tensor) -> set[str]:
    """Compares a batch's gradient with those of its parts. Returns {MEAN}, {SUM} or {NEITHER}. May raise ValueError."""
    whole = _mean_loss_gradient(function, values, labels)
    if not bool(torch.isfinite(whole).all()):
        raise ValueError("the gradient for test outputs is not finite")
    if not torch.equal(whole, _mean_loss_gradient(function, values, labels)):
        raise ValueError("the loss function returns different values for the same outputs")
    count = len(labels)
    first, second = (round(part * count) for part in PARTS)
    parts = itertools.starmap(slice, itertools.pairwise([0, max(2, first), max(4, second), count]))
    gradients = [_mean_loss_gradient(function, values[part], labels[part]) for part in parts]
    limit = ROUNDING * float(whole.abs().max())
    ways = {MEAN: [each * (len(each) / count) for each in gradients], SUM: gradients}
    near = (way for way, parts in ways.items() if bool(((torch.cat(parts) - whole).abs() <= limit).all()))
    return {next(near, NEITHER)}


def _mean_loss_gradient(function: Function, values: Tensor, labels: Tensor) -> Tensor:
    """Returns the gradient [n, C] of the mean loss with respect to the outputs `values` (zeros if it has none)."""
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        loss = function(values, labels)
        loss = loss if loss.ndim == 0 else loss.reshape(len(labels), -1).mean(1).mean()
        (gradient,) = torch.autograd.grad(loss, values, allow_unused=True)
    return torch.zeros_like(values) if gradient is None else gradient


@dataclass(frozen=True)
class CustomMetric:
    """A custom metric: a function of outputs and labels, or an object with the methods `update` and `compute`."""

    name: str
    metric: Any

    @property
    def _has_update_and_compute(self) -> bool:
        return hasattr(self.metric, "update") and hasattr(self.metric, "compute")

    def sums(self, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the metric's sums [k] for logits [n, C] and labels int64 [n]. Raises UserError for wrong results."""
        value: Any = (self.metric.update if self._has_update_and_compute else self.metric)(logits, labels)
        if self._has_update_and_compute:
            if isinstance(value, Tensor):
                return value.to(dtype).flatten()
            hints = (
                "return sums over the samples from update(outputs, labels), and the metric from compute(sums)",
                "don't keep state in the object, because manyhands adds sums over processes",
            )
            what = f"update of the metric {self.name} returned a {type(value).__name__}, not a tensor"
            raise UserError(what, _METRICS, hints)
        if not isinstance(value, Tensor) or value.shape != labels.shape:
            given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            hints = ("return one value per sample, [n]; the metric is their mean",)
            raise UserError(f"the metric {self.name} returned {given} for {len(labels)} samples", _METRICS, hints)
        return value.to(dtype).sum()[None]

    def compute_value(self, sums: Tensor, count: int) -> float:
        """Computes the metric from its sums [k] over `count` samples. Raises UserError unless it is a number."""
        value: Any = self.metric.compute(sums) if self._has_update_and_compute else sums[0] / count
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            what = f"compute of the metric {self.name} returned a {type(value).__name__}, not a number"
            raise UserError(what, _METRICS, ("return one number from compute(sums)",)) from error


class MetricSums:
    """Computes all custom metrics of an evaluation. The constructor tests each metric on random outputs."""

    def __init__(self, metrics: Sequence[CustomMetric], outputs: int, device: str, dtype: torch.dtype) -> None:
        self._metrics, self._dtype = metrics, dtype
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(_TRIED, outputs, generator=generator).to(device)
        labels = (torch.arange(_TRIED) % outputs).to(device)
        with torch.inference_mode():
            self._widths = [len(_test_metric(metric, logits, labels, dtype)) for metric in metrics]
        self.width = sum(self._widths)

    def batch_sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the sums of all metrics, joined into one tensor [width], for logits [n, C] and labels int64 [n]."""
        # Each metric gets copies, because it may change them.
        found = [metric.sums(logits.clone(), labels.clone(), self._dtype) for metric in self._metrics]
        for metric, sums, width in zip(self._metrics, found, self._widths, strict=True):
            if len(sums) != width:
                hints = ("return the same number of sums for any samples",)
                what = f"update of the metric {metric.name} returned {len(sums)} sums, but {width} in an earlier call"
                raise UserError(what, _METRICS, hints)
        return torch.cat(found)

    def compute_values(self, sums: Tensor, count: int) -> dict[str, float]:
        """Returns each metric's value, by name, from the sums [width]. Raises UserError if one isn't finite."""
        parts = zip(self._metrics, sums.split(self._widths), strict=True)
        found = {metric.name: metric.compute_value(part, count) for metric, part in parts}
        for name, figure in found.items():
            if not math.isfinite(figure):
                hint = "return a finite number, such as 0 for a division by 0: torch.nan_to_num"
                raise UserError(f"the metric {name} is {figure}", _METRICS, (hint, "or remove this metric"))
        return found


def _test_metric(metric: CustomMetric, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        sums = metric.sums(logits, labels, dtype)
        with suppress(ArithmeticError):  # random samples may give a division by 0
            metric.compute_value(sums.cpu().clone(), len(labels))
        return sums
    except UserError:
        raise
    except Exception as error:
        shapes = f"{list(logits.shape)} and labels {list(labels.shape)}"
        what = f"the metric {metric.name} failed on outputs {shapes}: {type(error).__name__}: {error}"
        raise UserError(what, user_line(error) or _METRICS, ("accept a batch of outputs and its labels",)) from error


def make_metrics(
    names: Iterable[str], objects: Mapping[str, Any] | None, *, skip_missing: bool = False
) -> tuple[CustomMetric, ...]:
    """Creates the metrics `names` from `objects` and code files. With `skip_missing`, skips those without an object."""
    found: list[CustomMetric] = []
    for word in names:
        kind, _, name = word.rpartition(":")
        if kind != OBJECT:
            own = load_object(word, _METRICS)
        elif objects and name in objects:
            own = objects[name]
        elif skip_missing:
            continue
        else:
            hints = (
                f'resume in Python: fit(…, metrics={{"{name}": …}})',
                f"or name the code: --set 'train.metrics=[\"file.py:{name}\"]'",
                "or resume without metrics: --set 'train.metrics=[]'",
            )
            what = f"this run's metric {name} was a Python object, which is not available here"
            raise UserError(what, _METRICS, hints)
        if not callable(own) and not hasattr(own, "update"):
            hints = ("name a function of outputs and labels that returns one value per sample",)
            raise UserError(f"the metric {name} is a {type(own).__name__}, not a function", _METRICS, hints)
        if isinstance(own, type):
            raise UserError(f"the metric {name} is a class, not an instance", _METRICS, (f"pass {own.__name__}()",))
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

"""BatchNorm over groups of a fixed number of samples of the global batch, whichever process computes them.

torch's BatchNorm takes its statistics over the samples of one process, so a network trains differently on 2 processes
than on 1. Here the groups of the global batch (data/order.py) don't depend on the number of processes. A group that one
process holds goes through torch's own kernel, or on an accelerator together with its neighbours through one pass; the
parts of a group that several processes hold are synchronized. Running statistics move once per update, by the mean over
the groups.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from manyhands.core.devices import is_tested
from manyhands.core.errors import UserError
from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.core.world import Span
from manyhands.parallel.replicas.norm_pass import (
    Held,
    NormPass,
    accumulator_dtype,
    computed_dtype,
    moments_of,
    statistics_of,
)

# A pass over several groups starts some thirty kernels, forward and backward, and a group alone a dozen.
_MIN_IN_ONE_PASS = 3
# In larger groups one pass costs more: it moves 52 bytes a value, torch's own 32 (calculated for an H100's memory).
_MOST_VALUES = 1 << 22


Run = tuple[Span, ...]  # groups of one size that this process holds whole; or a single one, or a part of one


@dataclass
class NormGroups:
    """The BatchNorm groups of the current pass of one network."""

    spans: Sequence[Span] = ()  # of groups that this process holds parts of; empty: its pass is one group
    shared_sizes: Sequence[int] = ()  # samples in each group that several processes hold
    weight: float = 1.0  # of this pass's statistics where spans is empty (the process's part of the global batch)
    batch: int = 0  # samples in the global batch
    processes: Any = None  # the process group that shares the samples; None: all processes
    through_memory: Callable[[Tensor], None] | None = None  # adds flat values [n] up over them, where memory is shared
    apart: bool = False  # each process normalises its own samples and keeps its own statistics
    layers: list["GroupedNorm"] = field(default_factory=list)
    runs: "tuple[Run, ...]" = ()  # `spans`, with those together that go through one pass where one is worth it
    ordered: bool = True  # the runs are in the spans' order

    def begin_micro_batch(self, spans: Sequence[Span], shared_sizes: Sequence[int], count: int, batch: int) -> None:
        """Describes the next pass: `count` samples here, `batch` in the whole update."""
        self.spans, self.shared_sizes = ((), ()) if self.apart else (spans, shared_sizes)
        self.runs, self.ordered = _runs(tuple(self.spans))
        self.batch, self.weight = batch, count / batch

    def add_up(self, values: Tensor) -> None:
        """Replaces values by their sum over the processes; a collective."""
        before = CLOCK.to(COMMUNICATION)
        if self.through_memory:
            self.through_memory(values.view(-1))
        else:
            dist.all_reduce(values, group=self.processes)
        CLOCK.to(before)

    def finish_update(self, size: int) -> None:
        """Moves the running statistics once, by what the `size` processes saw; one collective for all layers."""
        layers = [layer for layer in self.layers if layer.running_mean is not None]
        if not layers:
            return
        # Every process takes part, also one that held no group's beginning: its statistics have weight zero.
        flat = torch.cat([layer.take_seen() for layer in layers])
        if size > 1 and not self.apart:
            self.add_up(flat)
        lengths = [2 * layer.num_features + 1 for layer in layers]
        for layer, total in zip(layers, flat.split(lengths), strict=True):
            layer.move_running_statistics(total)


class GroupedNorm(_BatchNorm):
    """The training pass of a BatchNorm layer over its groups; evaluation is torch's own."""

    groups: NormGroups
    # over an update's passes, the weighted means [C] and unbiased variances [C], and the sum of the weights: [2 C + 1]
    seen: Tensor | None
    # rows of the input for each sample, such as flattened tokens; 0 if a row's sample is unknown: local statistics
    rows_per_sample: int

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"BatchNorm expects at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return super().forward(input)
        if _is_torchs_own(type(self).__mro__):
            return self.normalise(input)
        # A class of somebody's own does more than normalise, such as an activation (timm's BatchNormAct2d).
        tracks, self.track_running_stats = self.track_running_stats, False
        try:
            with _InGroups(self) as ours:
                output = super().forward(input)
        finally:
            self.track_running_stats = tracks
        if not ours.called:
            what = f"{type(self).__mro__[2].__name__} is a subclass of BatchNorm, but never calls torch's batch_norm"
            hints = ("call super().forward or torch's batch_norm", "or derive the class from nn.Module")
            raise UserError(what, f"the network: BatchNorm of {self.num_features} channels", hints)
        return output

    def normalise(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalises [N, C, ...] with the statistics of each sample's group, and does nothing else."""
        self._check_input_dim(input)
        if not self.rows_per_sample:
            return self._alone(input, self.groups.weight)
        self._check_rows(input)
        runs = self._runs(input)
        ordered = runs is not self.groups.runs or self.groups.ordered
        rows = None if ordered else _rows(self.groups.runs, self.rows_per_sample, input.device)
        output = self._of_runs(input if rows is None else _reordered(input, rows[0]), runs)
        return output if rows is None else _reordered(output, rows[1])

    def _runs(self, input: Tensor) -> Sequence[Run]:  # noqa: A002
        """The runs of spans, in the order in which they are normalised."""
        spans = self.groups.spans
        # On a processor a kernel for each group is quicker: it starts in no time, and reads what caches hold.
        if not is_tested(input.device):
            return [(span,) for span in spans]
        values = self.rows_per_sample * _values_per_row(input)
        small = max((span.size for span in spans), default=0) * values * self.num_features <= _MOST_VALUES
        single = any(span.size * values < 2 for span in spans)  # the way of these needs no statistics
        # The compiler doesn't follow what is kept, such as another order of rows.
        followed = self.groups.ordered or not torch.compiler.is_compiling()
        if single or not small or not followed:
            return [(span,) for span in spans]
        return self.groups.runs

    def _of_runs(self, input: Tensor, runs: Sequence[Run]) -> Tensor:  # noqa: A002
        lengths = [sum(span.stop - span.start for span in run) * self.rows_per_sample for run in runs]
        pairs = list(zip(input.split(lengths) if len(runs) > 1 else [input] * len(runs), runs, strict=True))
        outputs = [self._held_whole(part, run) for part, run in pairs if run[0].shared < 0]
        if not runs:
            outputs = [self._alone(input, self.groups.weight)]
        if self.groups.shared_sizes:
            shared = [(part, run[0]) for part, run in pairs if run[0].shared >= 0]
            together, own = iter(self._together(shared, input)), iter(outputs)
            in_order = [next(own if run[0].shared < 0 else together) for run in runs]
            # A process without a part still joins the backward pass's collective, by way of an empty tensor.
            outputs = [*in_order, *own, *together]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _check_rows(self, input: Tensor) -> None:  # noqa: A002
        groups = self.groups
        rows = groups.spans[-1].stop * self.rows_per_sample if groups.spans else input.shape[0]
        if (len(groups.spans) > 1 or groups.shared_sizes) and rows != input.shape[0]:
            what = f"the input of BatchNorm has {input.shape[0]} rows, but this micro-batch should have {rows}"
            hints = ("compute statistics on each rank separately: --set train.norm_group=local",)
            raise UserError(what, f"the network: BatchNorm of {self.num_features} channels", hints)

    def _held_whole(self, part: Tensor, run: Run) -> Tensor:
        """Normalises groups of equal size that this process holds: [groups n, C, ...]."""
        weight = run[0].size / self.groups.batch
        if len(run) == 1:
            return self._alone(part, weight)
        mean, variance = statistics_of(part, len(run))
        count = part.shape[0] // len(run) * _values_per_row(part)
        self._add(torch.stack([mean, variance * (count / (count - 1))], 1), weight)
        held = Held(((0, len(run)),), eps=self.eps)
        inverse = torch.rsqrt(variance + self.eps)
        return NormPass.apply(mean, inverse, count, held, self.weight, self.bias, part)[0]

    def _alone(self, part: Tensor, weight: float) -> Tensor:
        """Normalises a group that this process holds, [n, C, ...], by torch's kernel."""
        if part.shape[0] * _values_per_row(part) < 2 or weight == 0:
            # A variance needs two values, so the last sample of an odd batch uses what is known so far.
            return F.batch_norm(part, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        statistics = torch.zeros(2, self.num_features, dtype=computed_dtype(part), device=part.device)
        output = F.batch_norm(part, statistics[0], statistics[1], self.weight, self.bias, True, 1.0, self.eps)
        self._add(statistics[None], weight)
        return output

    def _together(self, parts: list[tuple[Tensor, Span]], like: Tensor) -> list[Tensor]:
        """Normalises groups that several processes hold; every process of the pass calls this, also with no part."""
        sizes = self.groups.shared_sizes
        moments = moments_of([(part, span.shared) for part, span in parts], len(sizes), self.num_features, like)
        self.groups.add_up(moments)
        per_sample = _values_per_row(like) * self.rows_per_sample
        counts = _kept(tuple(sizes), moments.dtype, moments.device)[:, None] * per_sample
        mean = moments[:, 0] / counts
        variance = (moments[:, 1] / counts - mean * mean).clamp_min(0)
        for _, span in parts:
            if span.first:
                unbiased = variance[span.shared] * (counts[span.shared] / (counts[span.shared] - 1).clamp_min(1))
                self._add(torch.stack([mean[span.shared], unbiased])[None], span.size / self.groups.batch)
        inverse = torch.rsqrt(variance + self.eps)
        held = Held(tuple((span.shared, 1) for _, span in parts) or ((0, 1),), self.groups.add_up)
        inputs = [part for part, _ in parts] or [like[:0]]
        return list(NormPass.apply(mean, inverse, counts[:, None], held, self.weight, self.bias, *inputs))

    def _add(self, statistics: Tensor, weight: float) -> None:
        """Adds means and unbiased variances of groups, [groups, 2, C], each with this weight, to `seen`."""
        flat = statistics.detach().to(accumulator_dtype(statistics)).flatten(1)
        flat = flat[0] if len(flat) == 1 else flat.sum(0)
        weighted = torch.cat([flat, flat.new_full((1,), len(statistics))]) * weight
        self.seen = weighted if self.seen is None else self.seen + weighted

    def take_seen(self) -> Tensor:
        """What this process saw since the last update, [2 C + 1]; zeros for nothing."""
        seen, self.seen = self.seen, None
        if seen is not None:
            return seen
        mean = cast(Tensor, self.running_mean)
        return torch.zeros(2 * self.num_features + 1, dtype=accumulator_dtype(mean), device=mean.device)

    def move_running_statistics(self, total: Tensor) -> None:
        """Moves running mean and variance towards the mean over all groups; total is [2 C + 1]."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        on_cpu = total.device.type == "cpu"
        if on_cpu and total[-1] == 0:
            return
        # A card isn't asked whether there was anything: it would have to finish first all that it was given.
        any_seen = total[-1] != 0
        mean, variance = (total[:-1] / total[-1]).view(2, -1)
        self.num_batches_tracked.add_(any_seen)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            # A count is too large for what half precision holds.
            factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(value.dtype)
            moved = running.to(value.dtype).lerp(value, factor)
            running.copy_(moved if on_cpu else torch.where(any_seen, moved, running))


@functools.lru_cache(maxsize=256)
def _runs(spans: tuple[Span, ...]) -> tuple[tuple[Run, ...], bool]:
    """Groups spans of one size that a process holds whole, if they are enough for one pass; True if in order.

    Sizes that differ by one take turns, so spans are sorted by size where that is worth the copies.
    """

    def alike(span: Span) -> tuple[int, int]:
        return span.size, span.shared

    def together(ordered: Sequence[Span]) -> tuple[Run, ...]:
        runs = [tuple(run) for _, run in itertools.groupby(ordered, alike)]
        short = [[(span,) for span in run] if len(run) < _MIN_IN_ONE_PASS else [run] for run in runs]
        return tuple(itertools.chain.from_iterable(short))

    neighbours, by_size = together(spans), together(sorted(spans, key=alike))
    # Copies forth and back, forward and backward, cost about what one group alone does.
    runs = by_size if len(by_size) + 1 < len(neighbours) else neighbours
    flat = itertools.chain.from_iterable(runs)
    return runs, all(one.stop == other.start for one, other in itertools.pairwise(flat))


def _reordered(values: Tensor, rows: Tensor) -> Tensor:
    """Reorders the rows of [rows, C, ...] and keeps the memory format, which index_select alone loses."""
    if values.is_contiguous():
        return values.index_select(0, rows)
    return values.movedim(1, -1).index_select(0, rows).movedim(-1, 1)


# What follows is made once and kept for good: a card waits at each copy that isn't pinned.
@functools.cache
def _rows(runs: tuple[Run, ...], rows_per_sample: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The order in which rows go through the runs, and its inverse: int64 [rows] each."""
    samples = torch.cat([torch.arange(span.start, span.stop) for run in runs for span in run])
    rows = (samples[:, None] * rows_per_sample + torch.arange(rows_per_sample)).flatten()
    return rows.to(device), rows.argsort().to(device)


@functools.cache
def _kept(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def forget_seen(model: nn.Module) -> None:
    """Drops the statistics of an update that isn't made."""
    for layer in model.modules():
        if isinstance(layer, GroupedNorm):
            layer.seen = None


class _InGroups(TorchFunctionMode):
    """Has a layer's own forward normalise over groups where it calls torch's batch_norm."""

    def __init__(self, layer: GroupedNorm) -> None:
        super().__init__()
        self._layer, self.called = layer, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            self.called = True
            return self._layer.normalise(args[0] if args else kwargs["input"])
        return func(*args, **(kwargs or {}))


_TORCHS_OWN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm, GroupedNorm}


def _is_torchs_own(kinds: Sequence[type]) -> bool:
    """True if the first class of the MRO with a forward of its own, except ours, is torch's."""
    return next(kind for kind in kinds if "forward" in vars(kind) and kind is not GroupedNorm) in _TORCHS_OWN


def _values_per_row(like: Tensor) -> int:
    count = 1
    for length in like.shape[2:]:
        count *= length
    return count


def _grouped_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a BatchNorm class with our training pass, so that isinstance and state_dict stay as they were."""
    if issubclass(kind, nn.SyncBatchNorm) and not _is_torchs_own(kind.__mro__):
        what = f"{kind.__name__} is a custom SyncBatchNorm, which can't be replaced"
        hints = ("use plain BatchNorm: statistics already cover groups of the global batch",)
        raise UserError(what, "the network", hints)
    base = nn.BatchNorm2d if issubclass(kind, nn.SyncBatchNorm) else kind
    return type(f"Grouped{base.__name__}", (GroupedNorm, base), {"__module__": __name__})


def group_batch_norms(model: nn.Module) -> tuple[NormGroups, Callable[[], None]]:
    """Replaces the classes of BatchNorm layers by grouped ones; returns their groups and what restores them."""
    groups = NormGroups()
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, GroupedNorm):
            kind = type(module)
            changed.append((module, kind))
            module.__class__ = cast(Any, classes.setdefault(kind, _grouped_class(kind)))
            layer = cast(GroupedNorm, module)
            layer.groups, layer.seen, layer.rows_per_sample = groups, None, 1
            groups.layers.append(layer)

    def restore() -> None:
        for module, kind in changed:
            module.__class__ = kind
            del module.groups, module.seen, module.rows_per_sample

    return groups, restore


def leave_batch_norms() -> tuple[NormGroups, Callable[[], None]]:
    """Leaves BatchNorm layers to torch, for modes whose copies of them could not return their statistics."""
    return NormGroups(), lambda: None


def norms_of(model: nn.Module) -> NormGroups:
    """The groups of a network's layers; a split network has several, so only the layers."""
    layers = [module for module in model.modules() if isinstance(module, GroupedNorm)]
    alike = bool(layers) and all(layer.groups is layers[0].groups for layer in layers)
    return layers[0].groups if alike else NormGroups(layers=layers)


# Usually a row of a layer's input is a sample. Some networks flatten tokens into the first dimension (timm's LeViT).
Inputs = dict[GroupedNorm, list[Tensor]]


@contextmanager
def watching(layers: Sequence[GroupedNorm]) -> Iterator[Inputs]:
    """Collects the inputs of layers in this context."""
    seen: Inputs = {}

    def look(layer: nn.Module, inputs: Any) -> None:
        if isinstance(layer, GroupedNorm):
            seen.setdefault(layer, []).append(inputs[0].detach())

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def find_rows(model: nn.Module, layers: Sequence[GroupedNorm], images: Tensor) -> None:
    """Sets `rows_per_sample` of the layers by a trial on two samples or more; leaves the network in training."""
    if layers:
        model.eval()
        with torch.no_grad(), watching(layers) as seen:
            model(images)
        set_rows_per_sample(model.train(), seen, images)


def set_rows_per_sample(model: nn.Module, seen: Inputs, images: Tensor) -> None:
    """Sets `rows_per_sample` of the layers that got another number of rows than there were samples.

    `seen` are their inputs when the network, in training, ran on the images [n, ...]. For such layers it runs twice in
    evaluation; it is left in training.
    """
    count = len(images)
    odd = [layer for layer, inputs in seen.items() if any(one.shape[0] != count for one in inputs)]
    if not odd:
        return
    other = images.clone()
    other[-1] = torch.rand_like(other[-1])
    model.eval()
    try:
        with torch.no_grad():
            with watching(odd) as before:
                model(images)
            with watching(odd) as after:
                model(other)
    finally:
        model.train()
    for layer in odd:
        found = {
            _rows_of_each(one, two, count) for one, two in zip(before.get(layer, []), after.get(layer, []), strict=True)
        } or {0}
        layer.rows_per_sample = found.pop() if len(found) == 1 else 0


def _rows_of_each(one: Tensor, two: Tensor, count: int) -> int:
    """Rows of each sample, from a layer's inputs [n, ...] before and after the last sample changed; 0: unknown."""
    if count < 2 or one.shape != two.shape or one.shape[0] % count:
        return 0
    each = one.shape[0] // count
    changed = (one != two).flatten(1).any(1)
    return each if changed[-each:].all() and not changed[:-each].any() else 0

"""BatchNorm over groups of a fixed number of samples of the global batch, on any number of processes.

torch's BatchNorm computes statistics over one process's samples, so training depends on the number of processes. Here,
statistics cover fixed groups of samples of the global batch (data/order.py). A group on one process is normalized by
torch's kernel or, on an accelerator, together with neighboring groups. The statistics of a group on several processes
are synchronized. Running statistics are updated once per optimizer update, with the mean over the groups.
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

from manyhands.core import phases
from manyhands.core.devices import is_tested_accelerator
from manyhands.core.errors import UserError
from manyhands.core.world import Span
from manyhands.parallel.replicas import norm_pass

# One pass over several groups launches about 40 kernels in forward and backward, a single group about 12.
_MIN_IN_ONE_PASS = 3
# For larger groups one pass is slower: it moves 52 bytes per value, torch's kernel 32 (calculated for an H100).
_MOST_VALUES = 1 << 22

Run = tuple[Span, ...]  # neighboring unshared groups of equal size, normalized by one pass; or a single group


@dataclass
class NormGroups:
    """The groups of samples in the current forward pass. BatchNorm layers normalize each group separately."""

    spans: Sequence[Span] = ()  # of the groups with samples on this process; empty: the pass is one group
    shared_sizes: Sequence[int] = ()  # the number of samples of each group that several processes hold
    weight: float = 1.0  # factor of the pass's statistics if `spans` is empty: this process's share of the global batch
    batch: int = 0  # samples in the global batch
    processes: Any = None  # the process group that shares the samples; None: all processes
    shared_memory_sum: Callable[[Tensor], None] | None = None  # sums flat values [n] over them; None: all-reduce
    local_only: bool = False  # each process normalizes its own samples and keeps its own statistics
    layers: list["GroupedNorm"] = field(default_factory=list)
    runs: "tuple[Run, ...]" = ()  # `spans`, grouped by the passes that normalize them

    def begin_micro_batch(self, spans: Sequence[Span], shared_sizes: Sequence[int], count: int, batch: int) -> None:
        """Sets the groups of the next pass. `count`: samples on this process. `batch`: samples of the entire update."""
        self.spans, self.shared_sizes = ((), ()) if self.local_only else (spans, shared_sizes)
        self.runs = _group_spans(tuple(self.spans))
        self.batch, self.weight = batch, count / batch

    def all_reduce(self, values: Tensor) -> None:
        """Replaces `values` by their sum over the processes that share the samples. A collective."""
        before = phases.CLOCK.start_phase(phases.COMMUNICATION)
        if self.shared_memory_sum:
            self.shared_memory_sum(values.view(-1))
        else:
            dist.all_reduce(values, group=self.processes)
        phases.CLOCK.start_phase(before)

    def finish_update(self, size: int) -> None:
        """Updates the running statistics of all layers from the groups on all `size` processes, by one collective."""
        layers = [layer for layer in self.layers if layer.running_mean is not None]
        if not layers:
            return
        # A process that holds no group's first sample takes part with zeros.
        seen = [layer.pop_accumulated() for layer in layers]
        flat = torch.cat([*(one[:-1] for one in seen), *(one[-1:] for one in seen)])
        if size > 1 and not self.local_only:
            self.all_reduce(flat)
        _move_running_statistics(layers, *flat.split([len(flat) - len(layers), len(layers)]))


class GroupedNorm(_BatchNorm):
    """A BatchNorm layer that normalizes groups of samples separately in training. Evaluation is torch's."""

    groups: NormGroups
    # over an update's passes, the sums [2 C + 1] of factor * mean [C], factor * unbiased variance [C], and factor
    accumulated: Tensor | None
    rows_per_sample: int  # input rows per sample, such as flattened tokens; 0: unknown, so that statistics are local

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"BatchNorm expects at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return super().forward(input)
        if _is_torchs_own(type(self).__mro__):
            return self.normalize(input)
        # A subclass may do more than normalize, such as apply an activation (timm's BatchNormAct2d).
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

    def normalize(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalizes `input` [N, C, ...], each group by its own statistics. A collective if processes share groups."""
        self._check_input_dim(input)
        if not self.rows_per_sample:
            return self._normalize_local_group(input, self.groups.weight)
        self._check_rows(input)
        return self._normalize_runs(input, self._select_runs(input))

    def _select_runs(self, input: Tensor) -> Sequence[Run]:  # noqa: A002
        """Returns the runs to normalize: `groups.runs`, or runs of one group each if that is faster or necessary."""
        spans = self.groups.spans
        # On a CPU a kernel for each group is faster: launches cost nothing, and data stays in the cache.
        if not is_tested_accelerator(input.device):
            return [(span,) for span in spans]
        values = self.rows_per_sample * _values_per_row(input)
        small = max((span.size for span in spans), default=0) * values * self.num_features <= _MOST_VALUES
        single = any(span.size * values < 2 for span in spans)  # `_normalize_local_group` needs no statistics for these
        return self.groups.runs if small and not single else [(span,) for span in spans]

    def _normalize_runs(self, input: Tensor, runs: Sequence[Run]) -> Tensor:  # noqa: A002
        lengths = [sum(span.stop - span.start for span in run) * self.rows_per_sample for run in runs]
        pairs = list(zip(input.split(lengths) if len(runs) > 1 else [input] * len(runs), runs, strict=True))
        outputs = [self._normalize_local_run(part, run) for part, run in pairs if run[0].shared < 0]
        if not runs:
            outputs = [self._normalize_local_group(input, self.groups.weight)]
        if self.groups.shared_sizes:
            shared = [(part, run[0]) for part, run in pairs if run[0].shared >= 0]
            together, own = iter(self._normalize_shared(shared, input)), iter(outputs)
            in_order = [next(own if run[0].shared < 0 else together) for run in runs]
            # A process without samples of these groups joins backward's collective through an empty tensor.
            outputs = [*in_order, *own, *together]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _check_rows(self, input: Tensor) -> None:  # noqa: A002
        groups = self.groups
        rows = groups.spans[-1].stop * self.rows_per_sample if groups.spans else input.shape[0]
        if (len(groups.spans) > 1 or groups.shared_sizes) and rows != input.shape[0]:
            what = f"the input of BatchNorm has {input.shape[0]} rows, but this micro-batch should have {rows}"
            hints = ("compute statistics on each rank separately: --set train.norm_group=local",)
            raise UserError(what, f"the network: BatchNorm of {self.num_features} channels", hints)

    def _normalize_local_run(self, part: Tensor, run: Run) -> Tensor:
        """Normalizes a run of equal groups that only this process holds. `part`: their rows [groups * n, C, ...]."""
        weight = run[0].size / self.groups.batch
        if len(run) == 1:
            return self._normalize_local_group(part, weight)
        mean, variance = norm_pass.batch_norm_statistics(part, len(run))
        count = part.shape[0] // len(run) * _values_per_row(part)
        self._accumulate(torch.cat([mean, variance * (count / (count - 1)), mean.new_ones(len(run), 1)], 1), weight)
        held = norm_pass.PassGroups(((0, len(run)),), eps=self.eps)
        inverse = torch.rsqrt(variance + self.eps)
        return norm_pass.NormPass.apply(mean, inverse, count, held, self.weight, self.bias, part)[0]

    def _normalize_local_group(self, part: Tensor, weight: float) -> Tensor:
        """Normalizes one group [n, C, ...] that only this process holds, by torch's kernel."""
        if part.shape[0] * _values_per_row(part) < 2 or weight == 0:
            # A variance needs two values, so the last sample of an odd batch uses the running statistics.
            return F.batch_norm(part, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        statistics = torch.ones(2 * self.num_features + 1, dtype=norm_pass.computed_dtype(part), device=part.device)
        mean, variance = statistics[:-1].chunk(2)
        output = F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self._accumulate(statistics[None], weight)
        return output

    def _normalize_shared(self, parts: list[tuple[Tensor, Span]], like: Tensor) -> list[Tensor]:
        """Normalizes groups that processes share. A collective, also on a process without samples of these groups."""
        sizes = self.groups.shared_sizes
        shared = [(part, span.shared) for part, span in parts]
        moments = norm_pass.sum_moments(shared, len(sizes), self.num_features, like)
        self.groups.all_reduce(moments)
        per_sample = _values_per_row(like) * self.rows_per_sample
        counts = _cached_tensor(tuple(sizes), moments.dtype, moments.device)[:, None] * per_sample
        mean = moments[:, 0] / counts
        variance = (moments[:, 1] / counts - mean * mean).clamp_min(0)
        for _, span in parts:
            if span.first:
                unbiased = variance[span.shared] * (counts[span.shared] / (counts[span.shared] - 1).clamp_min(1))
                seen = torch.cat([mean[span.shared], unbiased, unbiased.new_ones(1)])
                self._accumulate(seen[None], span.size / self.groups.batch)
        inverse = torch.rsqrt(variance + self.eps)
        held = norm_pass.PassGroups(tuple((span.shared, 1) for _, span in parts) or ((0, 1),), self.groups.all_reduce)
        inputs = [part for part, _ in parts] or [like[:0]]
        return list(norm_pass.NormPass.apply(mean, inverse, counts[:, None], held, self.weight, self.bias, *inputs))

    def _accumulate(self, statistics: Tensor, weight: float) -> None:
        """Adds `weight` times the groups' statistics [groups, 2 C + 1], which end with a 1, to `accumulated`."""
        total = statistics.detach().sum(0, dtype=norm_pass.precise_dtype(statistics.device))
        self.accumulated = total * weight if self.accumulated is None else self.accumulated.add(total, alpha=weight)

    def pop_accumulated(self) -> Tensor:
        """Returns `accumulated` [2 C + 1], with zeros in place of None, and resets the attribute to None."""
        seen, self.accumulated = self.accumulated, None
        if seen is not None:
            return seen
        mean = cast(Tensor, self.running_mean)
        return torch.zeros(2 * self.num_features + 1, dtype=norm_pass.precise_dtype(mean.device), device=mean.device)


def _move_running_statistics(layers: Sequence["GroupedNorm"], sums: Tensor, weights: Tensor) -> None:
    """Updates running mean and variance of all layers, in a few kernels and without synchronizing with the device.

    `sums`: the layers' means and variances, each times its weight, [2 C of all layers]. `weights`: of each layer; 0 if
    none of its groups was seen, which leaves the layer as it is.
    """
    tracked: Any = layers  # torch declares the buffers as optional
    seen, batches = weights != 0, [layer.num_batches_tracked for layer in tracked]
    torch._foreach_add_(batches, [*seen.to(torch.int64).unbind()])
    like = {"dtype": weights.dtype, "device": weights.device}
    rates = _cached_tensor(tuple(layer.momentum or 0.0 for layer in layers), **like)
    if any(layer.momentum is None for layer in layers):  # the mean over all batches
        averaged = _cached_tensor(tuple(layer.momentum is None for layer in layers), torch.bool, weights.device)
        rates = torch.where(averaged, 1.0 / torch.stack(batches).to(**like).clamp_min(1), rates)
    lengths = _cached_tensor(tuple(2 * layer.num_features for layer in layers), torch.int64, weights.device)
    shares = torch.stack([weights.where(seen, 1.0), rates * seen])
    divisor, rate = shares.repeat_interleave(lengths, dim=1, output_size=len(sums))
    buffers = [buffer for layer in tracked for buffer in (layer.running_mean, layer.running_var)]
    moved = torch.cat(buffers).to(sums.dtype).lerp_(sums / divisor, rate)
    torch._foreach_copy_(buffers, [*moved.split([len(buffer) for buffer in buffers])])


@functools.lru_cache(maxsize=256)
def _group_spans(spans: tuple[Span, ...]) -> tuple[Run, ...]:
    """Combines neighboring groups of equal size that no other process shares into runs, each for one pass."""
    runs = [tuple(run) for _, run in itertools.groupby(spans, lambda span: (span.size, span.shared))]
    short = [[(span,) for span in run] if len(run) < _MIN_IN_ONE_PASS else [run] for run in runs]
    return tuple(itertools.chain.from_iterable(short))


@functools.cache
def _cached_tensor(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def discard_accumulated(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, GroupedNorm):
            layer.accumulated = None


class _InGroups(TorchFunctionMode):
    """Context in which calls of torch's batch_norm run `GroupedNorm.normalize` of a layer instead."""

    def __init__(self, layer: GroupedNorm) -> None:
        super().__init__()
        self._layer, self.called = layer, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            self.called = True
            return self._layer.normalize(args[0] if args else kwargs["input"])
        return func(*args, **(kwargs or {}))


_TORCHS_OWN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm, GroupedNorm}


def _is_torchs_own(kinds: Sequence[type]) -> bool:
    """Returns True if a layer inherits forward from torch, not from a user's class. `kinds`: the MRO of its class."""
    return next(kind for kind in kinds if "forward" in vars(kind) and kind is not GroupedNorm) in _TORCHS_OWN


def _values_per_row(like: Tensor) -> int:
    count = 1
    for length in like.shape[2:]:
        count *= length
    return count


def _grouped_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Creates a subclass of GroupedNorm and of the class `kind`. isinstance and state_dict work as before."""
    if issubclass(kind, nn.SyncBatchNorm) and not _is_torchs_own(kind.__mro__):
        what = f"{kind.__name__} is a custom SyncBatchNorm, which can't be replaced"
        hints = ("use plain BatchNorm: statistics already cover groups of the global batch",)
        raise UserError(what, "the network", hints)
    base = nn.BatchNorm2d if issubclass(kind, nn.SyncBatchNorm) else kind
    return type(f"Grouped{base.__name__}", (GroupedNorm, base), {"__module__": __name__})


def group_batch_norms(model: nn.Module) -> tuple[NormGroups, Callable[[], None]]:
    """Makes each BatchNorm layer a GroupedNorm. Returns (their shared groups, a function that undoes the change)."""
    groups = NormGroups()
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, GroupedNorm):
            kind = type(module)
            changed.append((module, kind))
            module.__class__ = cast(Any, classes.setdefault(kind, _grouped_class(kind)))
            layer = cast(GroupedNorm, module)
            layer.groups, layer.accumulated, layer.rows_per_sample = groups, None, 1
            groups.layers.append(layer)

    def restore() -> None:
        for module, kind in changed:
            module.__class__ = kind
            del module.groups, module.accumulated, module.rows_per_sample

    return groups, restore


def find_norm_groups(model: nn.Module) -> NormGroups:
    """Returns the NormGroups that all layers of a network share. Without such, creates one with all layers."""
    layers = [module for module in model.modules() if isinstance(module, GroupedNorm)]
    alike = bool(layers) and all(layer.groups is layers[0].groups for layer in layers)
    return layers[0].groups if alike else NormGroups(layers=layers)


# Usually an input row is a sample, but some networks flatten tokens into dimension 0 (timm's LeViT).
Inputs = dict[GroupedNorm, list[Tensor]]


@contextmanager
def record_inputs(layers: Sequence[GroupedNorm]) -> Iterator[Inputs]:
    """Context that records the inputs of the given layers. Yields a dict {layer: inputs}, which forward fills."""
    seen: Inputs = {}

    def collect(layer: nn.Module, inputs: Any) -> None:
        if isinstance(layer, GroupedNorm):
            seen.setdefault(layer, []).append(inputs[0].detach())

    hooks = [layer.register_forward_pre_hook(collect) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def measure_rows(model: nn.Module, layers: Sequence[GroupedNorm], images: Tensor) -> None:
    """Sets `rows_per_sample` of the layers by runs on `images` (two or more). Leaves the model in training mode."""
    if layers:
        model.eval()
        with torch.no_grad(), record_inputs(layers) as seen:
            model(images)
        set_rows_per_sample(model.train(), seen, images)


def set_rows_per_sample(model: nn.Module, seen: Inputs, images: Tensor) -> None:
    """Sets `rows_per_sample` of layers whose inputs don't have one row per sample.

    `seen` has the inputs of all layers in a pass over `images` [n, ...]. If some don't have n rows, runs the network
    twice in evaluation mode, and leaves it in training mode.
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
            with record_inputs(odd) as before:
                model(images)
            with record_inputs(odd) as after:
                model(other)
    finally:
        model.train()
    for layer in odd:
        found = {
            _rows_of_each(one, two, count) for one, two in zip(before.get(layer, []), after.get(layer, []), strict=True)
        } or {0}
        layer.rows_per_sample = found.pop() if len(found) == 1 else 0


def _rows_of_each(one: Tensor, two: Tensor, count: int) -> int:
    """Returns the rows per sample, or 0 if unknown. `one`, `two`: inputs that differ in the last of `count` samples."""
    if count < 2 or one.shape != two.shape or one.shape[0] % count:
        return 0
    each = one.shape[0] // count
    changed = (one != two).flatten(1).any(1)
    return each if changed[-each:].all() and not changed[:-each].any() else 0

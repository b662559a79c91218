"""Verifies a network that shards itself: compares its gradients with those computed on one process."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from manyhands.core.errors import RunError, UserError
from manyhands.core.mesh import Mesh, shard_boundaries
from manyhands.core.world import Span, World
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.mesh.grid import Axis, Grid
from manyhands.parallel.modes.hybrid import HybridNetwork, hybrid_network
from manyhands.parallel.replicas.batch_norm import GroupedNorm, NormGroups, group_batch_norms

Make = Callable[[Grid], nn.Module]
Loss = Callable[..., Tensor]
Cause = Literal["missing", "doubled", "replicas", "cut", "mark", "wrong"]
OUTPUT = "output"
_NEGLIGIBLE = 1e-6  # smaller gradients are rounding errors, such as of a bias before BatchNorm
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Finding:
    """An error that `verify_gradients` has found in a network that shards itself.

    Attributes:
        name: the parameter, or "output".
        cause: "missing": an all-reduce is missing; "doubled": there is one all-reduce too many; "replicas": replicas
            differ; "cut": the output has a wrong shape; "mark": a shard is not a manyhands.Parameter; "wrong": other.
        axes: the names of the mesh axes over which the error occurs.
        what: the observation, with the rank that has the largest error.
        hints: the likely correction.
    """

    name: str
    cause: Cause
    axes: tuple[str, ...]
    what: str
    hints: str


@dataclass(frozen=True)
class GradientCheck:
    """The result of `verify_gradients`, the same on every process.

    Attributes:
        findings: the errors of the output, then those of gradients.
        worst: the largest deviation of a gradient, relative to the largest value of that gradient.
        compared: the number of parameters compared.
    """

    findings: tuple[Finding, ...]
    worst: float
    compared: int

    @property
    def ok(self) -> bool:
        return not self.findings

    def require(self) -> None:
        """Raises RunError with the findings, if there are any."""
        if self.findings:
            first = self.findings[0]
            raise RunError(first.what, first.name, tuple(str(self).splitlines()[1:]))

    def __str__(self) -> str:
        if self.ok:
            return f"{self.compared} gradients equal those of one process (largest relative error {self.worst:.1e})"
        lines = [f"findings: {len(self.findings)}; gradients compared: {self.compared}"]
        for finding in self.findings[:_MOST_SHOWN]:
            lines += [f"{finding.name}: {finding.what}", f"  do: {finding.hints}"]
        if len(self.findings) > _MOST_SHOWN:
            lines.append(f"… and {len(self.findings) - _MOST_SHOWN} more")
        return "\n".join(lines)


def verify_gradients(  # noqa: PLR0913 - few are ever given
    net: nn.Module | Make,
    sample: Tensor,
    labels: Tensor | None = None,
    *,
    mesh: Grid | None = None,
    loss: Loss | None = None,
    samples: tuple[str, ...] | None = None,
    tolerance: float = 1e-6,
    check: bool = False,
) -> GradientCheck:
    """Compares the gradients of a network that shards itself with the gradients computed on one process.

    All processes must call it with the same arguments. Copies of the network run in double precision, in training mode
    without dropout; BatchNorm treats the samples of each process as one group. The network itself is not changed.

    Args:
        net: the network, or a function of a mesh that returns it (such as the class of the network). A copy also runs
            on a mesh of one process, so `forward` must read the axis sizes at each call, not store them.
        sample: a batch [n, …]. The batch of rank 0 is used, truncated so that processes get equal shares.
        labels: the labels of the samples, passed to `loss`, or to cross-entropy if `loss` is None.
        mesh: the mesh; required if `net` is a function, or a network that holds no Axis.
        loss: a function of (output, labels) that returns the mean loss or one loss per sample. Without labels
            and loss, a fixed weighted sum of all outputs is used, whose gradient does not depend on their values.
        samples: names of the axes that shard the batch; None: all axes that shard no parameter.
        tolerance: the largest error allowed, relative to the largest value of the compared tensor.
        check: raise an error if there are findings.

    Raises:
        UserError: there is no mesh, there are too few samples, or a copy of the network can't run on one process.
        RunError: there are findings, and `check` is set.
    """
    grid = mesh or _find_mesh(net)
    if loss is None and labels is not None:
        loss = functools.partial(F.cross_entropy, reduction="none")
    with torch.random.fork_rng():
        live, alone = _copy_networks(net, grid)
        network = hybrid_network(live, grid, samples)
        try:
            findings, worst = _Check(network, alone, (sample, labels), loss, tolerance).run()
        finally:
            network.reducer.release()
    result = GradientCheck(tuple(findings), worst, sum(parameter.requires_grad for parameter in live.parameters()))
    if check:
        result.require()
    return result


def _find_mesh(net: Any) -> Grid:
    for module in net.modules() if isinstance(net, nn.Module) else []:
        for value in vars(module).values():
            if isinstance(value, Axis | Grid):
                return value.mesh if isinstance(value, Axis) else value
    hints = ("give the network's mesh: mesh=manyhands.open_mesh(...)",)
    raise UserError("no module of the network stores a mesh axis", "verify_gradients", hints)


def _copy_networks(net: nn.Module | Make, grid: Grid) -> tuple[nn.Module, nn.Module]:
    alone = Grid(Mesh(tuple((name, 1) for name in grid.mesh.names)), World(device=grid.world.device))
    dtype = torch.float32 if grid.world.device.startswith("mps") else torch.float64

    def copy_on(place: Grid) -> nn.Module:
        if isinstance(net, nn.Module):
            groups = {id(one.groups): NormGroups() for one in net.modules() if isinstance(one, GroupedNorm)}
            model = copy.deepcopy(net, {id(grid): place, **groups})
        else:
            torch.manual_seed(0)
            model = net(place)
        model.to(grid.world.device, dtype).train().zero_grad(set_to_none=True)
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        group_batch_norms(model)
        return model

    return copy_on(grid), copy_on(alone)


class _Check:
    """A comparison of a network on a mesh with its copy on one process. All methods are collectives."""

    def __init__(
        self, network: HybridNetwork, alone: nn.Module, batch: tuple[Any, Any], loss: Loss | None, tolerance: float
    ) -> None:
        self.network, self.grid, self.alone = network, network.grid, alone
        self.loss, self.tolerance = loss, tolerance
        self.axes = [axis for axis, size in enumerate(self.grid.mesh.sizes) if size > 1]
        parts = self.grid.parts(network.samples)
        self.count = broadcast_plain(len(batch[0]), self.grid.world) // parts * parts
        if not self.count:
            what = f"{len(batch[0])} samples can't be divided among {parts} processes"
            raise UserError(what, "verify_gradients", (f"give {parts} samples or more",))
        self.sample = self._broadcast_from_rank_0(batch[0])
        self.labels = None if batch[1] is None else self._broadcast_from_rank_0(batch[1])
        self.shares = [slice(*pair) for pair in itertools.pairwise(shard_boundaries(self.count, parts))]
        self.rows = self.shares[self.grid.place(network.samples)]

    def run(self) -> tuple[list[Finding], float]:
        """Returns (findings, largest relative error of a gradient)."""
        found = self._load_parameters()
        if found:
            return found, 0.0
        due_outputs, due = self._run_alone()
        outputs, raw = self._run_on_mesh()
        self.network.reducer.finish()
        for number, (output, due_output) in enumerate(zip(outputs, due_outputs, strict=True)):
            name = OUTPUT if len(due_outputs) == 1 else f"{OUTPUT} {number}"
            if any(gather_plain(output.shape != due_output.shape, self.grid.world)):
                what = f"rank 0 has shape {tuple(output.shape)}, expected {tuple(due_output.shape)}"
                hints = "check for a missing gather or scatter, or a wrong axis"
                return [*found, Finding(name, "cut", (), broadcast_plain(what, self.grid.world), hints)], 0.0
            error, rank = self._compare(output, due_output)
            if error > self.tolerance:
                # Differences from the mean over samples lack terms that are added once, such as a bias.
                pairs = [(output, due_output), (output - output.mean(0), due_output - due_output.mean(0))]
                found.append(self._explain(name, pairs, (), rank))
        largest = max((float(one.abs().max()) for one in due.values() if one.numel()), default=0.0)
        negligible, worst = _NEGLIGIBLE * max(gather_plain(largest, self.grid.world)), 0.0
        for name, local in raw.items():
            layout, parameter = self.network.layouts[name], self.network.model.get_parameter(name)
            region = layout.region(self.grid.mesh, self.grid.world.rank)
            total_due = _region(self._sum_over_axes(due[name], self.network.samples), region)
            total = torch.zeros_like(local) if parameter.grad is None else parameter.grad
            error, rank = self._compare(total, total_due, negligible)
            worst = max(worst, error)
            if error > self.tolerance:
                # Before the sum over the samples, an error differs between axes of equal size.
                pairs = [(local, _region(due[name], region)), (total, total_due)]
                found.append(self._explain(name, pairs, layout.sharded_axes, rank))
        return found, worst

    def _broadcast_from_rank_0(self, tensor: Tensor) -> Tensor:
        tensor = tensor[: self.count].detach().to(self.grid.world.device).clone(memory_format=torch.contiguous_format)
        if tensor.is_floating_point():
            tensor = tensor.to(next((one.dtype for one in self.network.model.parameters()), torch.float64))
        if not self.grid.world.alone:
            dist.broadcast(tensor, src=0)
        return tensor

    def _load_parameters(self) -> list[Finding]:
        """Copies unsharded parameters and buffers to the single-process copy. Returns findings on invalid tensors."""
        mesh, rank, found = self.grid.mesh, self.grid.world.rank, list[Finding]()
        local_state = self.network.model.state_dict(keep_vars=True)
        for name, target in self.alone.state_dict(keep_vars=True).items():
            if not isinstance(target, Tensor) or not isinstance(local_state.get(name), Tensor):
                continue
            layout, local = self.network.layouts[name], local_state[name].detach()
            unmarked = isinstance(target, nn.Parameter) and target.shape not in {layout.shape, local.shape}
            if any(gather_plain(unmarked, self.grid.world)):
                what = f"unmarked, but the shape is {tuple(target.shape)} on one process and {layout.shape} on the mesh"
                do = "shard it with shard or shard_module, or by Parameter(piece, layerwise_parallel=(axis, dimension))"
                found.append(Finding(name, "mark", mesh.names, what, do))
                continue
            differing = [
                mesh.names[axis]
                for axis in self.axes
                if axis not in layout.sharded_axes
                and self._compare(self._sum_over_axes(local, (axis,)), mesh.sizes[axis] * local)[0] > self.tolerance
            ]
            if differing:
                where = " and ".join(differing)
                what = f"the values differ between processes along {where}, which does not shard the tensor"
                do = f"use one seed on all processes, or shard the tensor over {where}"
                found.append(Finding(name, "replicas", tuple(differing), what, do))
                continue
            full = local.new_zeros(layout.shape)
            if layout.first_holder(mesh, rank) == rank:
                _region(full, layout.region(mesh, rank)).copy_(local)
            target.data = self._sum_over_axes(full, range(len(mesh.axes)))
        for module in self.alone.modules():
            if isinstance(module, GroupedNorm) and module.running_mean is not None:
                module.num_features = len(module.running_mean)
        return found

    def _run_alone(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Runs the single-process copy. Returns (outputs of this rank's rows, gradients of its loss by name)."""
        _set_norm_groups(self.alone, self.shares, self.count)
        try:
            output = self.alone(self.sample)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            give = "if the network stores the sizes of its shards, pass its class or a function, such as"
            what = f"the network does not run on a mesh of one process: {type(error).__name__}: {error}"
            raise UserError(what, "verify_gradients", (give, "verify_gradients(Net, sample, mesh=mesh)")) from error
        output = pytree.tree_map_only(Tensor, lambda one: one[self.rows], output)
        named = {name: one for name, one in self.alone.named_parameters() if one.requires_grad}
        loss = self._loss_share(output)
        due = torch.autograd.grad(loss, list(named.values()), materialize_grads=True, allow_unused=True)
        return [one.detach() for one in _tensors(output)], dict(zip(named, due, strict=True))

    def _run_on_mesh(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Runs the network on the mesh. Returns (outputs of this rank's rows, local gradients by name)."""
        _set_norm_groups(self.network.model, [slice(0, self.rows.stop - self.rows.start)], self.count)
        output = self.network.model(self.sample[self.rows])
        Gradients(self.network, self.grid.world).backward_custom_loss(self._loss_share(output))
        raw = {
            name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
            for name, one in self.network.model.named_parameters()
            if one.requires_grad
        }
        return [one.detach() for one in _tensors(output)], raw

    def _loss_share(self, output: Any) -> Tensor:
        if self.loss is None:
            parts: list[Tensor] = []
            for one in _tensors(output):
                generator = torch.Generator().manual_seed(1)  # equal factors on all processes
                weights = torch.randn(self.count, *one.shape[1:], generator=generator, dtype=torch.float64)
                parts.append((one * weights[self.rows].to(one)).sum())
            return torch.stack(parts).sum() / self.count
        value = self.loss(output) if self.labels is None else self.loss(output, self.labels[self.rows])
        return (value.sum() if value.dim() else value * (self.rows.stop - self.rows.start)) / self.count

    def _sum_over_axes(self, tensor: Tensor, axes: Iterable[int]) -> Tensor:
        over = [axis for axis in axes if self.grid.mesh.sizes[axis] > 1]
        if tensor.dtype == torch.bool:
            return self._sum_over_axes(tensor.byte(), over).bool()
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if over:
            dist.all_reduce(result, group=self.grid.group(over))
        return result

    def _compare(self, observed: Tensor, expected: Tensor, least: float = 0.0) -> tuple[float, int]:
        """Returns (largest error / max(largest expected value, `least`), rank with the largest error)."""
        error = 0.0
        if not torch.equal(observed, expected) and observed.numel():
            error = float((observed - expected).abs().max())
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        pairs = gather_plain([error if math.isfinite(error) else math.inf, scale], self.grid.world)
        errors, scales = zip(*pairs, strict=True)
        return max(errors) / (max(least, *scales) or 1.0), errors.index(max(errors))

    def _explain(self, name: str, pairs: list[tuple[Tensor, Tensor]], sharded: Collection[int], rank: int) -> Finding:
        """Explains an error by a missing or repeated sum. Returns a finding with the smallest possible sets of axes."""

        def equal(observed: Tensor, expected: Tensor) -> bool:
            return self._compare(observed, expected)[0] <= self.tolerance

        for observed, expected in pairs:
            if self._compare(torch.zeros_like(expected), expected)[0] == 0:
                continue
            for count in range(1, len(self.axes) + 1):
                found: dict[Cause, list[tuple[int, ...]]] = {"missing": [], "doubled": []}
                for over in itertools.combinations(self.axes, count):
                    pieces = [one for one in over if one in sharded]
                    replicas = [one for one in over if one not in sharded]
                    # Shards can't be summed. If all processes hold an equal fraction of the value, no sum is missing.
                    summable = not pieces and not equal(self.grid.parts(over) * observed, expected)
                    if summable and equal(self._sum_over_axes(observed, over), expected):
                        found["missing"].append(over)
                    elif equal(observed, self.grid.parts(pieces) * self._sum_over_axes(expected, replicas)):
                        found["doubled"].append(over)
                for cause, sets in found.items():
                    if sets:
                        return self._finding(name, cause, sets, rank)
        subject, hints = "the gradient", "correct the earlier findings first: they may cause this one"
        if name.startswith(OUTPUT):
            subject = "the output"
            hints = "check for a missing collective, a wrong axis, or a bias added before an all_reduce"
        text = f"{subject} is wrong on rank {rank}; no single missing or extra all-reduce explains the error"
        return Finding(name, "wrong", (), text, hints)

    def _finding(self, name: str, cause: Cause, sets: list[tuple[int, ...]], rank: int) -> Finding:
        names, axes = self.grid.mesh.names, tuple(dict.fromkeys(itertools.chain.from_iterable(sets)))
        where = " or ".join(" and ".join(names[axis] for axis in over) for over in sets)
        output = name.startswith(OUTPUT)
        subject = "the output is" if output else "the gradient is"
        if cause == "missing":
            what = f"{subject} partial over {where} on rank {rank}: the sum over {where} is correct"
            hints = f"add {where}.enter where a value computed from {name} enters a computation split over {where}"
        else:
            what = f"{subject} {self.grid.parts(sets[0])} times too large on rank {rank}: summed twice over {where}"
            hints = f"remove one all-reduce over {where}: {where}.enter twice, or torch.distributed in backward"
            if set(axes) & set(self.network.samples):
                hints = f"remove {where}.enter: mode hybrid sums over the axes of the samples"
        if output:
            hints = f"add {where}.all_reduce" if cause == "missing" else f"remove one {where}.all_reduce"
        return Finding(name, cause, tuple(names[axis] for axis in axes), what, hints)


def _set_norm_groups(model: nn.Module, shares: list[slice], count: int) -> None:
    pairs = enumerate(shares)
    spans = tuple(Span(number, one.start, one.stop, one.stop - one.start, -1, True) for number, one in pairs)
    for groups in {id(one.groups): one.groups for one in model.modules() if isinstance(one, GroupedNorm)}.values():
        groups.begin_micro_batch(spans, (), shares[-1].stop, count)


def _tensors(output: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]


def _region(tensor: Tensor, region: tuple[tuple[int, int], ...]) -> Tensor:
    return tensor[tuple(slice(*pair) for pair in region)]

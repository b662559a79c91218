"""Proves that a network which its author has split has the gradients of one process, or says what is wrong."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from manyhands.core.errors import UserError
from manyhands.core.layouts import TensorLayout, bounds
from manyhands.core.mesh import Mesh
from manyhands.core.world import World
from manyhands.parallel.grid import Grid
from manyhands.parallel.hybrid import Axis
from manyhands.parallel.modes.hybrid import HybridNetwork, hybrid_network
from manyhands.parallel.norm import GroupedNorm, NormGroups, group_batch_norms
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.parallel.trace import Record, recording, rows_due
from manyhands.parallel.verdict import (
    OUTPUT,
    Explanation,
    Finding,
    GradientCheck,
    close,
    cut_of,
    differing_axes,
    explain,
    factor_between,
    judge_gradient,
    judge_output,
    names_of,
    scale_of,
)

Loss = Callable[..., Tensor]
# Gradients far below the largest one are rounding errors, such as those of a bias before BatchNorm.
NOTHING = 1e-6
BUT = ", but for what is the same for all samples (a bias?)"


@dataclass(frozen=True)
class Trial:
    """What a network is tried on.

    Attributes:
        sample: the whole batch [n, …].
        labels: of all samples, or None.
        loss: of output and labels (of the output alone, without labels): a mean, or one value per sample. None:
            cross-entropy, or, without labels, a weighted sum of all outputs.
        tolerance: as a part of a tensor's largest value.
    """

    sample: Tensor
    labels: Tensor | None
    loss: Loss | None
    tolerance: float

    def __call__(self, output: Any, rows: slice) -> Tensor:
        """These rows' part of the mean loss."""
        count = len(self.sample)
        if self.labels is None and self.loss is None:
            parts = [(one * _weights(one, count, rows)).sum() for one in _tensors(output)]
            return torch.stack(parts).sum() / count
        loss = self.loss or _cross_entropy
        value = loss(output, self.labels[rows]) if self.labels is not None else loss(output)
        return (value.sum() if value.dim() else value * (rows.stop - rows.start)) / count


def verify_gradients(
    net: nn.Module | Callable[[Grid], nn.Module],
    sample: Tensor,
    labels: Tensor | None = None,
    *,
    mesh: Grid | None = None,
    loss: Loss | None = None,
    samples: tuple[str, ...] | None = None,
    tolerance: float = 1e-6,
    check: bool = False,
) -> GradientCheck:
    """Compares the gradients of a network that is split by hand with those of one process; a collective.

    All processes call it alike. Copies of the network are computed in double precision, in training but without
    dropout; the network itself and its gradients stay as they are.

    Args:
        net: a function of a mesh that makes the network, such as its class; or the network. Then a copy of it runs on
            a mesh of one process, so its forward must ask axes for their sizes and not remember them.
        sample: a batch [n, …]; rank 0's is used, and as much of it as the processes can share equally.
        labels: of the samples, for cross-entropy or the loss.
        mesh: where it runs; needed with a function, and with a network that has no axis of one.
        loss: function (output, labels) of the mean loss or one per sample. Without one and without labels it is a
            weighted sum of all outputs, so that wrong gradients are told from consequences of a wrong output.
        samples: names of the axes over which samples are shared; None: all that cut no parameter.
        tolerance: as a part of the largest value of what is compared.
        check: raise an error where something is wrong.

    Raises:
        UserError: it can't be tried: no mesh, too few samples, or no copy of it runs on one process.
        RunError: something is wrong, and `check` is set.
    """
    grid = mesh or _mesh_of(net)
    with torch.random.fork_rng():
        alone_grid = Grid(Mesh(tuple((name, 1) for name in grid.mesh.names)), World(device=grid.world.device))
        live, alone = _both(net, grid, alone_grid)
        network = hybrid_network(live, grid, samples)
        try:
            trial = Trial(*_inputs(sample, labels, network), loss, tolerance)
            found = _verify(network, alone, alone_grid, trial)
        finally:
            network.reducer.release()
    # One process's words for all: another machine may round otherwise.
    findings, worst = broadcast_plain([[one.as_plain() for one in found[0]], found[1]], grid.world)
    told = tuple(Finding(name, cause, tuple(axes), what, mend) for name, cause, axes, what, mend in findings)
    result = GradientCheck(told, worst, sum(parameter.requires_grad for parameter in live.parameters()))
    if check:
        result.require()
    return result


def _mesh_of(net: Any) -> Grid:
    modules = net.modules() if isinstance(net, nn.Module) else []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Axis | Grid):
                return value.mesh if isinstance(value, Axis) else value
    mend = ("mesh=manyhands.open_mesh(...), the one that the network is made with",)
    raise UserError("the network has no axis of a mesh", "verify_gradients", mend)


def _both(net: nn.Module | Callable[[Grid], nn.Module], grid: Grid, alone_grid: Grid) -> tuple[nn.Module, nn.Module]:
    """The network as it runs here, and one for a mesh of one process; copies that are ours."""
    made: list[nn.Module] = []
    for place in (grid, alone_grid):
        if isinstance(net, nn.Module):
            groups = {id(one.groups): NormGroups() for one in net.modules() if isinstance(one, GroupedNorm)}
            made.append(copy.deepcopy(net, {id(grid): place, **groups}))
        else:
            torch.manual_seed(0)
            made.append(net(place))
    dtype = torch.float32 if grid.world.device.startswith("mps") else torch.float64
    for model in made:
        model.to(grid.world.device, dtype).train()
        for parameter in model.parameters():
            parameter.grad = None
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
    group_batch_norms(made[0])
    return made[0], made[1]


def _inputs(sample: Tensor, labels: Tensor | None, network: HybridNetwork) -> tuple[Tensor, Tensor | None]:
    """Rank 0's samples and labels, as many as all processes can share equally."""
    grid = network.grid
    parts = grid.parts(network.samples)
    count = len(sample) // parts * parts
    if not count:
        what = f"{len(sample)} samples are too few for the {parts} processes that share them"
        raise UserError(what, "verify_gradients", (f"{parts} samples or more",))
    kept = [sample[:count], None if labels is None else labels[:count]]
    dtype = next((one.dtype for one in network.model.parameters()), torch.float64)
    given: list[Tensor | None] = []
    for one in kept:
        tensor = (
            None if one is None else one.detach().to(grid.world.device).clone(memory_format=torch.contiguous_format)
        )
        if tensor is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if tensor is not None and not grid.world.alone:
            dist.broadcast(tensor, src=0)
        given.append(tensor)
    first = given[0]
    assert first is not None
    return first, given[1]


def _verify(network: HybridNetwork, alone: nn.Module, alone_grid: Grid, trial: Trial) -> tuple[list[Finding], float]:
    found = _make_whole(network, alone, trial.tolerance)
    if found:
        return found, 0.0
    shares = _shares(network, len(trial.sample))
    with recording(alone_grid) as due:
        reference, gradients = _reference(alone, trial, shares)
    with recording(network.grid) as seen:
        raw, output = _run(network, trial, shares)
    found = _judge_outputs(network, output, reference, shares, trial.tolerance)
    if any(finding.cause == "cut" for finding in found):
        return found, 0.0
    network.reducer.finish()
    forward, backward = _wrong_places(network, seen, due, shares, trial)
    if forward and not any(finding.axes for finding in found):
        found = [_located(finding, forward, network.grid.mesh) for finding in found]
    worst = 0.0
    largest = scale_of(one for share in gradients for one in share.values())
    for name, parameter in network.model.named_parameters():
        if parameter.requires_grad:
            expected = [share[name] for share in gradients]
            error, finding = _judge(network, name, raw[name], expected, NOTHING * largest, trial.tolerance, backward)
            worst = max(worst, error)
            found += [finding] if finding else []
    return found, worst


@dataclass(frozen=True)
class Place:
    """The first collective, in the order of the pass, at which something is wrong, and why."""

    label: str
    why: Explanation


def _wrong_places(
    network: HybridNetwork, seen: list[Record], due: list[Record], shares: list[slice], trial: Trial
) -> tuple[Place | None, Place | None]:
    """Where the forward and the backward pass first have a value that is a wrong sum."""

    def first(pairs: list[tuple[str, Tensor | None, Tensor | None]]) -> Place | None:
        found: Place | None = None
        for label, here, there in pairs:
            why = _why(network, here, there, shares, trial)
            if why:
                found = Place(label, why)
            elif found and here is not None:
                break
        # Of collectives one after the other the last one shows what all of them did.
        return found

    both = list(zip(seen, due, strict=False))
    forward = first([(one.label, one.value, other.value) for one, other in both])
    return forward, first([(one.label, one.gradient, other.gradient) for one, other in reversed(both)])


def _why(
    network: HybridNetwork, here: Tensor | None, there: Tensor | None, shares: list[slice], trial: Trial
) -> Explanation | None:
    if here is None or there is None:
        return None
    mesh = network.grid.mesh
    observed = _gather(here, network.grid)
    dues = [rows_due(there, observed[rank].shape, rows, len(trial.sample)) for rank, rows in enumerate(shares)]
    expected = [one for one in dues if one is not None]
    if len(expected) < len(dues):
        return None
    scale = scale_of(expected)
    if all(close(one, right, trial.tolerance, scale) for one, right in zip(observed, expected, strict=True)):
        return None
    found = explain(observed, expected, mesh, (), trial.tolerance)
    return found[0] if found else None


def _located(finding: Finding, place: Place, mesh: Mesh) -> Finding:
    better = judge_output(finding.name, [place.why], mesh)
    return replace(better, what=f"at {place.label}, {better.what}") if better else finding


def _shares(network: HybridNetwork, count: int) -> list[slice]:
    """By rank, the rows of the batch that it has."""
    mesh = network.grid.mesh
    edges = bounds(count, mesh.parts(network.samples))
    places = [mesh.place(network.samples, rank) for rank in range(mesh.size)]
    return [slice(edges[place], edges[place + 1]) for place in places]


def _make_whole(network: HybridNetwork, alone: nn.Module, tolerance: float) -> list[Finding]:
    """Gives the network of one process the whole of what the processes hold."""
    mesh = network.grid.mesh
    mine = network.model.state_dict(keep_vars=True)
    found: list[Finding] = []
    for name, target in alone.state_dict(keep_vars=True).items():
        if not isinstance(target, Tensor) or not isinstance(mine.get(name), Tensor):
            continue
        layout, local = network.layouts[name], mine[name].detach()
        if isinstance(target, nn.Parameter) and tuple(target.shape) not in {layout.shape, tuple(local.shape)}:
            found.append(_unmarked(name, tuple(target.shape), layout.shape, mesh))
            continue
        pieces = _gather(local, network.grid)
        differing = differing_axes(pieces, mesh, layout.cut_axes, tolerance)
        if differing:
            found.append(_replicas(name, differing, mesh))
            continue
        target.data = _together(pieces, layout, mesh)
    for module in alone.modules():
        if isinstance(module, GroupedNorm) and module.running_mean is not None:
            module.num_features = len(module.running_mean)
    return found


def _unmarked(name: str, alone: tuple[int, ...], here: tuple[int, ...], mesh: Mesh) -> Finding:
    what = f"it has shape {alone} on one process, and {here} here, where it is not marked so"
    mend = "cut it with shard or shard_module, or make it Parameter(piece, layerwise_parallel=(axis, dimension))"
    return Finding(name, "mark", mesh.names, what, mend)


def _replicas(name: str, axes: tuple[int, ...], mesh: Mesh) -> Finding:
    where = names_of(axes, mesh)
    what = f"its values differ between processes along {where}, which does not cut it"
    mend = f"make it equal (the same seed), or, if it is cut over {where}, by shard"
    return Finding(name, "replicas", tuple(mesh.names[axis] for axis in axes), what, mend)


def _gather(tensor: Tensor, grid: Grid) -> list[Tensor]:
    """By rank, every process's tensor, whatever its shape."""
    if grid.world.alone:
        return [tensor]
    shapes = [torch.Size(shape) for shape in gather_plain(list(tensor.shape), grid.world)]
    room = tensor.new_zeros(max(shape.numel() for shape in shapes))
    room[: tensor.numel()] = tensor.reshape(-1)
    everybody = [torch.empty_like(room) for _ in shapes]
    dist.all_gather(everybody, room)
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(everybody, shapes, strict=True)]


def _together(pieces: list[Tensor], layout: TensorLayout, mesh: Mesh) -> Tensor:
    whole = pieces[0].new_empty(layout.shape)
    for rank, region in layout.pieces(mesh):
        _at(whole, region).copy_(pieces[rank])
    return whole


def _at(tensor: Tensor, region: tuple[tuple[int, int], ...]) -> Tensor:
    for dim, (start, stop) in enumerate(region):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _reference(alone: nn.Module, trial: Trial, shares: list[slice]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """What one process gives for the whole batch, and the gradients of each rank's share of the loss."""
    try:
        output = alone(trial.sample)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        mend = (
            "a network that remembers sizes of pieces can't be copied so: give the function that makes it",
            "verify_gradients(Net, sample, mesh=mesh)",
        )
        what = f"the network does not run on a mesh of one process: {type(error).__name__}: {error}"
        raise UserError(what, "verify_gradients", mend) from error
    by_rows: dict[int, dict[str, Tensor]] = {}
    named = {name: one for name, one in alone.named_parameters() if one.requires_grad}
    for rows in shares:
        if rows.start not in by_rows:
            loss = trial(pytree.tree_map_only(Tensor, lambda one, rows=rows: one[rows], output), rows)
            found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
            pairs = zip(named.items(), found, strict=True)
            by_rows[rows.start] = {
                name: torch.zeros_like(one) if gradient is None else gradient for (name, one), gradient in pairs
            }
    # Backward of the whole loss as well: what passes through the collectives is compared with it.
    trial(output, slice(0, len(trial.sample))).backward()
    return [one.detach() for one in _tensors(output)], [by_rows[rows.start] for rows in shares]


def _run(network: HybridNetwork, trial: Trial, shares: list[slice]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Forward and backward on this process's share: gradients that are not summed yet, and the output."""
    rows = shares[network.grid.world.rank]
    _begin_pass(network, rows, len(trial.sample))
    output = network.model(trial.sample[rows])
    trial(output, rows).backward()
    raw = {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for name, one in network.model.named_parameters()
    }
    return raw, [one.detach() for one in _tensors(output)]


@dataclass(frozen=True)
class _Part:
    """A process's part of the only group of BatchNorm, which is the whole batch."""

    start: int
    stop: int
    size: int
    shared: int
    first: bool


def _begin_pass(network: HybridNetwork, rows: slice, count: int) -> None:
    shared = network.grid.parts(network.samples) > 1
    held = rows.stop - rows.start
    part = _Part(0, held, count, 0 if shared else -1, rows.start == 0)
    network.norms.begin_pass((part,), (count,) if shared else (), held, count)


def _tensors(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


def _weights(output: Tensor, count: int, rows: slice) -> Tensor:
    """Equal on all processes for the same sample, different for all values."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(count, *output.shape[1:], generator=generator, dtype=torch.float64)
    return weights[rows].to(output)


def _cross_entropy(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, reduction="none")


def _judge_outputs(
    network: HybridNetwork, output: list[Tensor], reference: list[Tensor], shares: list[slice], tolerance: float
) -> list[Finding]:
    found: list[Finding] = []
    for number, (here, there) in enumerate(zip(output, reference, strict=True)):
        name = OUTPUT if len(reference) == 1 else f"{OUTPUT} {number}"
        observed, expected = _gather(here, network.grid), [there[rows] for rows in shares]
        finding = judge_value(name, observed, expected, network.grid.mesh, tolerance)
        found += [finding] if finding else []
    return found


def judge_value(
    name: str, observed: list[Tensor], expected: list[Tensor], mesh: Mesh, tolerance: float
) -> Finding | None:
    """What is wrong with what processes have of a value, by rank, when it should be whole for their samples."""
    scale = scale_of(expected)
    if all(close(one, due, tolerance, scale) for one, due in zip(observed, expected, strict=True)):
        return None
    if [one.shape for one in observed] != [one.shape for one in expected]:
        return _judge_shape(name, observed, expected, mesh)
    found = judge_output(name, explain(observed, expected, mesh, (), tolerance), mesh)
    if found:
        return found
    # What is added once, such as a bias, is not part of a sum; differences between samples don't have it.
    centred = [[one - one.mean(0) for one in values] for values in (observed, expected)]
    if scale_of(centred[1]):
        if all(close(one, due, tolerance, scale) for one, due in zip(*centred, strict=True)):
            what = "it is off by the same for all samples"
            mend = (
                "is something whole, such as a bias, added before an all_reduce? It is then added once by each process"
            )
            return Finding(name, "doubled", (), what, mend)
        found = judge_output(name, explain(*centred, mesh, (), tolerance), mesh, BUT)
        if found:
            return found
    factor = factor_between(observed, expected, tolerance)
    if factor is not None:
        return Finding(name, "scaled", (), f"it is {factor:.6g} times what it should be", "is a mean taken for a sum?")
    what = f"it is wrong, by up to {_error(observed, expected):.1e} of its largest value; no sum over an axis gives it"
    return Finding(
        name, "wrong", (), what, "is a collective missing, or over a wrong axis, before an op that is not linear?"
    )


def _judge_shape(name: str, observed: list[Tensor], expected: list[Tensor], mesh: Mesh) -> Finding:
    if observed[0].dim() == expected[0].dim():
        cut = cut_of(observed, expected, mesh)
        if cut:
            axis, dim = mesh.names[cut[0]], cut[1]
            what = f"it is cut over {axis} in dimension {dim}"
            return Finding(name, "cut", (axis,), what, f"{axis}.gather(output, {dim}) is missing")
    what = f"it has shape {tuple(observed[0].shape)} for the samples of rank 0, where {tuple(expected[0].shape)} is due"
    return Finding(name, "cut", (), what, "is a gather or scatter missing, or over another axis than it should be?")


def _error(observed: list[Tensor], expected: list[Tensor]) -> float:
    scale = scale_of(expected) or 1.0
    return max(scale_of([one - due]) for one, due in zip(observed, expected, strict=True)) / scale


def _judge(
    network: HybridNetwork,
    name: str,
    raw: Tensor,
    shares: list[Tensor],
    nothing: float,
    tolerance: float,
    place: Place | None,
) -> tuple[float, Finding | None]:
    """The relative error of a parameter's gradient after the sum over the samples' axes, and what is wrong with it."""
    mesh, layout = network.grid.mesh, network.layouts[name]
    gradient = network.model.get_parameter(name).grad
    observed = _gather(torch.zeros_like(raw) if gradient is None else gradient.detach(), network.grid)
    parts = mesh.parts(network.samples)
    total = torch.stack([shares[rank] for rank in _first_of_each(mesh, network.samples)]).sum(0)
    expected = [_at(total, layout.region(mesh, rank)) for rank in range(mesh.size)]
    scale = max(scale_of([total]), nothing)
    if not scale:
        return 0.0, None if not scale_of(observed) else Finding(name, "wrong", (), "its gradient should be zero", "")
    error = max(scale_of([one - due]) for one, due in zip(observed, expected, strict=True)) / scale
    if error <= tolerance:
        return error, None
    # Before the sum over samples, axes of equal sizes can be told apart.
    pieces = [_at(share, layout.region(mesh, rank)) for rank, share in enumerate(shares)]
    found = explain(_gather(raw, network.grid), pieces, mesh, layout.cut_axes, tolerance) if parts > 1 else []
    found = found or explain(observed, expected, mesh, layout.cut_axes, tolerance)
    if place and (not found or place.why in found):
        found = [place.why]
    finding = judge_gradient(name, found, mesh, network.samples)
    if finding and place and place.why in found:
        finding = replace(finding, what=f"from {place.label} on, {finding.what}")
    if finding:
        return error, finding
    differing = differing_axes(observed, mesh, layout.cut_axes, tolerance)
    axes, where = tuple(mesh.names[axis] for axis in differing), names_of(differing, mesh)
    factor = factor_between(observed, expected, tolerance)
    if factor is not None:
        what = f"its gradient is {factor:.6g} times what it should be"
        return error, Finding(name, "scaled", (), what, "is a mean taken for a sum, or one counted too often?")
    if differing:
        what = f"its gradient differs between processes along {where}, which does not cut it"
        mend = f"is {where}.enter missing before work that is split over {where}?"
        return error, Finding(name, "replicas", axes, what, mend)
    what = f"its gradient is wrong, by up to {error:.1e} of its largest value"
    return error, Finding(name, "wrong", (), what, "mend what is named before it first; it may follow from that")


def _first_of_each(mesh: Mesh, samples: tuple[int, ...]) -> list[int]:
    """A rank for each share of the samples."""
    return mesh.peers(samples, 0)

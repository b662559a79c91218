"""Proves that a network which its author has split has the gradients of one process, or says what is wrong."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.parallel.grid import Axis, Grid
from manyhands.parallel.modes.hybrid import HybridNetwork, hybrid_network
from manyhands.parallel.plain import broadcast_plain
from manyhands.parallel.proof.alone import Make, both, gather, grid_alone, make_whole, region_of
from manyhands.parallel.proof.sums import close, differing_axes, error_between, explain, factor_between, scale_of
from manyhands.parallel.proof.trace import WrongPlace, located, recording, wrong_places
from manyhands.parallel.proof.trial import GradientTrial, Loss, make_trial, run_alone, run_here, shares_of
from manyhands.parallel.proof.verdict import OUTPUT, Finding, GradientCheck, judge_gradient, judge_value, names_of

# Gradients far below the largest one are rounding errors, such as those of a bias before BatchNorm.
NOTHING = 1e-6


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
        alone_grid = grid_alone(grid)
        live, alone = both(net, grid, alone_grid)
        network = hybrid_network(live, grid, samples)
        try:
            trial = GradientTrial(*make_trial(sample, labels, network), loss, tolerance)
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


def _verify(
    network: HybridNetwork, alone: nn.Module, alone_grid: Grid, trial: GradientTrial
) -> tuple[list[Finding], float]:
    found = make_whole(network, alone, trial.tolerance)
    if found:
        return found, 0.0
    shares = shares_of(network, len(trial.sample))
    with recording(alone_grid) as due:
        reference, gradients = run_alone(alone, trial, shares)
    with recording(network.grid) as seen:
        raw, output = run_here(network, trial, shares)
    network.reducer.finish()
    found = _judge_outputs(network, output, reference, shares, trial.tolerance)
    if any(finding.cause == "cut" for finding in found):
        return found, 0.0
    forward, backward = wrong_places(network.grid, seen, due, shares, trial.tolerance)
    if forward and not any(finding.axes for finding in found):
        found = [located(finding, forward, network.grid.mesh) for finding in found]
    nothing = NOTHING * scale_of(one for share in gradients for one in share.values())
    worst = 0.0
    for name, value in raw.items():
        gradient = _gradient(network, name, value, [share[name] for share in gradients])
        error, finding = _judge(gradient, network, nothing, trial.tolerance, backward)
        worst = max(worst, error)
        found += [finding] if finding else []
    return found, worst


def _judge_outputs(
    network: HybridNetwork, output: list[Tensor], reference: list[Tensor], shares: list[slice], tolerance: float
) -> list[Finding]:
    found: list[Finding] = []
    for number, (here, there) in enumerate(zip(output, reference, strict=True)):
        name = OUTPUT if len(reference) == 1 else f"{OUTPUT} {number}"
        observed, expected = gather(here, network.grid), [there[rows] for rows in shares]
        finding = judge_value(name, observed, expected, network.grid.mesh, tolerance)
        found += [finding] if finding else []
    return found


@dataclass(frozen=True)
class _Gradient:
    """A parameter's gradient by rank: before and after the sum over the samples' axes, as it is and as it should be."""

    name: str
    raw: list[Tensor]
    raw_due: list[Tensor]
    summed: list[Tensor]
    due: list[Tensor]


def _gradient(network: HybridNetwork, name: str, raw: Tensor, shares: list[Tensor]) -> _Gradient:
    mesh, layout = network.grid.mesh, network.layouts[name]
    gradient = network.model.get_parameter(name).grad
    summed = gather(torch.zeros_like(raw) if gradient is None else gradient.detach(), network.grid)
    total = torch.stack([shares[rank] for rank in mesh.peers(network.samples, 0)]).sum(0)
    regions = [layout.region(mesh, rank) for rank in range(mesh.size)]
    raw_due = [region_of(share, region) for share, region in zip(shares, regions, strict=True)]
    return _Gradient(name, gather(raw, network.grid), raw_due, summed, [region_of(total, one) for one in regions])


def _judge(
    gradient: _Gradient, network: HybridNetwork, nothing: float, tolerance: float, place: WrongPlace | None
) -> tuple[float, Finding | None]:
    mesh, cut = network.grid.mesh, network.layouts[gradient.name].cut_axes
    scale = max(scale_of(gradient.due), nothing) or 1.0
    pairs = list(zip(gradient.summed, gradient.due, strict=True))
    error = max(scale_of([one - due]) for one, due in pairs) / scale
    if all(close(one, due, tolerance, scale) for one, due in pairs):
        return error, None
    # Before the sum over samples, axes of equal sizes can be told apart.
    apart = network.grid.parts(network.samples) > 1
    found = explain(gradient.raw, gradient.raw_due, mesh, cut, tolerance) if apart else []
    found = found or explain(gradient.summed, gradient.due, mesh, cut, tolerance)
    placed = place is not None and (not found or place.why in found)
    if place and placed:
        found = [place.why]
    finding = judge_gradient(gradient.name, found, mesh, network.samples)
    if finding and place and placed:
        finding = replace(finding, what=f"from {place.label} on, {finding.what}")
    return error, finding or _unexplained(gradient, mesh, cut, tolerance)


def _unexplained(gradient: _Gradient, mesh: Mesh, cut: set[int], tolerance: float) -> Finding:
    """What can be said of a gradient that no sum explains."""
    factor = factor_between(gradient.summed, gradient.due, tolerance)
    if factor is not None:
        what = f"its gradient is {factor:.6g} times what it should be"
        return Finding(gradient.name, "scaled", (), what, "is a mean taken for a sum, or one counted too often?")
    differing = differing_axes(gradient.summed, mesh, cut, tolerance)
    if differing:
        where = names_of(differing, mesh)
        what = f"its gradient differs between processes along {where}, which does not cut it"
        mend = f"is {where}.enter missing before work that is split over {where}?"
        return Finding(gradient.name, "replicas", tuple(mesh.names[axis] for axis in differing), what, mend)
    what = f"its gradient is wrong, by up to {error_between(gradient.summed, gradient.due):.1e} of its largest value"
    return Finding(gradient.name, "wrong", (), what, "mend what is named before it first; it may follow from that")

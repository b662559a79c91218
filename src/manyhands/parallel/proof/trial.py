"""What a network is tried on, and its passes: on one process for the whole batch, and here for a share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.core.errors import UserError
from manyhands.core.layouts import bounds
from manyhands.core.shares import Span
from manyhands.core.world import World
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.modes.hybrid import HybridNetwork
from manyhands.parallel.network import ParallelNetwork

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class GradientTrial:
    """What a network is tried on."""

    sample: Tensor  # the whole batch [n, …]
    labels: Tensor | None  # of all samples, or None
    # of output and labels (of the output alone, without labels): a mean, or one value per sample. None: cross-entropy,
    # or, without labels, a weighted sum of all outputs.
    loss: Loss | None
    tolerance: float  # as a part of a tensor's largest value

    def __call__(self, output: Any, rows: slice) -> Tensor:
        """These rows' part of the mean loss."""
        count = len(self.sample)
        if self.labels is None and self.loss is None:
            parts = [(one * _weights(one, count, rows)).sum() for one in _tensors(output)]
            return torch.stack(parts).sum() / count
        value = _loss(self.loss, output, None if self.labels is None else self.labels[rows])
        return (value.sum() if value.dim() else value * (rows.stop - rows.start)) / count


def make_trial(sample: Tensor, labels: Tensor | None, network: HybridNetwork) -> tuple[Tensor, Tensor | None]:
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


def shares_of(network: HybridNetwork, count: int) -> list[slice]:
    """By rank, the rows of the batch that it has."""
    mesh = network.grid.mesh
    edges = bounds(count, mesh.parts(network.samples))
    places = [mesh.place(network.samples, rank) for rank in range(mesh.size)]
    return [slice(edges[place], edges[place + 1]) for place in places]


def run_alone(
    alone: nn.Module, trial: GradientTrial, shares: list[slice]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
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
    loss = trial(output, slice(0, len(trial.sample)))
    Gradients(ParallelNetwork(alone, alone), World()).backward_of(loss)
    return [one.detach() for one in _tensors(output)], [by_rows[rows.start] for rows in shares]


def run_here(
    network: HybridNetwork, trial: GradientTrial, shares: list[slice]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Forward and backward on this process's share: gradients that are not summed yet, and the output."""
    rows = shares[network.grid.world.rank]
    _begin_pass(network, rows, len(trial.sample))
    output = network.model(trial.sample[rows])
    Gradients(network.on_mesh(), network.grid.world).backward_of(trial(output, rows))
    raw = {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for name, one in network.model.named_parameters()
        if one.requires_grad
    }
    return raw, [one.detach() for one in _tensors(output)]


def _begin_pass(network: HybridNetwork, rows: slice, count: int) -> None:
    shared = network.grid.parts(network.samples) > 1
    held = rows.stop - rows.start
    part = Span(0, 0, held, count, 0 if shared else -1, rows.start == 0)
    network.norms.begin_micro_batch((part,), (count,) if shared else (), held, count)


def _tensors(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


def _weights(output: Tensor, count: int, rows: slice) -> Tensor:
    """Equal on all processes for the same sample, different for all values."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(count, *output.shape[1:], generator=generator, dtype=torch.float64)
    return weights[rows].to(output)


def _loss(loss: Loss | None, output: Any, labels: Tensor | None) -> Tensor:
    if loss is None:
        return F.cross_entropy(output, cast(Tensor, labels), reduction="none")
    return loss(output) if labels is None else loss(output, labels)

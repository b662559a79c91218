"""Saving and restoring a network that is cut over processes, tensor by tensor."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint.pieces import OPTIMIZER
from manyhands.checkpoint.pieces import Cut as TensorCut
from manyhands.checkpoint.save_cut import save_pieces, save_whole
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.source import Source
from manyhands.checkpoint.tensors import unflatten
from manyhands.checkpoint.together import Peers
from manyhands.core.world import World
from manyhands.parallel.network import Cutting, ParallelNetwork
from manyhands.parallel.plain import gather_plain


def peers_of(world: World) -> Peers:
    """The processes of a run, as saving and loading together want them."""
    return Peers(world.rank, world.size, functools.partial(gather_plain, world=world), world.device)


def tensor_cut(cutting: Cutting) -> TensorCut:
    """How a network's tensors are cut."""
    return TensorCut(cutting.mesh, cutting.layouts)


def save_cut(folder: Path, step: int, snapshot: Snapshot, cutting: Cutting, world: World, *, pieces: bool) -> Path:
    """Commits a checkpoint of what all processes hold; a collective.

    Args:
        folder: the checkpoints folder.
        step: updates made so far.
        snapshot: this process's pieces.
        cutting: how the network is cut.
        world: who takes part.
        pieces: each process writes its own; else rank 0 writes all.

    Raises:
        RunError: it could not be saved (`SaveError` if the disk is at fault); on all processes alike.
    """
    save = save_pieces if pieces else save_whole
    return save(folder, step, snapshot, tensor_cut(cutting), peers_of(world))


def restore_pieces(
    source: Source, network: ParallelNetwork, cutting: Cutting, optimizer: torch.optim.Optimizer | None, rank: int
) -> None:
    """Reads this process's pieces of a checkpoint into the network and its optimizer, one tensor after another.

    Args:
        source: the checkpoint, of the same network.
        network: whose parameters this process holds pieces of.
        cutting: how it is cut.
        optimizer: gains the saved state; None to leave that out.
        rank: this process.
    """
    with torch.no_grad():
        for name, tensor in network.inner.state_dict().items():
            tensor.copy_(source.model.piece(name, cutting.layouts[name], cutting.mesh, rank))
    if optimizer is None or source.optimizer is None:
        return
    layouts = source.layouts(tensor_cut(cutting))[OPTIMIZER]
    stored = source.optimizer
    tensors = {name: stored.piece(name, layouts[name], cutting.mesh, rank) for name in stored.names()}
    restore_optimizer(unflatten(source.branches, tensors), network, optimizer)


def restore_optimizer(saved: dict[str, Any], network: ParallelNetwork, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer its saved state by parameter name; what it doesn't train is left out."""
    parameters = dict(network.inner.named_parameters())
    for name, values in saved["state"].items():
        if name in parameters and parameters[name].requires_grad:
            parameter = parameters[name]
            optimizer.state[parameter] = {
                key: _like(value, parameter, key) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }


def _like(value: Tensor, parameter: Tensor, key: str) -> Tensor:
    """A saved optimizer tensor on the parameter's device; the step count keeps its own dtype."""
    if key == "step":
        return value.to(parameter.device)
    moved = torch.empty_like(parameter)
    return moved.copy_(value)

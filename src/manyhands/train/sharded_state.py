"""Saving and restoring a network that is cut over processes, tensor by tensor."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint.describe import OPTIMIZER, NetworkLayout
from manyhands.checkpoint.read import Source
from manyhands.checkpoint.snapshot import Snapshot, unflatten
from manyhands.checkpoint.write import CheckpointGroup, save_full, save_pieces
from manyhands.core.world import World
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.plain import gather_plain
from manyhands.parallel.spread import is_spread, spread_like
from manyhands.train.optimize import start_state
from manyhands.train.own_optimizer import is_custom, restore_own


def peers_of(world: World, writers: Mapping[int, range]) -> CheckpointGroup:
    """The processes of a run, as saving together wants them."""
    return CheckpointGroup(world.rank, world.size, functools.partial(gather_plain, world=world), world.device, writers)


def network_layout_of(network: ParallelNetwork) -> NetworkLayout:
    """How a network's tensors are cut."""
    return NetworkLayout(network.mesh, network.layouts)


def save_sharded(
    folder: Path, step: int, snapshot: Snapshot, network: ParallelNetwork, peers: CheckpointGroup, *, pieces: bool
) -> Path:
    """Commits a checkpoint of what all processes hold; a collective.

    Args:
        folder: the checkpoints folder.
        step: updates made so far.
        snapshot: this process's pieces.
        network: that is cut.
        peers: who takes part.
        pieces: each process writes its own; else each writer all.

    Raises:
        RunError: it could not be saved (`SaveError` if the disk is at fault); on all processes alike.
    """
    save = save_pieces if pieces else save_full
    return save(folder, step, snapshot, network_layout_of(network), peers)


def restore_pieces(source: Source, network: ParallelNetwork, optimizer: torch.optim.Optimizer | None) -> str:
    """Reads this process's pieces of a checkpoint into the network and its optimizer, one tensor after another.

    Args:
        source: the checkpoint, of the same network.
        network: whose parameters this process holds pieces of.
        optimizer: gains the saved state; None to leave that out.

    Returns:
        What `restore_optimizer` says.
    """
    with torch.no_grad():
        for name, tensor in network.inner.state_dict().items():
            if isinstance(tensor, Tensor):  # extra state is restored with the rest
                tensor.copy_(source.model.piece(name, network.layouts[name], network.mesh, network.rank))
    if optimizer is None or source.optimizer is None:
        return ""
    layouts = source.layouts(network_layout_of(network))[OPTIMIZER]
    stored = source.optimizer
    tensors = {name: stored.piece(name, layouts[name], network.mesh, network.rank) for name in stored.names()}
    return restore_optimizer(unflatten(source.branches, tensors), network, optimizer)


def restore_optimizer(saved: dict[str, Any], network: ParallelNetwork, optimizer: torch.optim.Optimizer) -> str:
    """Gives an optimizer its saved state by parameter name; what it doesn't train is left out.

    What wasn't saved (of a parameter that was frozen then, say) starts anew, and so does what another optimizer saved.

    Args:
        saved: a state dict by names, with whole tensors, or pieces where the network is cut.
        network: whose parameters they are, under any mode.
        optimizer: of these.

    Returns:
        A sentence that says what starts anew although something was saved; empty if nothing does.
    """
    if is_custom(optimizer):
        return restore_own(saved, network.inner, optimizer)
    others: set[str] = set()
    for name, parameter in network.inner.named_parameters():
        if not parameter.requires_grad:
            continue
        fresh = start_state(optimizer, parameter)
        found = {key: value for key, value in saved["state"].get(name, {}).items() if value is not None}
        if _fits(found, fresh):
            optimizer.state[parameter] = {
                key: _like(torch.as_tensor(value), parameter, fresh[key]) for key, value in found.items()
            }
        else:
            optimizer.state[parameter] = fresh
            others |= found.keys() if fresh else set()
    if not others:
        return ""
    kind = type(optimizer).__name__.lower()
    return f"the state of {kind} is reset; the checkpoint has another optimizer's ({', '.join(sorted(others))})"


def _fits(found: dict[str, Any], fresh: dict[str, Tensor]) -> bool:
    return found.keys() == fresh.keys() and all(
        isinstance(value, Tensor | int | float) and torch.as_tensor(value).shape == fresh[key].shape
        for key, value in found.items()
    )


def _like(value: Tensor, parameter: Tensor, fresh: Tensor) -> Tensor:
    """A saved optimizer tensor on the device, in the dtype and layout of one that starts."""
    if is_spread(parameter) and is_spread(fresh):
        return spread_like(value.to(fresh.device, fresh.dtype), parameter)
    return fresh.copy_(value)

"""What this process holds of a cut network, as a checkpoint that is about to be written."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from manyhands.checkpoint import layout
from manyhands.checkpoint.pieces import MODEL, OPTIMIZER, NetworkLayout, Region, TensorEntry, Tensors, size_of
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.stream import element_type
from manyhands.checkpoint.tensors import flatten_optimizer, parameter_names
from manyhands.checkpoint.write import Contents
from manyhands.core.errors import RunError
from manyhands.core.layouts import TensorLayout, whole


def held_contents(step: int, snapshot: Snapshot, network_layout: NetworkLayout, rank: int) -> Contents:
    """A rank's pieces as contents; `fetch` gives the rank's own region of a tensor, whichever is asked for.

    Raises:
        RunError: a piece doesn't have the shape that its layout says, or one of two names of a piece has no layout.
        TypeError: the state or the optimizer's state is not plain data.
    """
    _refuse_half_named(snapshot.model, network_layout)
    held: dict[str, Mapping[str, Tensor]] = {MODEL: snapshot.model}
    owners = {name: name for name in snapshot.model}
    texts = {layout.STATE: layout.text(snapshot.state)}
    if snapshot.optimizer is not None:
        branches, held[OPTIMIZER] = flatten_optimizer(snapshot.optimizer)
        texts[layout.OPTIMIZER_PLAN] = layout.text(branches)
        owners |= parameter_names(branches)
    tensors = {
        kind: {
            name: _describe(name, tensor, owners.get(name, ""), network_layout, rank) for name, tensor in named.items()
        }
        for kind, named in held.items()
    }

    def fetch(kind: str, name: str, region: Region) -> Tensor:
        return held[kind][name].detach().reshape(size_of(region))

    return Contents(step, network_layout.mesh, tensors, texts, fetch)


def _refuse_half_named(model: Mapping[str, Tensor], network_layout: NetworkLayout) -> None:
    """A piece that has two names is a piece under both, so a layout must be there for both."""
    pieces = {
        model[name].data_ptr(): name for name, lies in network_layout.layouts.items() if lies.cuts and name in model
    }
    for name, tensor in model.items():
        other = pieces.get(tensor.data_ptr())
        if other is not None and name not in network_layout.layouts and tensor.numel():
            raise RunError(f"{name} shares its values with {other}, which is cut, but has no layout itself", name)


def _describe(name: str, tensor: Tensor, owner: str, network_layout: NetworkLayout, rank: int) -> TensorEntry:
    """A tensor lies as the parameter does that it belongs to, where it has that one's shape; else it is whole."""
    shape = tuple(tensor.shape)
    lies: TensorLayout = network_layout.layouts.get(owner) or whole(shape)
    expected = lies.local_shape(network_layout.mesh, rank)
    if shape == expected:
        return TensorEntry(element_type(tensor.dtype), lies)
    # A count of steps is the same everywhere. Anything else of a cut parameter could be cut in any way.
    if name != owner and (tensor.ndim == 0 or not lies.cuts):
        return TensorEntry(element_type(tensor.dtype), whole(shape))
    what = f"rank {rank} holds {list(shape)} of {name}, its layout says {list(expected)}"
    raise RunError(
        what, name, ("this optimizer's state can't be cut as its parameters are; use sgd or adamw, or cut nothing",)
    )


def as_plain(tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """Types and layouts as JSON data, to be compared between processes."""
    return {
        kind: {name: [described.dtype.name, described.layout.as_plain()] for name, described in named.items()}
        for kind, named in tensors.items()
    }

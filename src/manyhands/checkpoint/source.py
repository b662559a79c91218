"""Opens any checkpoint for reading in parts: a folder, whole or in pieces, or another tool's file."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.checkpoint.described import is_pickled, open_description
from manyhands.checkpoint.foreign import read_foreign
from manyhands.checkpoint.pieces import ALONE, MODEL, OPTIMIZER, NetworkLayout
from manyhands.checkpoint.snapshot import Snapshot, fitted
from manyhands.checkpoint.stored import FileTensors, StoredTensors, in_memory
from manyhands.checkpoint.tensors import EXTRA_STATE, parameter_names, unflatten
from manyhands.checkpoint.verify import torn
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, unsharded


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading."""

    path: Path  # the folder or file
    form: str  # "whole", "pieces", "safetensors" or "pth"
    model: StoredTensors  # the network's tensors
    # the optimizer's tensors, by the names that `branches` has for them; None where there is none
    optimizer: StoredTensors | None = None
    # the optimizer's state with {"$tensor": name} in each tensor's place
    branches: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(
        default_factory=dict
    )  # step, epoch and so on; of another tool's file the extra state alone
    mesh: Mesh | None = None  # the processes that it is cut over; None where it is whole
    notes: tuple[str, ...] = ()  # what of the file is left out, as sentences

    @property
    def step(self) -> int:
        """Updates made; 0 where the file doesn't say."""
        return int(self.state.get("step", 0))

    def kinds(self) -> dict[str, StoredTensors]:
        """The tensors by kind: "model" and, where there is one, "optimizer"."""
        return {MODEL: self.model} | ({} if self.optimizer is None else {OPTIMIZER: self.optimizer})

    def layouts(self, network_layout: NetworkLayout) -> dict[str, dict[str, TensorLayout]]:
        """How each tensor lies under a cut, by kind and name. Raises UserError: the cut is of another network."""
        if strange := [name for name in network_layout.layouts if name not in self.model.described]:
            what = f"the plan shards {strange[0]}, which {self.path.name} lacks"
            raise UserError(what, f"layouts.{strange[0]}", ("use the plan that was made for this network",))
        found = {MODEL: {name: network_layout.of(name, self.model.shape(name)) for name in self.model.names()}}
        if self.optimizer is not None:
            owners = parameter_names(self.branches)
            found[OPTIMIZER] = {}
            for name in self.optimizer.names():
                lies = network_layout.layouts.get(owners.get(name, ""))
                shape = self.optimizer.shape(name)
                found[OPTIMIZER][name] = lies if lies is not None and lies.shape == shape else unsharded(shape)
        return found

    def snapshot(self, network_layout: NetworkLayout | None = None, rank: int = 0) -> Snapshot:
        """Everything whole, or the pieces that a rank holds under a cut, in the shapes of its network.

        Raises UserError: the cut is of another network, or the optimizer's state is damaged.
        """
        network_layout = network_layout or NetworkLayout(ALONE, {})
        layouts = self.layouts(network_layout)
        read = {
            kind: {name: stored.piece(name, layouts[kind][name], network_layout.mesh, rank) for name in stored.names()}
            for kind, stored in self.kinds().items()
        }
        try:
            optimizer = unflatten(self.branches, read[OPTIMIZER]) if OPTIMIZER in read else None
        except ValueError as error:
            raise torn(self.path, f"has unreadable content: {error}") from error
        return Snapshot(read[MODEL], optimizer, self.state)


def open_checkpoint(path: Path, *, verified: bool = False, wanted: Collection[str] = ()) -> Source:
    """Opens a checkpoint folder, whole or in pieces, or a .pth.tar, .pth, .pt or .safetensors file.

    A .pth file can't be read in parts, so it is whole in memory as long as the source is used. `verified`: another
    process has just compared the folder with its manifest. `wanted`: see `open_description`.

    Raises:
        TornCheckpointError: a file is missing or not what was committed.
        UserError: there is nothing, or what is there is no checkpoint.
    """
    if is_pickled(path):
        return _open_foreign(path, wanted)
    found = open_description(path, verified=verified, wanted=wanted)
    if path.is_file() and not found.kinds[MODEL].entries.keys() >= set(wanted):
        return _open_foreign(path, wanted)
    kinds = {kind: FileTensors(*placed) for kind, placed in found.kinds.items()}
    return Source(path, found.form, kinds[MODEL], kinds.get(OPTIMIZER), found.branches, found.state, found.mesh)


def _open_foreign(path: Path, wanted: Collection[str]) -> Source:
    read = fitted(read_foreign(path), wanted)
    notes = ("the optimizer state is left out, because parameters are numbered, not named",) if read.optimizer else ()
    state = {EXTRA_STATE: read.state[EXTRA_STATE]} if EXTRA_STATE in read.state else {}
    form = "pth" if is_pickled(path) else "safetensors"
    return Source(path, form, in_memory(read.model), state=state, notes=notes)

"""Opens any checkpoint for reading in parts: a folder, whole or in pieces, or another tool's file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from manyhands.checkpoint import layout
from manyhands.checkpoint.foreign import damaged, read_foreign, without_prefixes
from manyhands.checkpoint.pieces import (
    ALONE,
    MODEL,
    OPTIMIZER,
    NetworkLayout,
    TensorEntry,
    Tensors,
    all_held,
    read_description,
    whole_region,
)
from manyhands.checkpoint.plain_files import read_plain
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.stored import CODES_BACK, FileTensors, MemoryTensors, StoredTensors
from manyhands.checkpoint.tensors import parameter_names, unflatten, written_order
from manyhands.checkpoint.verify import read_manifest, torn, verify
from manyhands.core.errors import UserError
from manyhands.core.layouts import TensorLayout, whole
from manyhands.core.mesh import Mesh


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
    state: dict[str, Any] = field(default_factory=dict)  # step, epoch and so on; empty of another tool's file
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
        """How each tensor lies under a cut, by kind and name; an optimizer's tensor as its parameter does.

        Raises UserError: the cut is of another network.
        """
        if strange := [name for name in network_layout.layouts if name not in self.model.described]:
            what = f"the plan cuts {strange[0]}, which {self.path.name} doesn't have"
            raise UserError(what, f"layouts.{strange[0]}", ("use the plan that was made for this network",))
        found = {MODEL: {name: network_layout.of(name, self.model.shape(name)) for name in self.model.names()}}
        if self.optimizer is not None:
            owners = parameter_names(self.branches)
            found[OPTIMIZER] = {}
            for name in self.optimizer.names():
                lies = network_layout.layouts.get(owners.get(name, ""))
                shape = self.optimizer.shape(name)
                found[OPTIMIZER][name] = lies if lies is not None and lies.shape == shape else whole(shape)
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
            raise torn(self.path, f"holds what can't be read: {error}") from error
        return Snapshot(read[MODEL], optimizer, self.state)


def open_checkpoint(path: Path, *, verified: bool = False) -> Source:
    """Opens a checkpoint folder, whole or in pieces, or a .pth.tar, .pth, .pt or .safetensors file.

    A .pth file can't be read in parts, so it is whole in memory as long as the source is used. `verified`: another
    process has just compared the folder with its manifest.

    Raises:
        TornCheckpointError: a file is missing or not what was committed.
        UserError: there is nothing, or what is there is no checkpoint.
    """
    if path.is_file():
        return _open_safetensors(path) if path.name.endswith(".safetensors") else _open_foreign(path)
    if not verified:
        verify(path)
    names = read_manifest(path)["files"]
    try:
        state, branches = read_plain(path / layout.STATE), {}
        if layout.OPTIMIZER_PLAN in names:
            branches = read_plain(path / layout.OPTIMIZER_PLAN)
        mesh, kinds = _open_pieces(path, names) if layout.PIECES in names else (None, _open_whole(path, names))
    except (SafetensorError, OSError, ValueError) as error:
        raise torn(path, f"holds what can't be read: {error}") from error
    return Source(
        path, "whole" if mesh is None else "pieces", kinds[MODEL], kinds.get(OPTIMIZER), branches, state, mesh
    )


def _open_whole(path: Path, names: dict[str, Any]) -> dict[str, StoredTensors]:
    files = {MODEL: layout.MODEL, OPTIMIZER: layout.OPTIMIZER}
    return {kind: _of_file(path / name) for kind, name in files.items() if name in names}


def _open_pieces(path: Path, names: dict[str, Any]) -> tuple[Mesh, dict[str, StoredTensors]]:
    file = path / layout.PIECES
    mesh, kinds = read_description(read_plain(file), str(file))
    opened: dict[str, StoredTensors] = {}
    for kind, tensors in kinds.items():
        places: dict[str, list[Any]] = {name: [] for name in tensors}
        for rank, regions in all_held(tensors, mesh).items():
            piece = path / layout.piece_name(kind, rank, mesh.size)
            if piece.name not in names:
                raise torn(piece, "is missing: the manifest doesn't name it")
            for name, region in regions.items():
                places[name].append((piece, region))
        opened[kind] = FileTensors(tensors, places)
    return mesh, opened


def _of_file(file: Path, *, foreign: bool = False) -> FileTensors:
    """All tensors of one .safetensors file, each whole."""
    with safe_open(file, framework="pt", device="cpu") as opened:
        order = {name: name for name in written_order(opened)}
        keys = without_prefixes(order) if foreign else order
        described: Tensors = {}
        for name, key in keys.items():
            tensor = opened.get_slice(key)
            if tensor.get_dtype() not in CODES_BACK:
                raise UserError(f"{key} has the type {tensor.get_dtype()}, which is not known here", str(file))
            described[name] = TensorEntry(CODES_BACK[tensor.get_dtype()], whole(tuple(tensor.get_shape())))
    places = {name: [(file, whole_region(entry.layout.shape))] for name, entry in described.items()}
    return FileTensors(described, places, keys)


def _open_safetensors(path: Path) -> Source:
    if layout.is_piece(path):
        what = f"{path.name} holds one process's pieces of a checkpoint"
        raise UserError(what, str(path), (f"name the folder: {path.parent}",))
    try:
        return Source(path, "safetensors", _of_file(path, foreign=True))
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path) from error


def _open_foreign(path: Path) -> Source:
    read = read_foreign(path)
    described = {name: TensorEntry(tensor.dtype, whole(tuple(tensor.shape))) for name, tensor in read.model.items()}
    notes = ("its optimizer's state is left out, since it numbers the parameters",) if read.optimizer else ()
    return Source(path, "pth", MemoryTensors(described, read.model), notes=notes)

"""Opens any checkpoint and reads its tensors region by region, in any layout."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyhands.checkpoint.describe import (
    ALONE,
    BY_CODE,
    MODEL,
    OPTIMIZER,
    NetworkLayout,
    Region,
    TensorEntry,
    Tensors,
    is_pickled,
    open_description,
    size_of,
    whole_region,
)
from manyhands.checkpoint.files import torn
from manyhands.checkpoint.snapshot import EXTRA_STATE, Snapshot, fitted, parameter_names, unflatten
from manyhands.checkpoint.stream import element_type, torch_type
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.core.mesh import Mesh, TensorLayout, unsharded


class StoredTensors(ABC):
    """Tensors by name. Nothing is kept: each reading is of the values that are asked for."""

    def __init__(self, described: Tensors) -> None:
        # each tensor's type and how it is cut where it is stored, in the order in which they were written
        self.described = described

    def names(self) -> list[str]:
        return list(self.described)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.described[name].layout.shape

    def dtype(self, name: str) -> torch.dtype:
        return torch_type(self.described[name].dtype)

    def read(self, name: str, view: tuple[int, ...] | None = None, region: Region | None = None) -> Tensor:
        """The values in a region of a view, in memory of their own; by default all, in the tensor's own shape.

        Where the view isn't the one that was cut, the whole tensor is in memory for a moment.
        """
        stored = self.described[name].layout
        view = stored.shape if view is None else view
        region = whole_region(view) if region is None else region
        if view == stored.view:
            return self._take(name, region)
        everything = self._take(name, whole_region(stored.view)).reshape(view)
        piece = everything[slices(region)]
        return piece if piece.numel() == everything.numel() else piece.clone(memory_format=torch.contiguous_format)

    def piece(self, name: str, layout: TensorLayout, mesh: Mesh, rank: int) -> Tensor:
        """The piece that a rank holds under a layout, in the shape in which the network holds it."""
        return self.read(name, layout.view, layout.region(mesh, rank)).reshape(layout.local_shape(mesh, rank))

    @abstractmethod
    def _take(self, name: str, region: Region) -> Tensor:
        """A region of the view that was cut."""


class MemoryTensors(StoredTensors):
    """Tensors that are whole in memory, since their file can't be read in parts."""

    def __init__(self, described: Tensors, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(described)
        self._tensors = tensors

    def _take(self, name: str, region: Region) -> Tensor:
        return self._tensors[name][slices(region)].clone(memory_format=torch.contiguous_format)


class FileTensors(StoredTensors):
    """Tensors in .safetensors files."""

    def __init__(
        self, described: Tensors, places: Mapping[str, list[tuple[Path, Region]]], keys: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(described)
        self._places = places
        self._keys = keys or {}
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def _take(self, name: str, region: Region) -> Tensor:
        if [there for _, there in self._places[name]] == [region] and all(start < stop for start, stop in region):
            piece = self._open(self._places[name][0][0], name, region, region)
            return piece.clone(memory_format=torch.contiguous_format)
        taken = torch.empty(size_of(region), dtype=self.dtype(name))
        for file, there in self._places[name]:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, there, strict=True))
            if all(start < stop for start, stop in common):
                taken[slices(common, region)] = self._open(file, name, there, common)
        return taken

    def _open(self, file: Path, name: str, there: Region, wanted: Region) -> Tensor:
        """A part of one piece, which lies in the file's own pages; they are let go of with it."""
        try:
            start, entries = self._header(file)
            entry = entries[self._keys.get(name, name)]
            found = (BY_CODE.get(entry["dtype"]), tuple(entry["shape"]))
            if found != (self.described[name].dtype, size_of(there)):
                raise torn(file, f"holds {name} as {entry['dtype']} {list(found[1])}, expected {list(size_of(there))}")
            first, end = (start + offset for offset in entry["data_offsets"])
            piece = torch.from_file(str(file), shared=False, size=end, dtype=torch.uint8)[first:]
        except (SafetensorError, OSError, RuntimeError, KeyError, ValueError) as error:
            raise torn(file, f"can't be read: {error}") from error
        if first % self.dtype(name).itemsize:
            piece = piece.clone()  # some writers don't align what they write
        return piece.view(self.dtype(name)).reshape(found[1])[slices(wanted, there)]

    def _header(self, file: Path) -> tuple[int, dict[str, Any]]:
        """Where a file's values begin and what it says of them; checked and read once, since it may be long."""
        if file not in self._headers:
            with safe_open(file, framework="pt", device="cpu"), file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                self._headers[file] = (8 + length, parse_json(opened.read(length)))
        return self._headers[file]


def slices(region: Region, within: Region | None = None) -> tuple[slice, ...]:
    """A region as an index, into a tensor that begins where `within` does."""
    origins = [start for start, _ in within] if within else [0] * len(region)
    return tuple(slice(start - origin, stop - origin) for (start, stop), origin in zip(region, origins, strict=True))


def in_memory(tensors: Mapping[str, Tensor]) -> MemoryTensors:
    """Whole tensors in memory, by name, as if they were stored."""
    entries = {name: TensorEntry(element_type(t.dtype), unsharded(tuple(t.shape))) for name, t in tensors.items()}
    return MemoryTensors(entries, tensors)


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
    from manyhands.checkpoint.foreign import read_foreign

    read = fitted(read_foreign(path), wanted)
    notes = ("the optimizer state is omitted: its parameters are numbered, not named",) if read.optimizer else ()
    state = {EXTRA_STATE: read.state[EXTRA_STATE]} if EXTRA_STATE in read.state else {}
    form = "pth" if is_pickled(path) else "safetensors"
    return Source(path, form, in_memory(read.model), state=state, notes=notes)


def load(path: Path) -> Snapshot:
    """Verifies a checkpoint folder, whole or in pieces, then reads all of it.

    Raises:
        TornCheckpointError: it doesn't verify.
        UserError: a newer version of manyhands wrote it.
    """
    return open_checkpoint(path).snapshot()

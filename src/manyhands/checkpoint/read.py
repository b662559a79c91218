"""Opens any checkpoint and reads regions of its tensors in any layout."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyhands.checkpoint import describe
from manyhands.checkpoint.describe import MODEL, OPTIMIZER, NetworkLayout, Region, TensorEntry, Tensors, shape_of
from manyhands.checkpoint.files import torn_error
from manyhands.checkpoint.snapshot import EXTRA_STATE, Snapshot, flatten_optimizer, renamed, tensor_owners, unflatten
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.core.mesh import Mesh, TensorLayout, unsharded_layout


def torch_type(kind: describe.ElementType) -> torch.dtype:
    return getattr(torch, kind.name)


class StoredTensors:
    """Named tensors in files or memory. `read_region(name, region)` reads a region of a tensor in its stored view."""

    def __init__(self, described: Tensors, read_region: Callable[[str, Region], Tensor]) -> None:
        self.described, self._read_region = described, read_region

    def names(self) -> list[str]:
        return list(self.described)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.described[name].layout.shape

    def dtype(self, name: str) -> torch.dtype:
        return torch_type(self.described[name].dtype)

    def read(self, name: str, view: tuple[int, ...] | None = None, region: Region | None = None) -> Tensor:
        """Reads a region of a tensor, by default all, into new memory. `view`: the shape that `region` refers to."""
        stored = self.described[name].layout
        view = stored.shape if view is None else view
        region = describe.full_region(view) if region is None else region
        if view == stored.view:
            return self._read_region(name, region)
        everything = self._read_region(name, describe.full_region(stored.view)).reshape(view)
        piece = everything[region_slices(region)]
        return piece if piece.numel() == everything.numel() else piece.clone(memory_format=torch.contiguous_format)

    def shard(self, name: str, layout: TensorLayout, mesh: Mesh, rank: int) -> Tensor:
        """Reads the shard of a rank under a layout, with the shape `TensorLayout.local_shape`."""
        return self.read(name, layout.view, layout.region(mesh, rank)).reshape(layout.local_shape(mesh, rank))


class _FileReader:
    def __init__(self, placed: describe.LocatedTensors) -> None:
        self._placed = placed
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def read(self, name: str, region: Region) -> Tensor:
        places = self._placed.places[name]
        if [there for _, there in places] == [region] and all(start < stop for start, stop in region):
            return self._read_from(places[0][0], name, region, region).clone(memory_format=torch.contiguous_format)
        taken = torch.empty(shape_of(region), dtype=torch_type(self._placed.entries[name].dtype))
        for file, there in places:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, there, strict=True))
            if all(start < stop for start, stop in common):
                taken[region_slices(common, region)] = self._read_from(file, name, there, common)
        return taken

    def _read_from(self, file: Path, name: str, there: Region, wanted: Region) -> Tensor:
        expected = self._placed.entries[name].dtype
        try:
            if file not in self._headers:  # checked and read once, because a header may be long
                with safe_open(file, framework="pt", device="cpu"), file.open("rb") as opened:
                    length = int.from_bytes(opened.read(8), "little")
                    self._headers[file] = (8 + length, parse_json(opened.read(length)))
            start, entries = self._headers[file]
            entry = entries[self._placed.keys.get(name, name)]
            found = (describe.BY_CODE.get(entry["dtype"]), tuple(entry["shape"]))
            if found != (expected, shape_of(there)):
                raise torn_error(file, f"holds {name} as {entry['dtype']} {[*found[1]]}, expected {[*shape_of(there)]}")
            first, end = (start + offset for offset in entry["data_offsets"])
            piece = torch.from_file(str(file), shared=False, size=end, dtype=torch.uint8)[first:]
        except (SafetensorError, OSError, RuntimeError, KeyError, ValueError) as error:
            raise torn_error(file, f"can't be read: {error}") from error
        if first % expected.item_bytes:
            piece = piece.clone()  # some writers don't align tensors
        return piece.view(torch_type(expected)).reshape(found[1])[region_slices(wanted, there)]


def region_slices(region: Region, within: Region | None = None) -> tuple[slice, ...]:
    """Converts a region to an index into a tensor or, with `within`, into the part of a tensor in that region."""
    origins = [start for start, _ in within] if within else [0] * len(region)
    return tuple(slice(start - origin, stop - origin) for (start, stop), origin in zip(region, origins, strict=True))


def describe_tensor(tensor: Tensor, layout: TensorLayout | None = None) -> TensorEntry:
    """Describes a tensor, by default as unsharded. Accepts types that checkpoint files don't support."""
    kind = describe.ElementType(str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize)
    return TensorEntry(kind, layout or unsharded_layout(tuple(tensor.shape)))


def in_memory(tensors: Mapping[str, Tensor]) -> StoredTensors:
    entries = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    dense = torch.contiguous_format
    return StoredTensors(entries, lambda name, of: tensors[name][region_slices(of)].clone(memory_format=dense))


@dataclass(frozen=True)
class Source(describe.Description):
    """An open checkpoint. For a file that another tool wrote, `state` has only the modules' extra state."""

    stored: Mapping[str, StoredTensors] = field(default_factory=dict[str, StoredTensors])  # by kind

    @property
    def model(self) -> StoredTensors:
        return self.stored[MODEL]

    @property
    def optimizer(self) -> StoredTensors | None:
        return self.stored.get(OPTIMIZER)

    def layouts(self, network_layout: NetworkLayout) -> dict[str, dict[str, TensorLayout]]:
        """Returns {MODEL or OPTIMIZER: {tensor: layout}}. Raises UserError if the layouts are for another network."""
        given, hints = network_layout.layouts, ("use the plan that was made for this network",)
        if strange := [name for name in given if name not in self.model.described]:
            what = f"the plan shards {strange[0]}, which {self.path.name} lacks"
            raise UserError(what, f"layouts.{strange[0]}", hints)
        found: dict[str, dict[str, TensorLayout]] = {}
        for kind, stored in self.stored.items():
            owners = tensor_owners(self.branches) if kind == OPTIMIZER else {name: name for name in stored.names()}
            found[kind] = {}
            for name, entry in stored.described.items():
                layout, shape = given.get(owners.get(name, "")), entry.layout.shape
                if kind == MODEL and layout and layout.shape != shape:
                    what = f"{name} has the shape {list(shape)}, but the plan expects {list(layout.shape)}"
                    raise UserError(what, f"layouts.{name}", hints)
                found[kind][name] = layout if layout and layout.shape == shape else unsharded_layout(shape)
        return found

    def snapshot(self, network_layout: NetworkLayout | None = None, rank: int = 0) -> Snapshot:
        """Reads all tensors unsharded or, with `network_layout`, a rank's shards. Raises the errors of `layouts`."""
        network_layout = network_layout or NetworkLayout()
        layouts = self.layouts(network_layout)
        read = {
            kind: {name: stored.shard(name, layouts[kind][name], network_layout.mesh, rank) for name in stored.names()}
            for kind, stored in self.stored.items()
        }
        try:
            optimizer = unflatten(self.branches, read[OPTIMIZER]) if OPTIMIZER in read else None
        except ValueError as error:
            raise torn_error(self.path, f"has unreadable content: {error}") from error
        return Snapshot(read[MODEL], optimizer, self.state)


def open_checkpoint(path: Path, *, verified: bool = False, wanted: Collection[str] = ()) -> Source:
    """Opens a checkpoint folder or file. Reads .pth.tar, .pth and .pt into memory. See `open_description`."""
    found = None if describe.is_pickled(path) else describe.open_description(path, verified=verified, wanted=wanted)
    if found and (path.is_dir() or found.kinds[MODEL].entries.keys() >= set(wanted)):
        stored = {kind: StoredTensors(placed.entries, _FileReader(placed).read) for kind, placed in found.kinds.items()}
        return Source(**vars(found), stored=stored)
    from manyhands.checkpoint.foreign import read_foreign

    read = renamed(read_foreign(path), wanted)
    notes = ("the optimizer state is omitted: its parameters are numbered, not named",) if read.optimizer else ()
    state = {EXTRA_STATE: read.state[EXTRA_STATE]} if EXTRA_STATE in read.state else {}
    model, form = in_memory(read.model), "safetensors" if found else "pth"
    kinds = {MODEL: describe.LocatedTensors(model.described, {})}
    return Source(path, form, kinds, {}, state, None, notes, {MODEL: model})


def source_from_snapshot(snapshot: Snapshot) -> Source:
    branches, tensors = flatten_optimizer(snapshot.optimizer or {})
    stored = {MODEL: in_memory(snapshot.model)} | ({OPTIMIZER: in_memory(tensors)} if snapshot.optimizer else {})
    return Source(Path(), "whole", {}, branches, snapshot.state, stored=stored)


def load_checkpoint(path: Path) -> Snapshot:
    """Verifies a checkpoint folder, then reads all tensors unsharded."""
    return open_checkpoint(path).snapshot()

"""What a checkpoint says of itself, read without torch: a folder, whole or in pieces, or a .safetensors file."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from manyhands.checkpoint import layout
from manyhands.checkpoint.element_types import BY_CODE
from manyhands.checkpoint.pieces import (
    MODEL,
    OPTIMIZER,
    Region,
    TensorEntry,
    Tensors,
    all_held,
    read_description,
    whole_region,
)
from manyhands.checkpoint.plain_files import read_plain
from manyhands.checkpoint.verify import damaged, read_manifest, torn, verify
from manyhands.core.errors import UserError
from manyhands.core.files import UnreadableError, parse_json
from manyhands.core.mesh import Mesh, unsharded

# Components of names that DDP, torch.compile, Fabric, FSDP and activation checkpointing add.
_WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_AVERAGES = "n_averaged"  # the counter of torch.optim.swa_utils.AveragedModel, whose network is its `module`


class PlacedTensors(NamedTuple):
    """Tensors in .safetensors files."""

    entries: Tensors
    places: Mapping[str, list[tuple[Path, Region]]]  # the file and the region of each piece, by the tensor's name
    keys: Mapping[str, str] = {}  # what the files call them, where it isn't their name


@dataclass(frozen=True)
class Description:
    """A checkpoint, without its tensors' values."""

    path: Path  # the folder or file
    form: str  # "whole", "pieces", "safetensors" or "pth"
    kinds: Mapping[str, PlacedTensors]  # "model" and, where there is one, "optimizer"
    branches: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    notes: tuple[str, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """What it holds, as JSON data."""
        named = {kind: placed.entries for kind, placed in self.kinds.items()}
        axes = self.mesh.names if self.mesh else ()
        return {
            "checkpoint": str(self.path),
            "format": self.form,
            "step": int(self.state.get("step", 0)) if self.state else None,
            "mesh": self.mesh.as_dict() if self.mesh else None,
            "size_bytes": {kind: sum(one.size_bytes for one in entries.values()) for kind, entries in named.items()},
            **{
                kind: {name: _plain_entry(one, axes) for name, one in entries.items()}
                for kind, entries in named.items()
            },
            "notes": list(self.notes),
        }


def _plain_entry(entry: TensorEntry, axes: tuple[str, ...]) -> dict[str, Any]:
    lies = entry.layout
    return {
        "shape": list(lies.shape),
        "dtype": entry.dtype.name,
        "view": list(lies.view),
        "cuts": {str(dim): [axes[axis] for axis in cut] for dim, cut in lies.cuts},
        "size_bytes": entry.size_bytes,
    }


def is_pickled(path: Path) -> bool:
    """True for a file that torch alone can read: a .pth.tar, .pth or .pt."""
    return path.is_file() and not path.name.endswith(".safetensors")


def open_description(path: Path, *, verified: bool = False, wanted: Collection[str] = ()) -> Description:
    """Reads what a checkpoint folder or a .safetensors file says of its tensors.

    `verified`: the folder has just been compared with its manifest. `wanted`: the names that a file's tensors should
    get; see `fit_names`.

    Raises:
        TornCheckpointError: a file is missing or not what was committed.
        UserError: there is nothing, or what is there is no checkpoint.
    """
    if path.is_file():
        return _describe_safetensors(path, wanted)
    if not verified:
        verify(path)
    names = read_manifest(path)["files"]
    try:
        state, branches = read_plain(path / layout.STATE), {}
        if layout.OPTIMIZER_PLAN in names:
            branches = read_plain(path / layout.OPTIMIZER_PLAN)
        mesh, kinds = _place_pieces(path, names) if layout.PIECES in names else (None, _place_whole(path, names))
    except (SafetensorError, OSError, ValueError) as error:
        raise torn(path, f"has unreadable content: {error}") from error
    return Description(path, "whole" if mesh is None else "pieces", kinds, branches, state, mesh)


def _place_whole(path: Path, names: dict[str, Any]) -> dict[str, PlacedTensors]:
    files = {MODEL: layout.MODEL, OPTIMIZER: layout.OPTIMIZER}
    return {kind: _place_file(path / name) for kind, name in files.items() if name in names}


def _place_pieces(path: Path, names: dict[str, Any]) -> tuple[Mesh, dict[str, PlacedTensors]]:
    file = path / layout.PIECES
    mesh, kinds = read_description(read_plain(file), str(file))
    placed: dict[str, PlacedTensors] = {}
    for kind, tensors in kinds.items():
        places: dict[str, list[tuple[Path, Region]]] = {name: [] for name in tensors}
        for rank, regions in all_held(tensors, mesh).items():
            piece = path / layout.piece_name(kind, rank, mesh.size)
            if piece.name not in names:
                raise torn(piece, "is missing from the manifest")
            for name, region in regions.items():
                places[name].append((piece, region))
        placed[kind] = PlacedTensors(tensors, places)
    return mesh, placed


def _describe_safetensors(path: Path, wanted: Collection[str]) -> Description:
    if layout.is_piece(path):
        what = f"{path.name} holds one process's pieces of a checkpoint"
        raise UserError(what, str(path), (f"name the folder: {path.parent}",))
    try:
        return Description(path, "safetensors", {MODEL: _place_file(path, wanted)})
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path) from error


def _place_file(file: Path, wanted: Collection[str] = ()) -> PlacedTensors:
    """All tensors of one .safetensors file, each whole."""
    with safe_open(file, framework="numpy") as opened:  # no values are read; "pt" would import torch
        keys = {name: key for key, name in fit_names(written_order(opened), wanted).items()}
        entries: Tensors = {}
        for name, key in keys.items():
            tensor = opened.get_slice(key)
            if tensor.get_dtype() not in BY_CODE:
                raise UserError(f"{key} has the type {tensor.get_dtype()}, which this version can't read", str(file))
            entries[name] = TensorEntry(BY_CODE[tensor.get_dtype()], unsharded(tuple(tensor.get_shape())))
    places = {name: [(file, whole_region(entry.layout.shape))] for name, entry in entries.items()}
    return PlacedTensors(entries, places, keys)


def written_order(file: Any) -> list[str]:
    """The names in an open .safetensors file, in the order in which they were written where the file says it.

    Raises UnreadableError: what the file says of the order is no list of names.
    """
    names = list(file.keys())
    order = (file.metadata() or {}).get("order")
    written = parse_json(order) if order is not None else names
    if not isinstance(written, list) or not all(isinstance(name, str) for name in written):
        raise UnreadableError("the order of the tensors is not a list of names")
    return written if sorted(written) == sorted(names) else names


def fit_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Finds the tensors of a network in a file by name.

    A prefix is removed only where more names fit without it: a wrapper's (DDP, torch.compile, …), or one that all names
    share, such as "backbone." or "model.". The counter of an AveragedModel is left out.

    Args:
        saved: the names in the file.
        wanted: the names in the network's state dict; none if they aren't known.

    Returns:
        The network's name for each name in the file. A tensor that doesn't fit keeps its name; extra state, which
        `wanted` need not have, is renamed along with the tensors.
    """
    found, most = dict[str, str](), -1
    for known in ({name: name for name in wanted}, {_unwrapped(name): name for name in wanted}):
        for form in _shorter_forms([name for name in saved if name != _AVERAGES or name in wanted or not wanted]):
            fits = {name: known.get(short, short if is_extra(name) else name) for name, short in form.items()}
            count = sum(name in wanted for name in fits.values())
            if count > most and len(set(fits.values())) == len(fits):
                found, most = fits, count
    return found


def is_extra(name: str) -> bool:
    """Whether a name in a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == "_extra_state"


def _unwrapped(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _shorter_forms(names: list[str]) -> Iterator[dict[str, str]]:
    """By full name: the names, the names without wrappers, and without one shared first component after the other."""
    yield {name: name for name in names}
    short = {name: _unwrapped(name) for name in names}
    yield short
    while len({word.partition(".")[0] for word in short.values()}) == 1 and all("." in one for one in short.values()):
        short = {name: word.partition(".")[2] for name, word in short.items()}
        yield short

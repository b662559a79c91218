"""Describes the tensors of checkpoint folders (sharded or not) and .safetensors files. Imports no torch."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from manyhands.checkpoint import files
from manyhands.core.errors import UserError
from manyhands.core.files import UnreadableError, parse_json
from manyhands.core.mesh import Mesh, TensorLayout, layout_from_plain, make_mesh, unsharded_layout

# Name components added by DDP, torch.compile, Fabric, FSDP and activation checkpointing.
_WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_AVERAGES = "n_averaged"  # counter of torch.optim.swa_utils.AveragedModel, which holds the network as `module`


class ElementType(NamedTuple):
    """The data type of a tensor's elements."""

    name: str  # as in torch: float32
    item_bytes: int


# The keys are the type codes of the .safetensors format.
BY_CODE = {
    "F64": ElementType("float64", 8), "F32": ElementType("float32", 4), "F16": ElementType("float16", 2),
    "BF16": ElementType("bfloat16", 2), "F8_E4M3": ElementType("float8_e4m3fn", 1),
    "F8_E5M2": ElementType("float8_e5m2", 1), "F8_E4M3FNUZ": ElementType("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ElementType("float8_e5m2fnuz", 1), "F8_E8M0": ElementType("float8_e8m0fnu", 1),
    "C64": ElementType("complex64", 8), "I64": ElementType("int64", 8), "I32": ElementType("int32", 4),
    "I16": ElementType("int16", 2), "I8": ElementType("int8", 1), "U64": ElementType("uint64", 8),
    "U32": ElementType("uint32", 4), "U16": ElementType("uint16", 2), "U8": ElementType("uint8", 1),
    "BOOL": ElementType("bool", 1),
}  # fmt: skip
BY_NAME = {kind.name: kind for kind in BY_CODE.values()}

ALONE = Mesh((("dp", 1),))
MODEL, OPTIMIZER = "model", "optimizer"
KINDS = (MODEL, OPTIMIZER)
UNSHARDED_FILES = {MODEL: files.MODEL, OPTIMIZER: files.OPTIMIZER}

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorEntry:
    """The type and layout of one tensor."""

    dtype: ElementType
    layout: TensorLayout

    @property
    def size_bytes(self) -> int:
        return math.prod(self.layout.shape) * self.dtype.item_bytes


Tensors = dict[str, TensorEntry]


@dataclass(frozen=True)
class NetworkLayout:
    """The sharding of a network's tensors over a mesh of processes."""

    mesh: Mesh = ALONE
    # layouts of state_dict entries, by name; an entry without a layout is unsharded
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict[str, TensorLayout])


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def full_region(shape: tuple[int, ...]) -> Region:
    return tuple((0, length) for length in shape)


def shards_to_write(tensors: Tensors, mesh: Mesh, rank: int) -> dict[str, Region]:
    """Returns {tensor name: region} of the shards that a rank saves, which are not empty and on no lower rank."""
    return {
        name: region
        for name, described in tensors.items()
        if described.layout.first_holder(mesh, rank) == rank
        and math.prod(shape_of(region := described.layout.region(mesh, rank)))
    }


def written_shards(layout: TensorLayout, mesh: Mesh) -> list[tuple[int, Region]]:
    """Returns (rank, region) of each non-empty shard of a tensor, where `rank` is the rank that saves the shard."""
    return sorted((rank, region) for rank, region in layout.distinct_shards(mesh) if math.prod(shape_of(region)))


def describe_pieces(mesh: Mesh, tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """Returns the content of pieces.json: the mesh, and the layout and shards of each tensor."""
    content: dict[str, Any] = {"mesh": mesh.as_dict()}
    for kind, named in tensors.items():
        content[kind] = {
            name: {
                "dtype": described.dtype.name,
                "layout": described.layout.as_plain(),
                "pieces": [
                    {"file": files.piece_name(kind, rank, mesh.size), "region": [list(edge) for edge in region]}
                    for rank, region in written_shards(described.layout, mesh)
                ],
            }
            for name, described in named.items()
        }
    return content


def read_description(content: Any, where: str) -> tuple[Mesh, dict[str, Tensors]]:
    """Parses pieces.json into (mesh, {kind: tensors}). Raises UserError if it is invalid or contradicts the layouts."""
    hints = ("use another checkpoint: manyhands did not write this pieces.json",)
    try:
        mesh = make_mesh(content["mesh"], f"{where}: mesh")
        tensors = {
            kind: {
                name: TensorEntry(
                    BY_NAME[one["dtype"]], layout_from_plain(one["layout"], mesh, f"{where}: {kind} {name}")
                )
                for name, one in content[kind].items()
            }
            for kind in KINDS
            if kind in content
        }
        sound = MODEL in tensors and describe_pieces(mesh, tensors) == content
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("pieces.json has an invalid format", where, hints) from error
    if not sound:
        raise UserError("the saved shards don't match the layouts of the tensors", where, hints)
    return mesh, tensors


class LocatedTensors(NamedTuple):
    """Tensors and their positions in .safetensors files."""

    entries: Tensors
    places: Mapping[str, list[tuple[Path, Region]]]  # file and region of each shard, by tensor name
    keys: Mapping[str, str] = {}  # keys in the files, by tensor name; by default the name itself


@dataclass(frozen=True)
class Description:
    """The contents of a checkpoint, except the values of tensors."""

    path: Path  # folder or file
    form: str  # "whole", "pieces", "safetensors" or "pth"
    kinds: Mapping[str, LocatedTensors]  # keys: "model" and, if it was saved, "optimizer"
    branches: dict[str, Any] = field(default_factory=dict)  # optimizer state with {"$tensor": name} in place of tensors
    state: dict[str, Any] = field(default_factory=dict)  # step, epoch and so on
    mesh: Mesh | None = None  # None: unsharded
    notes: tuple[str, ...] = ()  # messages about omitted data

    def as_plain(self) -> dict[str, Any]:
        named = {kind: placed.entries for kind, placed in self.kinds.items()}
        axes = self.mesh.names if self.mesh else ()

        def plain_entry(entry: TensorEntry) -> dict[str, Any]:
            cuts = {str(dim): [axes[axis] for axis in cut] for dim, cut in entry.layout.cuts}
            shapes = {"shape": list(entry.layout.shape), "dtype": entry.dtype.name, "view": list(entry.layout.view)}
            return {**shapes, "cuts": cuts, "size_bytes": entry.size_bytes}

        return {
            "checkpoint": str(self.path),
            "format": self.form,
            "step": self.state.get("step"),
            "mesh": self.mesh.as_dict() if self.mesh else None,
            "size_bytes": {kind: sum(one.size_bytes for one in entries.values()) for kind, entries in named.items()},
            **{kind: {name: plain_entry(one) for name, one in entries.items()} for kind, entries in named.items()},
            "notes": list(self.notes),
        }


def is_pickled(path: Path) -> bool:
    """Returns True for a file such as .pth, which only torch can read, and False for .safetensors."""
    return path.is_file() and not path.name.endswith(".safetensors")


def open_description(path: Path, *, verified: bool = False, wanted: Collection[str] = ()) -> Description:
    """Reads the description of a checkpoint folder or a .safetensors file.

    With `verified`, skips the check that files match the manifest. `wanted`: the names in the network's state dict, to
    which `fit_names` maps a file's names. Raises UserError (folders: TornCheckpointError) if it is missing or damaged.
    """
    if files.is_piece(path):
        what = f"{path.name} contains only one process's shards of a checkpoint"
        raise UserError(what, str(path), (f"use the folder instead: {path.parent}",))
    if path.is_file():
        try:
            return Description(path, "safetensors", {MODEL: _locate_in_file(path, wanted)})
        except (SafetensorError, OSError, ValueError) as error:
            raise files.damaged_error(path) from error
    if not verified:
        files.verify_checkpoint(path)
    names = files.read_manifest(path)["files"]
    try:
        state, branches = files.read_plain(path / files.STATE), {}
        if files.OPTIMIZER_PLAN in names:
            branches = files.read_plain(path / files.OPTIMIZER_PLAN)
        if files.PIECES in names:
            mesh, kinds = _locate_pieces(path, names)
        else:
            present = {kind: name for kind, name in UNSHARDED_FILES.items() if name in names}
            mesh, kinds = None, {kind: _locate_in_file(path / name) for kind, name in present.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise files.torn_error(path, f"has unreadable content: {error}") from error
    return Description(path, "whole" if mesh is None else "pieces", kinds, branches, state, mesh)


def _locate_pieces(path: Path, names: dict[str, Any]) -> tuple[Mesh, dict[str, LocatedTensors]]:
    file = path / files.PIECES
    mesh, kinds = read_description(files.read_plain(file), str(file))
    placed: dict[str, LocatedTensors] = {}
    for kind, tensors in kinds.items():
        places: dict[str, list[tuple[Path, Region]]] = {name: [] for name in tensors}
        for name, entry in tensors.items():
            for rank, region in written_shards(entry.layout, mesh):
                piece = path / files.piece_name(kind, rank, mesh.size)
                if piece.name not in names:
                    raise files.torn_error(piece, "is missing from the manifest")
                places[name].append((piece, region))
        placed[kind] = LocatedTensors(tensors, places)
    return mesh, placed


def _locate_in_file(file: Path, wanted: Collection[str] = ()) -> LocatedTensors:
    with safe_open(file, framework="numpy") as opened:  # reads no values; "pt" would import torch
        keys = {name: key for key, name in fit_names(written_order(opened), wanted).items()}
        entries: Tensors = {}
        for name, key in keys.items():
            tensor = opened.get_slice(key)
            if tensor.get_dtype() not in BY_CODE:
                raise UserError(f"{key} has the type {tensor.get_dtype()}, which this version can't read", str(file))
            entries[name] = TensorEntry(BY_CODE[tensor.get_dtype()], unsharded_layout(tuple(tensor.get_shape())))
    places = {name: [(file, full_region(entry.layout.shape))] for name, entry in entries.items()}
    return LocatedTensors(entries, places, keys)


def written_order(file: Any) -> list[str]:
    """Returns a file's tensor names in the order in its metadata. Raises UnreadableError if that is invalid."""
    names = list(file.keys())
    order = (file.metadata() or {}).get("order")
    written = parse_json(order) if order is not None else names
    if not isinstance(written, list) or not all(isinstance(name, str) for name in written):
        raise UnreadableError('the metadata entry "order" is not a list of tensor names')
    return written if sorted(written) == sorted(names) else names


def fit_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Maps the names in a file to the names in a network's state dict, `wanted`, which is empty if unknown.

    Removes the prefix of a wrapper (DDP, torch.compile, …) or of all names, such as "backbone." or "model.", if more
    names match without it. Skips the counter of an AveragedModel. A tensor without a match keeps its name. Extra state
    loses the same prefix as the tensors.
    """
    found, most = dict[str, str](), -1
    for known in ({name: name for name in wanted}, {_without_wrapper_prefixes(name): name for name in wanted}):
        for form in _candidate_names([name for name in saved if name != _AVERAGES or name in wanted or not wanted]):
            fits = {name: known.get(short, short if is_extra_state(name) else name) for name, short in form.items()}
            count = sum(name in wanted for name in fits.values())
            if count > most and len(set(fits.values())) == len(fits):
                found, most = fits, count
    return found


def is_extra_state(name: str) -> bool:
    """Returns True for the name of a module's extra state in a state dict."""
    return name.rpartition(".")[2] == "_extra_state"


def _without_wrapper_prefixes(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _candidate_names(names: list[str]) -> Iterator[dict[str, str]]:
    """Yields dicts from each name to a candidate: the same name, without wrappers, then without common prefixes."""
    yield {name: name for name in names}
    short = {name: _without_wrapper_prefixes(name) for name in names}
    yield short
    while len({word.partition(".")[0] for word in short.values()}) == 1 and all("." in one for one in short.values()):
        short = {name: word.partition(".")[2] for name, word in short.items()}
        yield short

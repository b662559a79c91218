"""What a checkpoint in pieces says of its tensors: how each is cut, and which file has which piece."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.checkpoint import layout as files
from manyhands.checkpoint.element_types import BY_NAME, ElementType
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, Region, TensorLayout, layout_from_plain, make_mesh, unsharded

# One process alone.
ALONE = Mesh((("dp", 1),))
MODEL, OPTIMIZER = "model", "optimizer"
KINDS = (MODEL, OPTIMIZER)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its type, and how it is cut."""

    dtype: ElementType
    layout: TensorLayout

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.layout.shape) * self.dtype.item_bytes


Tensors = dict[str, TensorEntry]


@dataclass(frozen=True)
class NetworkLayout:
    """How a network is cut."""

    mesh: Mesh  # the processes
    # of the entries of its state_dict, by name; one that isn't there is whole on every process
    layouts: Mapping[str, TensorLayout]

    def of(self, name: str, shape: tuple[int, ...]) -> TensorLayout:
        """The layout of an entry whose whole shape is known. Raises UserError: the cut is of another shape."""
        layout = self.layouts.get(name) or unsharded(shape)
        if layout.shape != shape:
            what = f"{name} has the shape {list(shape)}, but the plan expects {list(layout.shape)}"
            raise UserError(what, f"layouts.{name}", ("use the plan that was made for this network",))
        return layout


def size_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def whole_region(shape: tuple[int, ...]) -> Region:
    return tuple((0, length) for length in shape)


def first_held(tensors: Tensors, mesh: Mesh, rank: int) -> dict[str, Region]:
    """What a rank writes: the pieces that have values and that no lower rank holds too."""
    return {
        name: region
        for name, described in tensors.items()
        if described.layout.first_holder(mesh, rank) == rank
        and math.prod(size_of(region := described.layout.region(mesh, rank)))
    }


def all_held(tensors: Tensors, mesh: Mesh) -> dict[int, dict[str, Region]]:
    """`first_held` of every rank that writes something; work for each piece, not for each rank and tensor."""
    held: dict[int, dict[str, Region]] = {}
    for name, described in tensors.items():
        for rank, region in described.layout.pieces(mesh):
            if math.prod(size_of(region)):
                held.setdefault(rank, {})[name] = region
    return held


def describe_pieces(mesh: Mesh, tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """The content of pieces.json; tensors by kind: of the model and, where there is one, of the optimizer."""
    content: dict[str, Any] = {"mesh": mesh.as_dict()}
    for kind, named in tensors.items():
        written: dict[str, list[tuple[int, Region]]] = {name: [] for name in named}
        for rank, regions in sorted(all_held(named, mesh).items()):
            for name, region in regions.items():
                written[name].append((rank, region))
        content[kind] = {
            name: {
                "dtype": described.dtype.name,
                "layout": described.layout.as_plain(),
                "pieces": [
                    {"file": files.piece_name(kind, rank, mesh.size), "region": [list(edge) for edge in region]}
                    for rank, region in written[name]
                ],
            }
            for name, described in named.items()
        }
    return content


def read_description(content: Any, where: str) -> tuple[Mesh, dict[str, Tensors]]:
    """Reads what `describe_pieces` wrote. Raises UserError: it isn't what the layouts say."""
    hints = ("use another checkpoint: manyhands did not write this pieces.json",)
    try:
        mesh = make_mesh(content["mesh"], f"{where}: mesh")
        tensors = {
            kind: {
                name: TensorEntry(
                    BY_NAME[entry["dtype"]], layout_from_plain(entry["layout"], mesh, f"{where}: {kind} {name}")
                )
                for name, entry in content[kind].items()
            }
            for kind in KINDS
            if kind in content
        }
        sound = MODEL in tensors and describe_pieces(mesh, tensors) == content
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("pieces.json describes no pieces", where, hints) from error
    if not sound:
        raise UserError("the pieces don't match the layouts", where, hints)
    return mesh, tensors

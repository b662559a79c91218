"""Marks on parameters and buffers, which record how they are sharded, and the conversion of marks to layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, unsharded_layout

BUFFERS = "cut_buffers"  # the module attribute with marks of buffers, which lose their own attributes when moved
_FORMS = (
    'give layerwise_parallel=True, "tp" or ("tp", 1), and shape=(…) of the full tensor',
    "or use tp.shard(full_tensor, dim), which shards and marks a tensor",
)


@dataclass(frozen=True)
class ShardMark:
    """A record of how a parameter or buffer is sharded: the sharded dimensions, and the full shape."""

    cuts: tuple[tuple[int, tuple[str, ...]], ...]  # (dimension, names of mesh axes); no names: all axes but the first
    shape: tuple[int, ...] | None = None  # the full shape; None: the shard's length times the number of processes


class Parameter(nn.Parameter):
    """A parameter that may be sharded over processes, registered like any nn.Parameter.

    Its gradient is not summed over the axes that shard it.

    Args:
        data: this process's shard, or the full tensor if layerwise_parallel is False.
        requires_grad: as in torch.
        layerwise_parallel: the mesh axis and the sharded dimension, such as ("tp", 1), or only the axis, such as "tp".
            True: all axes except the first, or the only axis. False: the parameter is not sharded.
        shape: the full shape; None: all shards have the same length. If layerwise_parallel names no dimension, the
            sharded one is the first in which `shape` and the shard's shape differ, or 0 without `shape`.
    """

    mark: ShardMark | None

    def __new__(
        cls,
        data: Any = None,
        requires_grad: bool = True,
        *,
        layerwise_parallel: bool | str | tuple[str, int] = False,
        shape: Sequence[int] | None = None,
    ) -> "Parameter":
        tensor = torch.empty(0) if data is None else torch.as_tensor(data).detach()
        made = super().__new__(cls, tensor, requires_grad)
        made.mark = _to_mark(layerwise_parallel, tuple(tensor.shape), None if shape is None else tuple(shape))
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Does nothing; `__new__` initializes the parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parameter":
        if id(self) not in memo:
            copied = type(self)(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            copied.mark = self.mark
            memo[id(self)] = copied
        return memo[id(self)]


def _to_mark(
    given: bool | str | tuple[str, int], piece: tuple[int, ...], shape: tuple[int, ...] | None
) -> ShardMark | None:
    if given is False:
        if shape is not None and shape != piece:
            raise UserError(f"shape={shape}, but the unsharded tensor has shape {piece}", "Parameter", _FORMS)
        return None
    names = () if given is True else (given,) if isinstance(given, str) else tuple(given[:1])
    dim = given[1] if isinstance(given, tuple) and len(given) == 2 else 0
    if not all(isinstance(name, str) for name in names) or not isinstance(dim, int):
        raise UserError(f"layerwise_parallel can't be {given!r}", "Parameter", _FORMS)
    if not -len(piece) <= dim < len(piece) or (shape is not None and len(shape) != len(piece)):
        raise UserError(f"shard {piece} doesn't fit dimension {dim} of {shape or 'the tensor'}", "Parameter", _FORMS)
    if shape is not None and not isinstance(given, tuple):
        differing = [place for place, length in enumerate(shape) if length != piece[place]]
        dim = differing[0] if differing else dim
    return ShardMark(((dim % len(piece), names),), shape)


def state_dict_layouts(model: nn.Module, mesh: Mesh, rank: int) -> dict[str, TensorLayout]:
    """Returns {state_dict name: layout of the tensor} from the marks. Raises UserError if one doesn't fit the mesh."""
    found: dict[str, TensorLayout] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            path, _, word = name.rpartition(".")
            module, piece = model.get_submodule(path), tuple(tensor.shape)
            mark = getattr(module, BUFFERS, {}).get(word) or getattr(getattr(module, word), "mark", None)
            found[name] = _layout_of(mark, piece, mesh, rank, name) if mark else unsharded_layout(piece)
    return found


def _layout_of(mark: ShardMark, piece: tuple[int, ...], mesh: Mesh, rank: int, name: str) -> TensorLayout:
    every = tuple(range(1, len(mesh.axes))) or (0,)  # for a mark that names no axes
    cuts = tuple(sorted((dim, axis_indices(names, mesh, name) if names else every) for dim, names in mark.cuts))
    parts = {dim: mesh.shard_count(axes) for dim, axes in cuts}
    shape = mark.shape or tuple(length * parts.get(dim, 1) for dim, length in enumerate(piece))
    layout = TensorLayout(shape, shape, cuts)
    if layout.local_shape(mesh, rank) != piece:
        what = f"the shard of {name} on rank {rank} has shape {piece}, expected {layout.local_shape(mesh, rank)}"
        raise UserError(what, f"full shape {shape}, mesh {mesh}", _FORMS)
    return layout


def axis_indices(names: Sequence[str], mesh: Mesh, where: str) -> tuple[int, ...]:
    """Returns the indices of the named mesh axes, ascending. Raises UserError for an unknown or repeated name."""
    unknown = [name for name in names if name not in mesh.names]
    if unknown:
        hints = (f"use one of the axes {', '.join(mesh.names)}", "or change --mesh")
        raise UserError(f'the mesh {mesh} has no axis "{unknown[0]}"', where, hints)
    if len(set(names)) != len(names):
        raise UserError(f"an axis is named twice: {', '.join(names)}", where)
    return tuple(sorted(mesh.names.index(name) for name in names))

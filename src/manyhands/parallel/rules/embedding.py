"""Embeddings: a row of a table for each number."""

from typing import cast

import torch
from torch import Tensor, nn

from manyhands.core.mesh import bounds
from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid
from manyhands.parallel.placement import SUM, WHOLE

KIND = "embedding"


def matches(op: Op) -> bool:
    """True for torch's own, but for those that renormalise their table or scale gradients by frequency."""
    layer = op.module
    return (
        op.forward is nn.Embedding.forward
        and cast(nn.Embedding, layer).max_norm is None
        and not cast(nn.Embedding, layer).scale_grad_by_freq
    )


def describe(op: Op, inputs: list[Op]) -> None:
    """n, o (features of a row), v (rows: the vocabulary), r."""
    layer = cast(nn.Embedding, op.module)
    last = len(op.extent.dims) - 1
    op.feature = last
    op.letters = whole_or_batch(op, inputs)
    op.letters["o"] = Loop((WHOLE,), last, {"weight": 1}, length=layer.embedding_dim)
    op.letters["v"] = Loop((WHOLE,), SUM, {"weight": 0}, length=layer.num_embeddings)


class SomeRows(nn.Module):
    """A part of the table: zeros for numbers whose row another process has."""

    def __init__(self, layer: nn.Embedding, first: int, count: int) -> None:
        super().__init__()
        self._layer, self._first, self._count = (layer,), first, count

    def forward(self, numbers: Tensor) -> Tensor:
        """int64 [N, …] to a term of [N, …, E]."""
        place = numbers - self._first
        here = (place >= 0) & (place < self._count)
        rows = self._layer[0].weight[place.clamp(0, self._count - 1)]
        return torch.where(here[..., None], rows, torch.zeros_like(rows))


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = [axis for axis, letter in enumerate(letters) if letter == "v"]
    layer = cast(nn.Embedding, op.module)
    if "v" not in letters:
        layer.embedding_dim = layer.weight.shape[1]
        return None
    edges = bounds(layer.num_embeddings, grid.parts(cut))
    place = grid.place(cut)
    return SomeRows(layer, edges[place], edges[place + 1] - edges[place])

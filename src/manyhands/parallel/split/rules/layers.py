"""Sharding rules of layers with parameters. strategy.py explains the letters, such as n."""

from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from manyhands.core.mesh import shard_boundaries
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import SPREAD, SUM, WHOLE
from manyhands.parallel.split.graph import Op, Sharding, whole_or_batch
from manyhands.parallel.split.rules import rule

Layer = TypeVar("Layer", bound=nn.Module)
PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def _axes_with_letter(letters: tuple[str, ...], letter: str) -> list[int]:
    return [axis for axis, one in enumerate(letters) if one == letter]


class PartialLayer(nn.Module, Generic[Layer]):
    """Base class of layers that compute one term of a sum over processes. Only the first process adds the bias."""

    def __init__(self, layer: Layer, first: bool) -> None:
        super().__init__()
        self._layer = (layer,)  # not registered as a submodule, because the user's network has it
        # A factor of 0, so that gradients are computed in the same order on all processes.
        self._share = 1.0 if first else 0.0

    @property
    def layer(self) -> Layer:
        return self._layer[0]

    def bias_term(self, bias: Tensor | None) -> Tensor | None:
        """Returns the bias [out] on the first process, and zeros on the others."""
        return None if bias is None else bias * self._share


class ShardedAttention(PartialLayer[nn.MultiheadAttention]):
    """Computes self-attention with this process's heads, which is a term [N, L, E] of the sum over all heads."""

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        layer = self.layer
        mixed = F.linear(tokens, layer.in_proj_weight, layer.in_proj_bias)
        batch, length = tokens.shape[:2]
        query, key, value = mixed.view(batch, length, 3, -1, layer.head_dim).permute(2, 0, 3, 1, 4)
        dropout = layer.dropout if layer.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        joined = seen.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(joined, layer.out_proj.weight, self.bias_term(layer.out_proj.bias)), None


def _local_attention(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = _axes_with_letter(letters, "h")
    return ShardedAttention(cast(nn.MultiheadAttention, op.module), grid.first(cut)) if cut else None


@rule("attention", lambda op: op.forward is nn.MultiheadAttention.forward, _local_attention)
def attention(op: Op, inputs: list[Op]) -> None:
    """Lets attention be sharded by samples (n) and, in self-attention without masks, by heads (h)."""
    layer = cast(nn.MultiheadAttention, op.module)
    op.feature = 2
    op.letters = whole_or_batch(op, inputs)
    reason = _why_heads_unsharded(op, layer)
    if reason:
        op.letters["h"] = reason
        return
    heads, width, whole = layer.num_heads, layer.head_dim, layer.embed_dim
    op.views = {
        "in_proj_weight": (3, heads, width, whole),
        "in_proj_bias": (3, heads, width),
        "out_proj.weight": (whole, heads, width),
    }
    cuts = {"in_proj_weight": 1, "in_proj_bias": 1, "out_proj.weight": 1}
    op.letters["h"] = Sharding((SPREAD,), SUM, cuts, frozenset({"out_proj.bias"}), heads)


def _why_heads_unsharded(op: Op, layer: nn.MultiheadAttention) -> str:
    node = op.node
    if len(op.sources) != 1 or node is None or len(set(node.args[:3])) != 1:
        return "heads are split only for self-attention without masks"
    if set(node.kwargs) - {"need_weights", "average_attn_weights"} or node.kwargs.get("need_weights", True):
        return "heads are split only for self-attention without masks and weights (need_weights=False)"
    if not layer.batch_first or layer.bias_k is not None or layer.add_zero_attn or layer.in_proj_weight is None:
        return "heads are split only with batch_first and without extra keys"
    return ""


@rule("batch_norm", lambda op: isinstance(op.module, _BatchNorm))
def batch_norm(op: Op, inputs: list[Op]) -> None:
    """Lets BatchNorm be sharded by samples (n) and by channels (c). Statistics cover the job's groups of samples."""
    op.feature = 1
    # Samples mix only within BatchNorm groups, whose statistics the executor synchronizes.
    op.batchwise = all(one.batchwise for one in inputs) and bool(op.extent.rows or not op.batched)
    op.letters = whole_or_batch(op, inputs)
    if op.module is not None and op.module.running_mean is None:
        op.letters["n"] = "without running statistics, evaluation mixes samples"
    channels = op.extent.dims[1]
    others = set(op.parameters()) - {*PER_CHANNEL, "num_batches_tracked"}
    if others:
        op.letters["c"] = f"the module has more parameters than BatchNorm ({', '.join(sorted(others))})"
        return
    op.letters["c"] = Sharding((1,), 1, dict.fromkeys(PER_CHANNEL, 0), length=channels)


class PartialConvolution(PartialLayer[_ConvNd]):
    """Convolves this process's input channels [N, C / parts, …], which gives a term of the sum [N, out, …]."""

    def forward(self, pictures: Tensor) -> Tensor:
        layer = self.layer
        return layer._conv_forward(pictures, layer.weight, self.bias_term(layer.bias))  # type: ignore[attr-defined]


def _local_convolution(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    layer = cast(_ConvNd, op.module)
    layer.groups //= grid.parts(_axes_with_letter(letters, "c"))
    inner = _axes_with_letter(letters, "i")
    return PartialConvolution(layer, grid.first(inner)) if inner and layer.bias is not None else None


_CONVOLUTIONS = {nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward}  # transposed convolutions have no rule


@rule("conv", lambda op: op.forward in _CONVOLUTIONS, _local_convolution)
def convolution(op: Op, inputs: list[Op]) -> None:
    """Lets a convolution be sharded by samples (n), output channels (o), input channels (i) and groups (c)."""
    layer = cast(_ConvNd, op.module)
    op.feature = 1
    op.letters = whole_or_batch(op, inputs)
    if layer.groups == 1:
        op.letters["o"] = Sharding((SPREAD,), 1, {"weight": 0, "bias": 0}, length=layer.out_channels)
        op.letters["i"] = Sharding((1,), SUM, {"weight": 1}, frozenset({"bias"}), layer.in_channels)
    else:
        op.letters["c"] = Sharding((1,), 1, {"weight": 0, "bias": 0}, length=layer.groups, even=True)


class ShardedEmbedding(nn.Module):
    """Looks up rows [N, …, E] of indices [N, …] in this process's shard of a table, zeros for rows of others."""

    def __init__(self, layer: nn.Embedding, first: int, count: int) -> None:
        super().__init__()
        self._layer, self._first, self._count = (layer,), first, count

    def forward(self, numbers: Tensor) -> Tensor:
        place = numbers - self._first
        here = (place >= 0) & (place < self._count)
        rows = self._layer[0].weight[place.clamp(0, self._count - 1)]
        return torch.where(here[..., None], rows, torch.zeros_like(rows))


def _local_embedding(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = _axes_with_letter(letters, "v")
    layer = cast(nn.Embedding, op.module)
    if "v" not in letters:
        layer.embedding_dim = layer.weight.shape[1]
        return None
    edges = shard_boundaries(layer.num_embeddings, grid.parts(cut))
    place = grid.place(cut)
    return ShardedEmbedding(layer, edges[place], edges[place + 1] - edges[place])


def _is_plain_embedding(op: Op) -> bool:
    layer: Any = op.module
    return op.forward is nn.Embedding.forward and layer.max_norm is None and not layer.scale_grad_by_freq


@rule("embedding", _is_plain_embedding, _local_embedding)
def embedding(op: Op, inputs: list[Op]) -> None:
    """Lets an embedding be sharded by samples (n), features (o) and rows of the table, the vocabulary (v)."""
    layer = cast(nn.Embedding, op.module)
    last = len(op.extent.dims) - 1
    op.feature = last
    op.letters = whole_or_batch(op, inputs)
    op.letters["o"] = Sharding((WHOLE,), last, {"weight": 1}, length=layer.embedding_dim)
    op.letters["v"] = Sharding((WHOLE,), SUM, {"weight": 0}, length=layer.num_embeddings)


class PartialLinear(PartialLayer[nn.Linear]):
    """Applies a layer to this process's input features [N, …, in / parts], for a term of the sum [N, …, out]."""

    def forward(self, features: Tensor) -> Tensor:
        layer = self.layer
        return F.linear(features, layer.weight, self.bias_term(layer.bias))


def _local_linear(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    layer = cast(nn.Linear, op.module)
    inner = _axes_with_letter(letters, "i")
    return PartialLinear(layer, grid.first(inner)) if inner and layer.bias is not None else None


@rule("linear", lambda op: op.forward is nn.Linear.forward, _local_linear)
def linear(op: Op, inputs: list[Op]) -> None:
    """Lets a linear layer be sharded by samples (n), output features (o) and input features (i)."""
    layer = cast(nn.Linear, op.module)
    last = len(op.extent.dims) - 1
    op.feature = last
    op.letters = whole_or_batch(op, inputs)
    if last:
        op.letters["o"] = Sharding((SPREAD,), last, {"weight": 0, "bias": 0}, length=layer.out_features)
        op.letters["i"] = Sharding((last,), SUM, {"weight": 1}, frozenset({"bias"}), layer.in_features)


def _local_group_norm(op: Op, letters: tuple[str, ...], grid: Grid) -> None:
    """Reduces a GroupNorm to this process's groups. The number of channels per group stays the same."""
    parts = grid.parts(_axes_with_letter(letters, "c"))
    if parts > 1:
        layer = cast(nn.GroupNorm, op.module)
        layer.num_groups //= parts
        layer.num_channels //= parts


@rule("norm", lambda op: op.forward in {nn.LayerNorm.forward, nn.GroupNorm.forward}, _local_group_norm)
def norm(op: Op, inputs: list[Op]) -> None:
    """Lets LayerNorm and GroupNorm be sharded by samples (n), and GroupNorm by groups of channels (c)."""
    op.letters = whole_or_batch(op, inputs)
    op.feature = inputs[0].feature
    if isinstance(op.module, nn.GroupNorm):
        op.feature = 1
        op.letters["c"] = Sharding((1,), 1, {"weight": 0, "bias": 0}, length=op.module.num_groups, even=True)

"""Multi-head attention."""

from typing import Any, cast

import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.parallel.graph import Loop, Op, whole_or_batch
from manyhands.parallel.grid import Grid
from manyhands.parallel.partial import PartialLayer
from manyhands.parallel.placement import SPREAD, SUM

KIND = "attention"


def matches(op: Op) -> bool:
    return op.forward is nn.MultiheadAttention.forward


def describe(op: Op, inputs: list[Op]) -> None:
    """n, h (heads, for self-attention without masks), r."""
    layer = cast(nn.MultiheadAttention, op.module)
    op.feature = 2
    op.letters = whole_or_batch(op, inputs)
    reason = _why_whole(op, layer)
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
    op.letters["h"] = Loop((SPREAD,), SUM, cuts, frozenset({"out_proj.bias"}), heads)


def _why_whole(op: Op, layer: nn.MultiheadAttention) -> str:
    node = op.node
    if len(op.sources) != 1 or node is None or len(set(node.args[:3])) != 1:
        return "heads are split only for self-attention without masks"
    if set(node.kwargs) - {"need_weights", "average_attn_weights"} or node.kwargs.get("need_weights", True):
        return "heads are split only for self-attention without masks and weights (need_weights=False)"
    if not layer.batch_first or layer.bias_k is not None or layer.add_zero_attn or layer.in_proj_weight is None:
        return "heads are split only with batch_first and without extra keys"
    return ""


class SomeHeads(PartialLayer[nn.MultiheadAttention]):
    """Self-attention of some of the heads: a term of the sum over all heads."""

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[N, L, E] to a term of [N, L, E], and no weights."""
        layer = self.layer
        mixed = F.linear(tokens, layer.in_proj_weight, layer.in_proj_bias)
        batch, length = tokens.shape[:2]
        query, key, value = mixed.view(batch, length, 3, -1, layer.head_dim).permute(2, 0, 3, 1, 4)
        dropout = layer.dropout if layer.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        joined = seen.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(joined, layer.out_proj.weight, self.own(layer.out_proj.bias)), None


def local(op: Op, letters: tuple[str, ...], grid: Grid) -> nn.Module | None:
    cut = [axis for axis, letter in enumerate(letters) if letter == "h"]
    return SomeHeads(cast(nn.MultiheadAttention, op.module), grid.first(cut)) if cut else None
